"""Sets of whole numbers, kept as disjoint intervals."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

Range = tuple[int, int]  # start, stop: half open


class Intervals:
    """A set of whole numbers.  Finding is O(log n) in the number of intervals; neighbours merge.

    Args:
        ranges: disjoint.

    Raises:
        ValueError: a range is empty or turned round, or two overlap.

    Attributes:
        size: how many numbers there are.
    """

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self.size = 0
        for start, stop in ranges:
            self.add(start, stop)

    def __iter__(self) -> Iterator[Range]:
        return zip(list(self._starts), list(self._stops), strict=True)

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, start: int, stop: int) -> None:
        """Adds numbers that are not there.

        Raises:
            ValueError: one is, or there are none.
        """
        if not 0 <= start < stop:
            raise ValueError(f"expected a range, got {start} to {stop}")
        at = bisect_right(self._starts, start)
        before = at > 0 and self._stops[at - 1] > start
        if before or (at < len(self._starts) and self._starts[at] < stop):
            raise ValueError(f"a number from {start} to {stop} is there already")
        joins = at > 0 and self._stops[at - 1] == start
        meets = at < len(self._starts) and self._starts[at] == stop
        if joins and meets:
            self._stops[at - 1] = self._stops[at]
            del self._starts[at], self._stops[at]
        elif joins:
            self._stops[at - 1] = stop
        elif meets:
            self._starts[at] = start
        else:
            self._starts.insert(at, start)
            self._stops.insert(at, stop)
        self.size += stop - start

    def covers(self, start: int, stop: int) -> bool:
        """Whether all of these numbers are there."""
        at = bisect_right(self._starts, start) - 1
        return at >= 0 and start < stop <= self._stops[at]

    def remove(self, start: int, stop: int) -> None:
        """Removes numbers that are there.

        Raises:
            ValueError: one is not.
        """
        if not self.covers(start, stop):
            raise ValueError(f"expected {start} to {stop} to be there")
        at = bisect_right(self._starts, start) - 1
        first, last = self._starts[at], self._stops[at]
        left = [(a, b) for a, b in ((first, start), (stop, last)) if a < b]
        self._starts[at : at + 1] = [a for a, _ in left]
        self._stops[at : at + 1] = [b for _, b in left]
        self.size -= stop - start

    def discard(self, start: int, stop: int) -> None:
        """Removes those of these numbers that are there."""
        at = bisect_right(self._stops, start)
        while at < len(self._starts) and self._starts[at] < stop:
            self.remove(max(start, self._starts[at]), min(stop, self._stops[at]))
            at = bisect_right(self._stops, start)

    @property
    def first(self) -> Range:
        """The first of the intervals.

        Raises:
            IndexError: there are none.
        """
        return self._starts[0], self._stops[0]

    def take(self, count: int) -> list[Range]:
        """Removes the first ``count`` numbers, or all.

        Returns:
            Their ranges.
        """
        whole, left = 0, min(count, self.size)
        taken = []
        while left:
            start = self._starts[whole]
            stop = min(self._stops[whole], start + left)
            taken.append((start, stop))
            left -= stop - start
            if stop == self._stops[whole]:
                whole += 1
            else:
                self._starts[whole] = stop
        del self._starts[:whole], self._stops[:whole]
        self.size -= sum(stop - start for start, stop in taken)
        return taken

    def overlaps(self, start: int, stop: int) -> bool:
        """Whether one of these numbers is there."""
        at = bisect_left(self._stops, start + 1)
        return at < len(self._starts) and self._starts[at] < stop
