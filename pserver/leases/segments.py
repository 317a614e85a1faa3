"""Runs of positions of which nobody knows the length before somebody has met their end.

An epoch over files has a segment for each piece of a file, in samples.  One over an iterable has a
segment, in batches; where trainers step together, one for each of them: position ``p`` of segment
``s`` of ``n`` is batch ``p * n + s``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pserver.leases.intervals import Range

WIDTH = 2**40  # positions from the beginning of a segment to that of the next one
OPEN = 2**31  # a range that is longer than this has no known end


class Segments:
    """The segments of an epoch, and their ends.

    The last position of a segment never exists, so that ranges of two segments never meet.

    Args:
        count: how many there are.
        together: trainers that step together divide one run of batches: its end is that of all.

    Attributes:
        ends: the lengths that are known, by segment; with ``together`` that of the run, by 0.
    """

    def __init__(self, count: int, together: bool) -> None:
        self._count, self._together = count, together
        self.ends: dict[int, int] = {}
        self._furthest: dict[int, int] = {}  # positions that exist, as decided steps say

    @property
    def known(self) -> bool:
        """Whether all ends are known."""
        return len(self.ends) == (1 if self._together else self._count)

    @property
    def positions(self) -> int:
        """How many positions have a known end behind them."""
        return sum(self._length(each) for each in range(self._count)) if self.ends else 0

    @property
    def left_out(self) -> int:
        """Batches at the end that are too few for each trainer to have one."""
        return self.ends.get(0, 0) % self._count if self._together else 0

    def of(self, segment: int) -> Range:
        """The positions that a segment may have."""
        return segment * WIDTH, (segment + 1) * WIDTH - 1

    def decided(self, start: int, stop: int) -> None:
        """These positions exist: a step has consumed them."""
        segment = start // WIDTH
        length = stop - segment * WIDTH
        self._furthest[segment] = max(length, self._furthest.get(segment, 0))

    def end(self, segment: int, length: int) -> Iterator[Range]:
        """A trainer has met an end: gives the positions that do not exist.

        Raises:
            ValueError: there is no such segment, or no data ends there; another trainer has got
                more of it, or less; or there are fewer batches than trainers that step together.
        """
        if not 0 <= segment < (1 if self._together else self._count):
            raise ValueError(f"expected a segment below {self._count}, got {segment}")
        if self._together and length < self._count:
            raise ValueError(f"expected at least {self._count} batches, got {length}")
        most = WIDTH * (self._count if self._together else 1)
        if length >= most:
            raise ValueError(f"expected an end before {most}, got {length}")
        known = self.ends.get(segment, length)
        rows = length // self._count if self._together else length
        mine = range(self._count) if self._together else [segment]
        furthest = max(self._furthest.get(each, 0) for each in mine)
        if known != length or rows < furthest:
            more = known if known != length else f"at least {furthest}"
            raise ValueError(
                f"expected an end behind {more}, as another trainer has met it, got {length}: "
                "every trainer must read the same data in the same order"
            )
        if segment in self.ends:
            return
        self.ends[segment] = length
        for each in mine:
            yield each * WIDTH + rows, self.of(each)[1]

    def _length(self, segment: int) -> int:
        if self._together:
            return self.ends.get(0, 0) // self._count
        return self.ends.get(segment, 0)

    def existing(self, ranges: Iterable[Range]) -> list[Range]:
        """Ranges without what lies behind a known end."""
        found = []
        for start, stop in ranges:
            segment = start // WIDTH
            if (0 if self._together else segment) in self.ends:
                stop = min(stop, segment * WIDTH + self._length(segment))
            if start < stop:
                found.append((start, stop))
        return found

    def plain(self) -> list[list[int]]:
        """The ends, as JSON can hold them."""
        return [[segment, length] for segment, length in self.ends.items()]

    def restore(self, plain: list[list[int]]) -> None:
        """The ends that :meth:`plain` gave."""
        self.ends = {segment: length for segment, length in plain}


def place_of(position: int, stripes: int) -> int:
    """Which batch of an iterable a position is.

    Args:
        stripes: trainers that step together; 0 or 1: leases are dealt on demand.
    """
    return position % WIDTH * max(1, stripes) + position // WIDTH
