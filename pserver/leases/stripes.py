"""How trainers that step together divide an epoch: joint batches of ``trainers * batch_size``
samples, of which each trainer takes its part.

Positions of the lease table are in the order of stripes: first all that is trainer 0's, in the
order in which it trains on them, then all that is trainer 1's.  So a stripe is one interval.
:class:`Stripes` says where in the epoch's permutation such a position lies.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from pserver.leases.intervals import Range


class Stripes:
    """The stripes of an epoch.

    The last, smaller joint batch is divided evenly.  Where it has fewer samples than there are
    trainers, it joins the one before.

    Args:
        samples: of the epoch.
        batch_size: of one trainer.
        trainers: how many divide it; 1 where leases are dealt on demand, and a position is its
            place in the permutation.
        drop_last: leaves out a last joint batch that is not full.

    Raises:
        ValueError: there are fewer samples than trainers, or ``drop_last`` leaves none.

    Attributes:
        samples: those that are dealt out.
        left_out: those that ``drop_last`` leaves out.
    """

    def __init__(self, samples: int, batch_size: int, trainers: int, drop_last: bool) -> None:
        joint = batch_size * trainers
        full, rest = divmod(samples, joint)
        if samples < trainers or (drop_last and not full):
            least = joint if drop_last else trainers
            raise ValueError(f"expected at least {least} samples, got {samples}")
        self._batch, self._trainers = batch_size, trainers
        self.left_out = rest if drop_last else 0
        self.samples = samples - self.left_out
        joins = 0 < rest < trainers and not drop_last
        self._regular = full - joins  # joint batches, before a last one of another size
        each, self._more = divmod(self.samples - self._regular * joint, trainers)
        self._last = each
        self.extra = [int(joins and i < self._more) for i in range(trainers)]
        self._starts = [0]
        for trainer in range(trainers):
            self._starts.append(
                self._starts[-1] + self._regular * batch_size + self._share(trainer)
            )

    def _share(self, trainer: int) -> int:
        """Of the last joint batch."""
        return self._last + (trainer < self._more)

    def of(self, trainer: int) -> Range:
        """The positions of a trainer's stripe."""
        return self._starts[trainer], self._starts[trainer + 1]

    def places(self, start: int, stop: int) -> Iterator[Range]:
        """Where positions lie in the permutation: ranges, in the order of the positions."""
        while start < stop:
            trainer = bisect_right(self._starts, start) - 1
            while self._starts[trainer + 1] <= start:
                trainer += 1
            batch, offset = divmod(start - self._starts[trainer], self._batch)
            if batch < self._regular:
                size = self._batch
                first = (batch * self._trainers + trainer) * self._batch
            else:
                offset = start - self._starts[trainer] - self._regular * self._batch
                size = self._share(trainer)
                before = trainer * self._last + min(trainer, self._more)
                first = self._regular * self._batch * self._trainers + before
            count = min(stop - start, size - offset)
            yield first + offset, first + offset + count
            start += count
