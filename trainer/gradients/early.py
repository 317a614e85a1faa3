"""Gradients that leave while backward runs.

[Note: taken back]  What counts is what ``p.grad`` holds at ``step()``, and a gradient that has left
may be changed before that.  A second backward calls its parameter's hook again.  Clipping and
zeroing move its version, or put another tensor in its place.  A GradScaler tells the optimizer
whether it has found an infinity.  Then all that has left of the step is withdrawn, as after Ctrl-C
(see [Note: withdrawn] in pserver/client/stream.py), and ``step()`` sends everything.  That takes
longer than if nothing had left.  So nothing leaves early in the next step; after the next such step
in the next two, then in four, up to ``MOST_RESTS``.

Not seen is what moves no version: a write through ``.data``, and ``GradScaler.unscale_`` where the
scaler does not take the step.  That is why ``overlap`` is off where nobody asks for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from torch import Tensor

log = logging.getLogger(__name__)

MOST_RESTS = 1024  # steps


class EarlyGradients:
    """The gradients of the present step that have left during backward.  See [Note: taken back].

    Autograd's threads call :meth:`leaves`; the script's thread calls the rest, not beside it.

    Args:
        withdraw: withdraws what has left.
    """

    def __init__(self, withdraw: Callable[[], None]) -> None:
        self._withdraw = withdraw
        self._left: dict[Tensor, tuple[Tensor, int]] = {}  # gradient and version, by parameter
        self._waits = False  # in this step nothing leaves any more
        self._rests, self._longest = 0, 0  # steps in which nothing leaves: left, and the last time

    def __iter__(self) -> Iterator[Tensor]:
        """Yields the parameters whose gradients have left."""
        return iter(self._left)

    def __bool__(self) -> bool:
        return bool(self._left)

    def leaves(self, parameter: Tensor, gradient: Tensor) -> bool:
        """Whether a gradient, which backward has just accumulated, leaves now."""
        if parameter in self._left:
            self._take_back("a second backward has")
        if self._waits or self._rests:
            return False
        self._left[parameter] = gradient, gradient._version
        return True

    def look(self, scaled: bool) -> None:
        """Takes gradients back that were changed after they had left; called by a step.

        Args:
            scaled: a GradScaler takes the step.
        """
        if self._left and scaled:
            self._take_back("a GradScaler has")
        for parameter, (gradient, version) in self._left.items():
            if parameter.grad is not gradient or gradient._version != version:
                self._take_back("clipping, or another write before step(), has")
                return

    def _take_back(self, who: str) -> None:
        if not self._longest:
            log.warning(
                "overlap: %s changed gradients that had left during backward; what p.grad holds at "
                "step() counts, so they are sent again, which takes longer: leave overlap off",
                who,
            )
        self._withdraw()
        self._left.clear()
        self._waits = True
        self._longest = min(2 * self._longest or 1, MOST_RESTS)

    def end(self) -> None:
        """Ends the step: all gradients have been sent."""
        self._left.clear()
        self._rests = self._longest if self._waits else max(self._rests - 1, 0)
        self._waits = False

    def forget(self) -> None:
        """Ends a step that was interrupted, and of which nothing counts."""
        self._left.clear()
        self._waits = False
