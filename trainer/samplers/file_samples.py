"""The sources of passes over the files of a dataset.

A position is a sample.  Where nothing has counted the samples, leases deal them out piece by piece:
a position is that of its piece's segment, and its number there, and a lease has the rest of a
piece.  Its progress is part of each step's record, so another trainer can continue from there.

Where the samples were counted, trainers that step together have equal shares, each in the order of
its files; those that do not, and share few pieces, have what they ask for.  All have equally many
batches then, and a lost trainer's share can be divided to the sample.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import PurePath

from pserver.leases.epoch import WIDTH, Epoch, Range
from trainer.data.batches import Columns, joined, part, samples_of
from trainer.data.datasets import Parses
from trainer.data.lines import Parsed
from trainer.data.pieces import Piece
from trainer.samplers.file_order import FileOrder
from trainer.samplers.leased_part import LeasedPart
from trainer.samplers.sample_pass import Dealer, PositionItems


def in_words(pieces: Sequence[Piece], *more: object) -> str:
    """A text that identifies pieces, the same on every trainer.

    Args:
        more: further values that must be the same.
    """
    # hosts may have their files in folders of other names
    said = repr([(PurePath(each.path).name, each.begin, each.end) for each in pieces] + [*more])
    return f"{len(pieces)} pieces, checksum {zlib.crc32(said.encode()):08x}"


# ---- pieces ----


def epoch_of_pieces(
    number: int, name: str, pieces: Sequence[Piece], batch_size: int, drop_last: bool
) -> Epoch:
    """A pass over pieces, for the lease table.

    Args:
        number: among the passes of the job.
        name: of the dataset.
    """
    seed = in_words(pieces)
    return Epoch(number, name, seed, 0, batch_size, 0, drop_last, segments=len(pieces))


class FilePieces:
    """The samples of pieces that leases deal out on demand: see
    :class:`trainer.samplers.sample_pass.Source`.

    Args:
        epoch: the pass.
        pieces: of all files.
        parses: gives the samples of pieces, in their order.
    """

    def __init__(self, epoch: Epoch, pieces: Sequence[Piece], parses: Parses) -> None:
        self._epoch, self._pieces, self._parses = epoch, pieces, parses

    def items(self, dealer: LeasedPart) -> Iterator[tuple[Sequence[Range], Columns]]:
        """See :class:`trainer.samplers.sample_pass.Source`."""
        size = self._epoch.batch_size
        for ranges, columns in cut(self._blocks(dealer), size):
            if self._epoch.drop_last and samples_of(columns) < size:
                dealer.leave_out(ranges)
            else:
                yield ranges, columns

    def _blocks(self, dealer: LeasedPart) -> Iterator[tuple[int, Columns]]:
        """Consecutive samples: the position of the first one, and their columns."""
        reading: deque[Range] = deque()  # the leases of the pieces that are parsed

        def wanted() -> Iterator[Piece]:
            for ranges in dealer.batches():
                for start, stop in ranges:
                    reading.append((start, stop))
                    yield self._pieces[start // WIDTH]

        with closing(self._parses(wanted())) as found:
            for parsed in found:
                yield from self._leased(dealer, parsed, *reading.popleft())

    def _leased(
        self, dealer: LeasedPart, parsed: Parsed, start: int, stop: int
    ) -> Iterator[tuple[int, Columns]]:
        """The leased samples of a piece."""
        segment = start // WIDTH
        dealer.end(segment, parsed.samples)
        at = segment * WIDTH
        for block in parsed.blocks:
            samples = samples_of(block)
            first, last = max(start, at), min(stop, at + samples)
            if first < last:
                yield first, part(block, first - at, last - at)
            at += samples


def cut(blocks: Iterable[tuple[int, Columns]], size: int) -> Iterator[tuple[list[Range], Columns]]:
    """Batches of consecutive samples, which may span several blocks; the last one has the rest.

    Args:
        blocks: the position of the first sample, and the columns.

    Returns:
        For each batch its positions, and its columns.
    """
    held: list[tuple[int, Columns]] = []
    have = 0
    for start, block in blocks:
        at, samples = 0, samples_of(block)
        while have + samples - at >= size:
            stop = at + size - have
            held.append((start + at, part(block, at, stop)))
            yield _batch(held)
            held, have, at = [], 0, stop
        if at < samples:
            held.append((start + at, part(block, at, samples)))
            have += samples - at
    if held:
        yield _batch(held)


def _batch(held: Sequence[tuple[int, Columns]]) -> tuple[list[Range], Columns]:
    ranges: list[Range] = []
    for start, columns in held:
        stop = start + samples_of(columns)
        if ranges and ranges[-1][1] == start:
            ranges[-1] = ranges[-1][0], stop
        else:
            ranges.append((start, stop))
    return ranges, joined([columns for _, columns in held])


# ---- counted files ----


def epoch_of_samples(
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


class CountedFiles(PositionItems):
    """The samples of files that were counted.

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

    def items(self, dealer: Dealer) -> Iterator[tuple[Sequence[Range], Columns]]:
        """See :class:`trainer.samplers.sample_pass.Source`; stops reading at the end."""
        try:
            yield from super().items(dealer)
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
