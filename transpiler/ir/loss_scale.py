"""The loss scale: the factor that keeps float16 gradients out of the range where they vanish."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class ScaleCourse:
    """The rule by which a loss scale changes.

    Attributes:
        init: the first scale.
        dynamic: whether it changes at all.
        incr_every: steps in a row without an overflow, after which it grows.
        decr_every: overflows in a row after which it shrinks.
        incr_ratio, decr_ratio: the factors by which it grows and shrinks.
    """

    init: float
    dynamic: bool = True
    incr_every: int = 1000
    decr_every: int = 2
    incr_ratio: float = 2.0
    decr_ratio: float = 0.5


class LossScale:
    """A loss scale on its course: with ``decr_every`` 1 that of torch.amp.GradScaler, to the bit.

    Like GradScaler's it is a float32, it never grows to infinity, and nothing but ``decr_every``
    bounds it from below.

    Attributes:
        value: the present scale.
        good: steps without an overflow since the last change.
        bad: overflows in a row.

    Example:
        >>> scale = LossScale(ScaleCourse(init=8.0, decr_every=2))
        >>> scale.update(True)
        >>> scale.update(True)
        >>> scale.value
        4.0
    """

    def __init__(self, course: ScaleCourse) -> None:
        self.course = course
        self.value, self.good, self.bad = float(np.float32(course.init)), 0, 0

    def update(self, overflow: bool) -> None:
        """Follows one step."""
        course = self.course
        if not course.dynamic:
            return
        self.good, self.bad = (0, self.bad + 1) if overflow else (self.good + 1, 0)
        if self.bad == course.decr_every:
            self.value, self.bad = _float32(self.value * course.decr_ratio), 0
        elif self.good == course.incr_every:
            grown, self.good = _float32(self.value * course.incr_ratio), 0
            self.value = grown if math.isfinite(grown) else self.value

    def state(self) -> dict[str, float]:
        """The scale and its counters, for a checkpoint."""
        return {"value": self.value, "good": self.good, "bad": self.bad}

    def load(self, state: Mapping[str, float]) -> None:
        """Restores from :meth:`state`."""
        self.value = float(state["value"])
        self.good, self.bad = int(state["good"]), int(state["bad"])


def _float32(value: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(value))
