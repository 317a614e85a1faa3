"""Gradients that leave while backward runs.

[Note: taken back]  What counts is what ``p.grad`` holds at ``step()``, and a gradient that has left
may be changed before that.  A second backward calls its parameter's hook again.  Clipping and
zeroing move its version, or put another tensor in its place.  A GradScaler tells the optimizer
whether it has found an infinity.  Then all that has left of the step is withdrawn, as after Ctrl-C
(see [Note: withdrawn] in pserver/client/stream.py), and ``step()`` sends everything.  So it is
where a script saves, loads or reads states before ``step()``, as that needs the same streams; and
where Ctrl-C came while a gradient left, or was taken back.  That takes longer than if nothing had
left.  So nothing leaves early in the next step; after the next such step in the next two, then in
four, up to ``MOST_RESTS``.

A write through ``.data`` moves no version, nor does ``GradScaler.unscale_`` where the scaler does
not take the step.  Scripts that do so do it from the first step on.  So some elements of each
gradient are compared in the first steps, and in every 1,000th; where they differ, no gradient of
the job leaves early again.  What comes later is not seen before the next 1,000th step: that is why
``overlap`` is off where nobody asks for it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.gradients.step import compares, elements_of

log = logging.getLogger(__name__)

MOST_RESTS = 1024  # steps


@dataclass(frozen=True, slots=True)
class _Left:
    """A gradient as it has left; some of its elements, where they are compared."""

    gradient: Tensor
    version: int
    elements: Tensor | None

    def is_as_it_was(self) -> bool:
        """Whether no element differs."""
        now = elements_of(self.gradient)
        return self.elements is not None and torch.equal(
            self.elements.nan_to_num(), now.nan_to_num()
        )


class EarlyGradients:
    """The gradients of the present step that have left during backward.  See [Note: taken back].

    Autograd's threads call :meth:`leaves`; the script's thread calls the rest, not beside it.

    Args:
        withdraw: withdraws what has left.
    """

    def __init__(self, withdraw: Callable[[], None]) -> None:
        self._withdraw = withdraw
        self._left: dict[Tensor, _Left] = {}  # by parameter
        # while a gradient leaves, or all are withdrawn, and after that was interrupted
        self._torn = False
        self._steps = 0
        self._waits = False  # in this step nothing leaves any more
        # steps in which nothing leaves: the ones to come, and those of the last time
        self._rests, self._longest = 0.0, 0.0

    def __iter__(self) -> Iterator[Tensor]:
        """Yields the parameters whose gradients have left."""
        return iter(self._left)

    def __bool__(self) -> bool:
        return bool(self._left)

    def leaves(self, parameter: Tensor, gradient: Tensor) -> bool:
        """Whether a gradient, which backward has just accumulated, leaves now; :meth:`gone` follows
        then.
        """
        if self._torn or parameter in self._left:
            self.take_back("a second backward")
        if self._waits or self._rests:
            return False
        elements = elements_of(gradient).clone() if compares(self._steps + 1) else None
        self._torn = True
        self._left[parameter] = _Left(gradient, gradient._version, elements)
        return True

    def gone(self) -> None:
        """Notes that the gradient has left."""
        self._torn = False

    def look(self, scaled: bool) -> None:
        """Takes gradients back that were changed after they had left; called by a step.

        Args:
            scaled: a GradScaler takes the step.
        """
        if self._torn or (self._left and scaled):
            self.take_back("a GradScaler" if scaled else "an interruption, as by Ctrl-C")
        for parameter, left in self._left.items():
            if parameter.grad is not left.gradient or left.gradient._version != left.version:
                self.take_back("clipping, or another write before step()")
                return
            if left.elements is not None and not left.is_as_it_was():
                self.take_back("a write through .data")
                self._longest = math.inf
                return

    def take_back(self, cause: str) -> None:
        """Takes back what has left; once more where that was interrupted.

        Args:
            cause: for the warning.
        """
        if not (self._left or self._torn):
            return
        if not self._longest:
            log.warning(
                "overlap: gradients that had left during backward are taken back, because of %s; "
                "what p.grad holds at step() counts, so they are sent again, which takes longer: "
                "leave overlap off",
                cause,
            )
        self._torn = True
        self._withdraw()
        self._left.clear()
        self._waits = True
        self._longest = min(2 * self._longest or 1.0, MOST_RESTS)
        self._torn = False

    def end(self) -> None:
        """Ends the step: all gradients have been sent."""
        self._steps += 1
        self._left.clear()
        self._rests = self._longest if self._waits else max(self._rests - 1, 0.0)
        self._waits = False

    def forget(self) -> None:
        """Ends a step that was interrupted, and of which nothing counts."""
        self._left.clear()
        self._waits = self._torn = False
