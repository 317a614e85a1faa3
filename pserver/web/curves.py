"""Values over time, as many as a page can draw: old ones are thinned."""

from __future__ import annotations

from typing import NamedTuple

MOST_POINTS = 10_000  # of a curve
MOST_CURVES = 2_000


class Point(NamedTuple):
    """One value.

    Attributes:
        tick: numbers the moments at which values were taken, from 1.
        time: in seconds since 1970.
    """

    tick: int
    time: float
    value: float


class Curve:
    """One curve.  When it has as many points as it may have, every second one of the older half is
    dropped: the past gets coarser, the present stays.

    Args:
        most: points; 4 or more.

    Example:
        >>> curve = Curve(4)
        >>> for tick in range(1, 6):
        ...     curve.add(Point(tick, float(tick), 0.0))
        >>> [point.tick for point in curve.since(0)]
        [1, 3, 4, 5]
    """

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._most = most
        self._points: list[Point] = []

    def __len__(self) -> int:
        return len(self._points)

    def add(self, point: Point) -> None:
        """A value, later than those before."""
        if len(self._points) >= self._most:
            half = self._most // 2
            self._points[:half] = self._points[:half:2]
        self._points.append(point)

    def since(self, tick: int) -> list[Point]:
        """The points after a moment, in order."""
        low, high = 0, len(self._points)
        while low < high:
            middle = (low + high) // 2
            if self._points[middle].tick > tick:
                high = middle
            else:
                low = middle + 1
        return self._points[low:]

    def last(self, count: int) -> list[Point]:
        """The last points, in order."""
        return self._points[-count:]

    def at(self, time: float) -> float | None:
        """The last value at or before a time; None: it is older than the curve."""
        found = None
        for point in reversed(self._points):
            if point.time <= time:
                found = point.value
                break
        return found


class Curves:
    """All curves of a job, by key: "loss/trainer 0".

    Args:
        most_points: of each.
        most_curves: of further names nothing is kept.

    Attributes:
        tick: the last moment at which values were taken; 0 before the first.
    """

    def __init__(self, most_points: int = MOST_POINTS, most_curves: int = MOST_CURVES) -> None:
        self.tick = 0
        self._most_points, self._most_curves = most_points, most_curves
        self._by_key: dict[str, Curve] = {}

    def add(self, time: float, values: dict[str, float]) -> None:
        """What the curves are at one moment; a curve without a value has a gap there."""
        self.tick += 1
        for key, value in values.items():
            if key not in self._by_key and len(self._by_key) < self._most_curves:
                self._by_key[key] = Curve(self._most_points)
            if key in self._by_key:
                self._by_key[key].add(Point(self.tick, time, value))

    def curve(self, key: str) -> Curve:
        """A curve; an empty one where there is none of this key."""
        return self._by_key.get(key) or Curve()

    def since(self, tick: int) -> dict[str, list[Point]]:
        """What is new after a moment, by key; curves without anything new are not in it."""
        found = {key: curve.since(tick) for key, curve in self._by_key.items()}
        return {key: points for key, points in found.items() if points}
