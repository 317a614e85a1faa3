"""The source of a pass over samples in memory, which leases deal out: each trainer has the batches
that it has in memory, and those of a lost trainer are read from the files again.

A position is a batch: the positions of a trainer are its batches, in their order.  Every trainer
knows the samples of all batches, including the others': see :mod:`trainer.data.datasets`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import numpy as np

from pserver.leases.epoch import Epoch, Range
from trainer.data.batches import Array, Column, Columns, joined, samples_at
from trainer.data.datasets import NUMBER, Parses, SamplePlaces, SharedOrder, Shuffles, batch_bounds
from trainer.data.pieces import Piece
from trainer.samplers.file_samples import in_words
from trainer.samplers.leased_part import LeasedPart

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The data of a pass.

    Attributes:
        pieces: of all files.
        counts: of each piece, its samples.
        shuffles: that were made last.
        size: of a batch.
        drop_last: see :func:`batch_bounds`.
    """

    pieces: Sequence[Piece]
    counts: Sequence[int]
    shuffles: Shuffles
    size: int
    drop_last: bool

    def epoch(self, number: int, name: str, trainers: int, batches: int, together: bool) -> Epoch:
        """The pass, for the lease table.

        Args:
            number: among the passes of the job.
            name: of the dataset.
            trainers: of the job.
            batches: of each of them.
            together: whether they step together.
        """
        more = tuple(self.counts), self.shuffles, self.size, self.drop_last
        return Epoch(
            number,
            name,
            in_words(self.pieces, *more),
            sum(self.counts),
            1,  # a position is a batch
            trainers,
            unit="batches",
            positions=trainers * batches,
            uneven=not together,
        )


class Division:
    """The batches of a pass, divided among a number of trainers.

    Args:
        order: of the samples.
        size: of a batch.
        drop_last: see :func:`batch_bounds`.

    Raises:
        ValueError: a trainer has fewer samples than there are batches.

    Attributes:
        batches: of each trainer.
    """

    def __init__(self, order: SharedOrder, size: int, drop_last: bool) -> None:
        self._order, self._bounds = order, batch_bounds(order.counts, size, drop_last)
        self.batches = len(self._bounds[0]) - 1
        self._of: dict[int, Array] = {}  # samples of a trainer

    def samples(self, ranges: Iterable[Range]) -> Array:
        """int64 [samples]: the indices of the samples at positions, in their order."""
        found = [np.empty(0, np.int64)]
        for start, stop in ranges:
            while start < stop:
                trainer, batch = divmod(start, self.batches)
                until = min(stop, (trainer + 1) * self.batches)
                bounds = self._bounds[trainer]
                own = self._samples_of(trainer)
                found.append(own[bounds[batch] : bounds[batch + until - start]])
                start = until
        return np.concatenate(found)

    def _samples_of(self, trainer: int) -> Array:
        if trainer not in self._of:
            self._of[trainer] = self._order.of(trainer)
        return self._of[trainer]


class HeldSamples:
    """The samples of a pass: those in memory, and those that are read again.

    Args:
        columns: that are in memory, with the samples' numbers.
        places: of the samples, as this job's trainers number them.
        loaded: the data of the pass.
        parses: gives the samples of pieces, in their order.
        keep: called with the columns, including those that were read again.
    """

    def __init__(
        self,
        columns: Mapping[str, Column],
        places: SamplePlaces,
        loaded: Loaded,
        parses: Parses,
        keep: Callable[[dict[str, Column]], None],
    ) -> None:
        self._places, self._pieces, self._counts = places, loaded.pieces, loaded.counts
        self._parses, self._keep = parses, keep
        self._take(dict(columns))

    def _take(self, columns: dict[str, Column]) -> None:
        self._columns = columns
        found = self._places.indices(np.asarray(columns[NUMBER]))
        self._rows = np.argsort(found, kind="stable")
        self._sorted = found[self._rows]

    def columns(self, indices: Array, wanted: Callable[[], Array]) -> Columns:
        """Samples, in this order.

        Args:
            wanted: returns all indices that will be needed, where one is not in memory.

        Raises:
            WrongLine, OSError: see :meth:`trainer.data.lines.LineFormat.read`.
            ValueError: a piece has more samples than were counted, or fewer.
        """
        if len(self._missing(indices)):
            self._read(self._missing(np.concatenate((indices, wanted()))))
        rows = self._rows[np.searchsorted(self._sorted, indices)]
        slots = {name: column for name, column in self._columns.items() if name != NUMBER}
        return samples_at(slots, rows)

    def _missing(self, indices: Array) -> Array:
        """The indices that are not in memory, in order, each once."""
        at = np.minimum(np.searchsorted(self._sorted, indices), max(len(self._sorted) - 1, 0))
        held = self._sorted[at] == indices if len(self._sorted) else np.zeros(len(indices), bool)
        missing: Array = np.unique(indices[~held])
        return missing

    def _read(self, indices: Array) -> None:
        """Reads samples from the files again."""
        pieces, places = self._places.pieces(indices)
        named = np.unique(pieces)
        log.warning(
            "reads %d samples of %d pieces of files again, which are leased to this trainer and "
            "not in its memory: the trainer that had them was lost",
            len(indices),
            len(named),
        )
        found: list[Columns] = [self._columns]
        with closing(self._parses(self._pieces[each] for each in named)) as parsed:
            for piece, each in zip(named.tolist(), parsed, strict=True):
                each.expect(self._counts[piece], self._pieces[piece])
                mine = pieces == piece
                columns = samples_at(joined(each.blocks), places[mine])
                found.append(columns | {NUMBER: self._places.numbers(indices[mine])})
        self._take(joined(found))
        self._keep(self._columns)


class MemoryBatches:
    """The batches of one pass: see :class:`trainer.samplers.sample_pass.Source`.

    Args:
        division: returns the batches for a number of trainers.
        held: the samples.
    """

    def __init__(self, division: Callable[[int], Division], held: HeldSamples) -> None:
        self._division, self._held = division, held
        self._divided: dict[int, Division] = {}

    def items(self, dealer: LeasedPart) -> Iterator[tuple[Sequence[Range], Columns]]:
        """See :class:`trainer.samplers.sample_pass.Source`."""
        for batch in dealer.batches():
            division = self._of(dealer.stripes)
            coming = partial(division.samples, dealer.held)
            yield batch, self._held.columns(division.samples(batch), coming)

    def _of(self, stripes: int) -> Division:
        if stripes not in self._divided:
            self._divided[stripes] = self._division(stripes)
        return self._divided[stripes]
