"""What the norms of one trainer's pushes of one variable have been, and whether one is far beyond.
Pure arithmetic.

[Note: far beyond its history]  Norms are compared by their logarithms x, because they change by
factors.  The history is a mean m and a deviation s of x.

- The first ``WARM_UP`` pushes are not judged.  Then m is their median, and s 1.4826 times the
  median of their distances from it, so that a large one among them does not count.
- A push is an outlier where x - m > max(ln factor, ``DEVIATIONS`` s): it is ``factor`` times its
  history, and that is unusual here, too.
- Of every other push the history learns: with d = x - m, cut to +-max(3 s, 1), m grows by a d, and
  s^2 becomes (1 - a) (s^2 + a d^2), where a is ``WEIGHT`` (Finch: Incremental calculation of
  weighted mean and variance, 2009).  About the last 40 pushes count.
- Of an outlier it does not learn.  But ``RENEWED`` outliers in a row whose norms are within
  ``factor`` of one another are the new size of things: they become the history, as a warm-up does.

A moving mean and deviation of norms also finds the spikes that ZClip clips (Kumar et al.: ZClip,
2025), which takes the norms themselves, of all parameters together.  AutoClip clips above a
percentile of all norms so far (Seetharaman et al.: AutoClip, 2020), and so always clips some.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from statistics import median

WARM_UP = 20
RENEWED = 10
WEIGHT = 0.05
DEVIATIONS = 6.0
NORMAL = 1.4826  # a normal distribution's deviation, in medians of distances from its median


class NormHistory:
    """The history of one trainer's pushes of one variable.  One caller at a time.

    Args:
        factor: how many times its history an outlier is, above 1.

    Example:
        >>> history = NormHistory(factor=100.0)
        >>> for _ in range(WARM_UP):
        ...     history.learn(2.0)
        >>> round(history.expected, 3), history.beyond(150.0), history.beyond(250.0)
        (2.0, False, True)
    """

    def __init__(self, factor: float) -> None:
        self._factor = math.log(factor)
        self._first: list[float] = []  # logarithms, until there are as many as the warm-up has
        self._outliers: list[float] = []  # likewise, in a row
        self._mean = self._variance = 0.0

    @property
    def expected(self) -> float:
        """The norm that the history expects; 1 in the warm-up."""
        return math.exp(self._mean)

    def beyond(self, norm: float) -> bool:
        """Whether a norm is far beyond the history; nothing is changed.

        Args:
            norm: finite, above 0.
        """
        least = max(self._factor, DEVIATIONS * math.sqrt(self._variance))
        return len(self._first) == WARM_UP and math.log(norm) - self._mean > least

    def learn(self, norm: float) -> None:
        """A push that is no outlier counts from here on.

        Args:
            norm: finite, above 0.
        """
        value = math.log(norm)
        self._outliers.clear()
        if len(self._first) < WARM_UP:
            self._first.append(value)
            if len(self._first) == WARM_UP:
                self._begin(self._first)
            return
        most = max(3 * math.sqrt(self._variance), 1.0)
        difference = min(max(value - self._mean, -most), most)
        self._mean += WEIGHT * difference
        self._variance = (1 - WEIGHT) * (self._variance + WEIGHT * difference**2)

    def pass_over(self, norm: float) -> None:
        """An outlier: nothing is learned of it, unless it is the last of many that are alike.

        Args:
            norm: finite, above 0.
        """
        self._outliers = [*self._outliers, math.log(norm)][-RENEWED:]
        alike = max(self._outliers) - min(self._outliers) <= self._factor
        if len(self._outliers) == RENEWED and alike:
            self._begin(self._outliers)
            self._outliers = []

    def interrupt(self) -> None:
        """A push that is no outlier, and does not count: outliers before it are in no row."""
        self._outliers.clear()

    def _begin(self, values: Collection[float]) -> None:
        self._mean = median(values)
        deviation = NORMAL * median(abs(value - self._mean) for value in values)
        self._variance = deviation**2
