"""The hparams of all steps that some row has not taken yet.

See [Note: deferred updates] in deferred_updates.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pserver.table.kernels import Array, kernel

WIDTH = 6  # scalars of a rule, at most
LONG = 1024  # steps from which on what they do to a state is computed at once


@kernel
def stretch_of(firsts: Array, step: int) -> int:
    """The stretch that a step belongs to.  ``firsts``: the first step of each stretch."""
    low, high = 0, len(firsts) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if firsts[middle] <= step:
            low = middle
        else:
            high = middle - 1
    return low


@kernel
def end_of(firsts: Array, stretch: int, last: int) -> int:
    """A stretch's last step, or ``last`` if that comes first."""
    return min(last, firsts[stretch + 1] - 1) if stretch + 1 < len(firsts) else last


@kernel
def faded(firsts: Array, logs: Array, state: int, step: int, last: int) -> float:
    """The factor by which the steps from ``step`` to ``last`` multiply a state that only fades: the
    first, 0, or the second, 1.
    """
    return math.exp(_log_of(firsts, logs, state, last + 1) - _log_of(firsts, logs, state, step))


@kernel
def _log_of(firsts: Array, logs: Array, state: int, step: int) -> float:
    """The logarithm of the factor of the steps before ``step``."""
    stretch = stretch_of(firsts, step)
    return logs[stretch, state] + (step - firsts[stretch]) * logs[stretch, 2 + state]  # type: ignore[no-any-return]


Factors = Callable[[Array, Any], tuple[float, float]]


class HparamHistory:
    """The scalars of all steps that rows may still have to catch up with.

    A stretch is a run of steps with the same scalars; the history has one line for each.  The
    scalars of a rule are those of its deferred kernel.

    Args:
        widths: how many scalars each segment's rule has.
        decay: which of them is weight decay; None: it has none.
        factors: (a step's scalars, dtype) -> by what such a step multiplies each of two states that
            fade; None: none does.
        dtype: of the rows: what steps multiply with is rounded to it.
    """

    def __init__(
        self,
        widths: Sequence[int],
        decay: Sequence[int | None],
        factors: Sequence[Factors | None],
        dtype: type[np.generic],
    ) -> None:
        self._dtype, self._widths, self._decay = dtype, tuple(widths), tuple(decay)
        self._factors = tuple(factors)
        self._count = 0
        # each stretch's first step, and for each segment
        self._firsts = np.zeros(16, np.int64)
        # - its stretches' scalars
        self._past = [np.zeros((16, WIDTH)) for _ in widths]
        # - its stretches' logarithms of both states' factors: before the stretch, and of each of
        #   its steps
        self._logs = [np.zeros((16, 4)) for _ in widths]
        # - the least and the greatest value that each scalar ever had
        self._least = [np.full(WIDTH, np.inf) for _ in widths]
        self._most = [np.full(WIDTH, -np.inf) for _ in widths]

    def __len__(self) -> int:
        return self._count

    def append(self, step: int, lines: Sequence[Sequence[float]]) -> None:
        """Notes the scalars of step ``step``, the one after the last noted: a line for each
        segment.
        """
        at = self._count
        padded = [np.array([*line, *[0.0] * (WIDTH - len(line))]) for line in lines]
        if at and all(
            np.array_equal(line, past[at - 1])
            for line, past in zip(padded, self._past, strict=True)
        ):
            return
        if at == len(self._firsts):
            self._firsts = np.concatenate([self._firsts, np.zeros_like(self._firsts)])
            self._past = [np.concatenate([past, np.zeros_like(past)]) for past in self._past]
            self._logs = [np.concatenate([logs, np.zeros_like(logs)]) for logs in self._logs]
        self._firsts[at] = step
        self._count += 1
        for index, line in enumerate(padded):
            self._past[index][at] = line
            np.minimum(self._least[index], line, out=self._least[index])
            np.maximum(self._most[index], line, out=self._most[index])
            logs, factors = self._logs[index], self._factors[index]
            if factors is not None:
                logs[at, 2:] = np.log(np.clip(factors(line, self._dtype), 1e-300, None))
            if at:
                logs[at, :2] = logs[at - 1, :2] + logs[at - 1, 2:] * (step - self._firsts[at - 1])

    @property
    def decays(self) -> bool:
        """Whether some step may have moved a row whose states are those of a new one."""
        return any(
            most[at] > 0 for most, at in zip(self._most, self._decay, strict=True) if at is not None
        )

    def forget_before(self, step: int) -> None:
        """Drops the stretches that end before ``step``: every row has taken their steps.

        What is left is as :meth:`restore` makes it, so that rows catch up alike there.
        """
        begin = max(int(np.searchsorted(self._firsts[: self._count], step, side="right")) - 1, 0)
        for kept in (self._firsts, *self._past, *self._logs):
            kept[: self._count - begin] = kept[begin : self._count].copy()
        self._count -= begin
        lengths = np.diff(self._firsts[: self._count])[:, None]
        for index, past in enumerate(self._past):
            self._least[index] = past[: self._count].min(axis=0)
            self._most[index] = past[: self._count].max(axis=0)
            logs = self._logs[index][: self._count]
            logs[0, :2] = 0.0
            logs[1:, :2] = np.cumsum(logs[:-1, 2:] * lengths, axis=0)

    def arguments(self, segment: int) -> tuple[Array, ...]:
        """What a deferred kernel takes of the history of one segment: ``firsts``, ``past``,
        ``least``, ``most`` and ``logs``.
        """
        count = self._count
        kept = (
            self._past[segment][:count],
            self._least[segment],
            self._most[segment],
            self._logs[segment][:count],
        )
        return self._firsts[:count], *kept

    def plain(self) -> list[Any]:
        """As data: for each stretch its first step, and a line for each segment."""
        return [
            [
                int(self._firsts[at]),
                [
                    past[at, :width].tolist()
                    for past, width in zip(self._past, self._widths, strict=True)
                ],
            ]
            for at in range(self._count)
        ]

    def restore(self, plain: Sequence[Any]) -> None:
        """Takes over what :meth:`plain` returned; nothing was noted before."""
        assert not self._count
        for first, lines in plain:
            self.append(first, lines)
