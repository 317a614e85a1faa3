"""The buffers of a model that trainers share: batch norm's running statistics.

[Note: whose buffers]  A training forward changes buffers by itself, on each trainer by what it has
seen.  By the lane's ``buffers`` one of two things is what all trainers have, or neither:

::

    trainer0    trainer 0's travel with its steps; where it was preempted, those of the
                least trainer that is left
    mean        the mean over trainers, of floating-point buffers; others are trainer 0's
    own         nothing travels

A step of the first lane of gradients (of the first lane, where there are none) brings what has
changed; the answer brings to the other trainers every buffer that a step has ever changed.  The
mean is over a sync step's trainers; where steps come one by one, and in the k-step modes, it is
over the last value that each trainer has sent.  Running statistics are no gradients: a step that is
skipped, because of an overflow or a NaN, brings its buffers all the same, as a skipped step of one
process keeps them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from torch import Tensor

from pserver.dense.merge import mean
from pserver.errors import Refused

# by slice and trainer: its value; None: what the server has
Gathered = Mapping[str, Mapping[int, Tensor | None]]


class SharedBuffers:
    """Assigns buffers in one lane's steps, and knows which of them answers bring.  Any thread may
    call it.  See [Note: whose buffers].

    Args:
        whose: the lane's ``buffers``.
        of_step: a mean is over the trainers of the step alone.
        variables: the memory of the slices that servers hold and never update, by name.
        locks: one for each of them.
        first: gives trainer 0, or who stands in for it.
    """

    def __init__(
        self,
        whose: str,
        of_step: bool,
        variables: Mapping[str, Tensor],
        locks: Mapping[str, threading.Lock],
        first: Callable[[], int] = lambda: 0,
    ) -> None:
        self._whose, self._of_step, self._first = whose, of_step, first
        self._variables, self._locks = variables, locks
        self._lock = threading.Lock()  # guards the two below
        self._changed: dict[str, None] = {}  # slices that a step has changed, in their order
        self._last: dict[str, dict[int, Tensor]] = {}  # by slice and trainer, for a mean

    def check(self, step: int, trainer: int, buffers: Mapping[str, Tensor]) -> None:
        """Returns if a trainer's step may bring these buffers.

        Raises:
            Refused: one is updated by steps, or is not this trainer's to say.
        """
        who = f"step {step} of trainer {trainer}"
        for name in buffers:
            if name not in self._variables:
                raise Refused(f"{who}: expected a buffer, got {name!r}, which steps update")
            if self._whose == "own" or (trainer != self._first() and not self._averages(name)):
                raise Refused(
                    f"{who}: expected none of the buffer {name!r}, as a_sync_configs['buffers'] is "
                    f"{self._whose!r}"
                )

    def _averages(self, name: str) -> bool:
        dtype = self._variables[name].dtype
        return self._whose == "mean" and (dtype.is_floating_point or dtype.is_complex)

    def gathered(self, sent: Mapping[str, Mapping[int, Tensor | None]]) -> Gathered:
        """What :meth:`assign` is given for a step: where a mean is over the last value that each
        trainer has sent, those of the others, too.  In the order of the steps, each once.

        Args:
            sent: by slice, and by trainer that takes part in the step: its value; None: it has what
                the server has.
        """
        if self._of_step:
            return sent
        found: dict[str, Mapping[int, Tensor | None]] = {}
        with self._lock:
            for name, own in sent.items():
                found[name] = own
                if self._averages(name):
                    now = self._variables[name]
                    known = {t: now.clone() if each is None else each for t, each in own.items()}
                    self._last[name] = {**self._last.get(name, {}), **known}
                    found[name] = self._last[name]
        return found

    def assign(self, name: str, sent: Mapping[int, Tensor | None]) -> None:
        """Assigns a slice.

        Args:
            sent: by trainer: its value; None: it has what the server has.
        """
        with self._lock, self._locks[name]:
            self._changed[name] = None
            now = self._variables[name]
            if not self._averages(name):
                value = next(sent[trainer] for trainer in sorted(sent) if sent[trainer] is not None)
                assert value is not None, "one trainer has sent it"
                now.copy_(value)
                return
            values = [now if sent[trainer] is None else sent[trainer] for trainer in sorted(sent)]
            first, *others = (value for value in values if value is not None)
            now.copy_(mean([first.clone(), *others], len(values)))

    def told(self, trainer: int) -> list[str]:
        """The slices that the answer to a trainer's step brings."""
        if self._whose == "trainer0" and trainer == self._first():
            return []
        with self._lock:
            return list(self._changed)

    def discard(self) -> None:
        """Forgets what trainers have sent, because values have been loaded."""
        with self._lock:
            self._last.clear()
