"""One pass over the files of a dataset whose samples were counted: where trainers step together
each has an equal share, which it reads in the order of its files; where they do not, and there are
few pieces, each has what it asks for.

A position is a sample.  All pieces of the files were counted before, so all trainers have equally
many batches, and a lost trainer's share can be divided to the sample.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

from pserver.leases.epoch import Epoch, Range
from trainer.data.batches import Batch, Columns, joined, tensors_of
from trainer.data.datasets import Parses
from trainer.data.lines import Parsed
from trainer.data.pieces import Piece
from trainer.samplers.file_order import FileOrder
from trainer.samplers.leased_files import in_words


def striped_epoch(
    number: int,
    name: str,
    pieces: Sequence[Piece],
    counts: Sequence[int],
    batching: tuple[int, bool],
    stripes: int,
) -> Epoch:
    """A pass over pieces, for the lease table.

    Args:
        number: among the passes of the job.
        name: of the dataset.
        counts: of each piece, its samples.
        batching: the batch size, and whether a last batch that is not full is left out.
        stripes: trainers that step together; 0: they do not, and leases are dealt on demand.

    Raises:
        ValueError: there are too few samples for them.
    """
    size, drop_last = batching
    seed = in_words(pieces, tuple(counts))
    epoch = Epoch(number, name, seed, sum(counts), size, stripes, drop_last)
    try:
        epoch.divided()
    except ValueError as error:
        of = f" of {stripes} trainers that step together" if stripes else ""
        raise ValueError(
            f"a QueueDataset{of}: {error}: make smaller batches, or give set_filelist trainer_id=0 "
            "and trainers=1 where every trainer is to read all files"
        ) from None
    return epoch


class StripedFiles:
    """The items of positions: samples of files; see
    :class:`~trainer.samplers.leased_pass.PassItems`.

    One thread uses it.  It reads piece after piece, and parses ahead, up to the end of a trainer's
    share; where a lease continues elsewhere, it begins there.

    Args:
        epoch: the pass.
        pieces: of all files.
        files: of each piece, the number of its file.
        counts: of each piece, its samples.
        parses: gives the samples of pieces, in their order.
    """

    def __init__(
        self,
        epoch: Epoch,
        pieces: Sequence[Piece],
        files: Sequence[int],
        counts: Sequence[int],
        parses: Parses,
    ) -> None:
        self._epoch, self._pieces, self._files = epoch, pieces, files
        self._counts, self._parses = counts, parses
        self._orders: dict[int, FileOrder] = {}
        self._reading: Generator[Parsed] | None = None
        self._order: FileOrder | None = None  # in which it reads
        self._place = -1  # of the last parsed piece
        self._parsed = Parsed([])

    def at(self, batch: Sequence[Range], stripes: int) -> Columns:
        """The samples of a batch.

        Raises:
            WrongLine, OSError: see :meth:`trainer.data.lines.LineFormat.read`.
            ValueError: a piece has more samples than were counted, or fewer.
        """
        order = self._of(stripes)
        found = list[Columns]()
        for start, stop in batch:
            for span in order.spans(start, stop):
                self._go_to(order, span.place, span.end)
                found += self._parsed.part(span.first, span.stop)
        return joined(found)

    def batches(self, draws: Iterator[Columns]) -> Iterator[Batch]:
        """The tensors of the drawn samples; stops reading at the end."""
        try:
            for columns in draws:
                yield tensors_of(columns)
        finally:
            self._close()

    def _of(self, stripes: int) -> FileOrder:
        stripes = max(1, stripes)  # on demand they are dealt in one order
        if stripes not in self._orders:
            made = FileOrder(self._epoch, self._files, self._counts, stripes)
            self._orders[stripes] = made
        return self._orders[stripes]

    def _go_to(self, order: FileOrder, place: int, end: int) -> None:
        """Parses the piece at a place; those up to ``end`` may be parsed ahead."""
        if order is self._order and place == self._place:
            return
        piece = order.pieces[place]
        parsed = None
        if order is self._order and place == self._place + 1 and self._reading is not None:
            parsed = next(self._reading, None)
        if parsed is None:
            self._close()
            self._reading = self._parses(self._pieces[each] for each in order.pieces[place:end])
            parsed = next(self._reading)
        parsed.expect(self._counts[piece], self._pieces[piece])
        self._order, self._place, self._parsed = order, place, parsed

    def _close(self) -> None:
        reading, self._reading = self._reading, None
        self._order, self._place, self._parsed = None, -1, Parsed([])
        if reading is not None:
            reading.close()
