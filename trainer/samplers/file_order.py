"""The order in which trainers that step together divide the samples of files."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from pserver.leases.epoch import Epoch, Stripes


@dataclass(frozen=True, slots=True)
class SampleSpan:
    """Consecutive samples of one piece.

    Attributes:
        place: of the piece in the order.
        first, stop: of the piece's samples.
        end: the place after the last piece of their share.
    """

    place: int
    first: int
    stop: int
    end: int


class FileOrder:
    """The order of an epoch.

    Trainer i of n reads files i, i + n, ..., as in jobs without leases.  All samples in this order,
    those of trainer 0's files, then those of trainer 1's, are cut into equal shares: a trainer
    whose files have more than its share leaves the rest to the trainer before it, or behind it.

    Args:
        epoch: the pass; it has samples.
        files: of each piece, the number of its file.
        counts: of each piece, its samples.
        stripes: trainers that divide it.

    Attributes:
        pieces: those with samples, in this order.
    """

    def __init__(
        self, epoch: Epoch, files: Sequence[int], counts: Sequence[int], stripes: int
    ) -> None:
        held = (each for each in range(len(files)) if counts[each])
        self.pieces = sorted(held, key=lambda each: (files[each] % stripes, each))
        self._ends = list(accumulate(counts[each] for each in self.pieces))
        size = epoch.batch_size
        dealt, whole = (
            Stripes(epoch.samples, size, stripes, drop_last)
            for drop_last in (epoch.drop_last, False)
        )
        self._starts = [dealt.of(trainer)[0] for trainer in range(stripes)]
        self._begins = [whole.of(trainer)[0] for trainer in range(stripes)]
        self._stops = [whole.of(trainer)[1] for trainer in range(stripes)]

    def spans(self, start: int, stop: int) -> Iterator[SampleSpan]:
        """The spans of positions, in their order."""
        while start < stop:
            trainer = bisect_right(self._starts, start) - 1
            last = trainer + 1 == len(self._starts)
            until = stop if last else min(stop, self._starts[trainer + 1])
            begin = self._begins[trainer] + start - self._starts[trainer]
            end = bisect_right(self._ends, self._stops[trainer] - 1) + 1
            yield from self._spans(begin, begin + until - start, end)
            start = until

    def _spans(self, begin: int, until: int, end: int) -> Iterator[SampleSpan]:
        place = bisect_right(self._ends, begin)
        while begin < until:
            first = self._ends[place - 1] if place else 0
            stop = min(until, self._ends[place])
            yield SampleSpan(place, begin - first, stop - first, end)
            begin, place = stop, place + 1
