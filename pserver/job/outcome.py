"""What a committed step has led to."""

from __future__ import annotations

from dataclasses import dataclass

from pserver.finite import NonFiniteStep
from pserver.transport.arrays import OutlierPush


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a committed step has led to.

    Attributes:
        version: updates of the lane up to this one, counted in steps.
        committed: how many trainers' gradients are in this update.
        overflow: a trainer saw a gradient that is not finite, so nothing was applied.
        refused: the server saw one, or an outlier, and nothing of this trainer's step was applied.
        nonfinite: the steps in this update in which a value is not finite.
        outliers: what in this update is far beyond its trainer's history.
    """

    version: int
    committed: int
    overflow: bool = False
    refused: bool = False
    nonfinite: tuple[NonFiniteStep, ...] = ()
    outliers: tuple[OutlierPush, ...] = ()
