"""The steps that did not touch a row, made up for when it is read or touched again.

[Note: steps made up for]  torch's dense rules move every row at every step: a velocity runs on,
averages fade, decay shrinks.  A table takes such a step with the rows that have a gradient only.  A
record says which steps it has seen; the others are taken, one by one and with the numbers that they
had, before the row is next used.  So what anybody reads is what torch has.

``HparamHistory`` keeps the numbers of all steps, a line for each stretch of steps that had the same.
Averages fade soon to where they move no value any more: from there on what a step does to a value
is less than half a unit in its last place, now and, as all that follows is smaller, at every later
step.  Then only the states are multiplied on.  With weight decay in the gradient (Adam's,
momentum's, Adagrad's) nothing ever fades, and a step's work has to be done for every step that was
missed.

A kernel takes the memory of records, its 8-byte words, the slots of the rows (-1: leave out), which
word says what a record has seen, the segment's columns [begin, end), the first column of each
state, the last step to make up for, and the history.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from pserver.table.kernels import Array, kernel
from pserver.table.update_kernels import ftrl_solution, power

WIDTH = 6  # numbers of a rule, at most
LONG = 1024  # steps from which on fading is computed at once


@kernel
def run_of(firsts: Array, step: int) -> int:
    """Which stretch a step belongs to."""
    low, high = 0, len(firsts) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if firsts[middle] <= step:
            low = middle
        else:
            high = middle - 1
    return low


@kernel
def end_of(firsts: Array, run: int, last: int) -> int:
    """The stretch's last step, or ``last``."""
    return min(last, firsts[run + 1] - 1) if run + 1 < len(firsts) else last


@kernel
def tiny_of(rows: Array) -> float:
    """By which factor a change is surely too small for a value: a quarter of a unit in its last
    place.
    """
    return 2.0**-26 if rows.itemsize == 4 else 2.0**-55


@kernel
def sgd(
    rows: Array,
    words: Array,
    slots: Array,
    word: int,
    begin: int,
    end: int,
    states: Array,
    last: int,
    firsts: Array,
    past: Array,
    least: Array,
    most: Array,
    logs: Array,
) -> None:
    """Decay.  ``past``: rate, weight decay."""
    scalars = np.empty(2, rows.dtype)
    for i in range(len(slots)):
        if slots[i] < 0 or len(firsts) == 0:
            continue
        row = rows[slots[i]][begin:end]
        step = max(words[slots[i], word] + 1, firsts[0])
        run = run_of(firsts, step)
        while step <= last:
            stop = end_of(firsts, run, last)
            scalars[:] = past[run, :2]
            rate, decay = scalars[0], scalars[1]
            moved = decay != 0
            while moved and step <= stop:
                moved = False
                for j in range(len(row)):
                    value = row[j] - rate * (decay * row[j])
                    moved |= value != row[j]
                    row[j] = value
                step += 1
            step = stop + 1
            run += 1


@kernel
def _runs_out(row: Array, velocity: Array, rate: float, tiny: float) -> bool:
    """Whether a velocity that only fades from here on moves no value any more, at a rate of at most
    this.
    """
    for j in range(len(row)):
        if velocity[j] != 0 and not rate * abs(velocity[j]) <= tiny * abs(row[j]):
            return False
    return True


@kernel
def momentum(
    rows: Array,
    words: Array,
    slots: Array,
    word: int,
    begin: int,
    end: int,
    states: Array,
    last: int,
    firsts: Array,
    past: Array,
    least: Array,
    most: Array,
    logs: Array,
) -> None:
    """The velocity runs on.

    ``past``: rate, momentum, 1 - dampening, weight decay, whether Nesterov's.
    """
    scalars, tiny = np.empty(5, rows.dtype), tiny_of(rows)
    fading = most[3] == 0 and most[1] < 1
    for i in range(len(slots)):
        if slots[i] < 0 or len(firsts) == 0:
            continue
        row, velocity = (
            rows[slots[i]][begin:end],
            rows[slots[i]][states[0] : states[0] + end - begin],
        )
        step = max(words[slots[i], word] + 1, firsts[0])
        run = run_of(firsts, step)
        still = False
        while step <= last:
            stop = end_of(firsts, run, last)
            scalars[:] = past[run, :5]
            rate, keep, gain, decay, nesterov = (
                scalars[0],
                scalars[1],
                scalars[2],
                scalars[3],
                scalars[4] != 0,
            )
            while step <= stop and not still:
                still = fading and _runs_out(row, velocity, most[0], tiny)
                if not still:
                    _run_on(row, velocity, rate, keep, gain, decay, nesterov)
                    step += 1
            if step <= stop and keep != 0:  # the values stay as they are
                scalars[0] = past[run, 1] ** (stop + 1 - step)
                for j in range(len(row)):
                    velocity[j] *= scalars[0]
            step = stop + 1
            run += 1


@kernel
def _run_on(
    row: Array, velocity: Array, rate: float, keep: float, gain: float, decay: float, nesterov: bool
) -> None:
    for j in range(len(row)):
        slope = decay * row[j]
        if keep != 0:
            velocity[j] = velocity[j] * keep + gain * slope
            slope = slope + keep * velocity[j] if nesterov else velocity[j]
        row[j] -= rate * slope


@kernel
def adagrad(
    rows: Array,
    words: Array,
    slots: Array,
    word: int,
    begin: int,
    end: int,
    states: Array,
    last: int,
    firsts: Array,
    past: Array,
    least: Array,
    most: Array,
    logs: Array,
) -> None:
    """Decay, as a gradient.  ``past``: rate, its decay, weight decay, eps."""
    scalars = np.empty(3, rows.dtype)
    for i in range(len(slots)):
        if slots[i] < 0 or len(firsts) == 0:
            continue
        row, squares = (
            rows[slots[i]][begin:end],
            rows[slots[i]][states[0] : states[0] + end - begin],
        )
        step = max(words[slots[i], word] + 1, firsts[0])
        run = run_of(firsts, step)
        while step <= last:
            stop = end_of(firsts, run, last)
            scalars[1:3] = past[run, 2:4]
            decay, eps = scalars[1], scalars[2]
            while decay != 0 and step <= stop:
                scalars[0] = past[run, 0] / (1 + (step - 1) * past[run, 1])
                rate = scalars[0]
                for j in range(len(row)):
                    slope = decay * row[j]
                    squares[j] += slope * slope
                    row[j] -= rate * slope / (math.sqrt(squares[j]) + eps)
                step += 1
            step = stop + 1
            run += 1


@kernel
def ftrl(
    rows: Array,
    words: Array,
    slots: Array,
    word: int,
    begin: int,
    end: int,
    states: Array,
    last: int,
    firsts: Array,
    past: Array,
    least: Array,
    most: Array,
    logs: Array,
) -> None:
    """Weights follow from the states and the last step's numbers.

    ``past``: rate, l1, l2, -lr_power, beta.
    """
    scalars = np.empty(5, rows.dtype)
    for i in range(len(slots)):
        if slots[i] < 0 or len(firsts) == 0 or words[slots[i], word] >= last:
            continue
        run = run_of(firsts, last)
        if run == run_of(firsts, words[slots[i], word]):
            continue
        row, squares = (
            rows[slots[i]][begin:end],
            rows[slots[i]][states[0] : states[0] + end - begin],
        )
        linear = rows[slots[i]][states[1] : states[1] + end - begin]
        scalars[:] = past[run, :5]
        for j in range(len(row)):
            if squares[j] > 0:
                powered = power(squares[j], scalars[3])
                row[j] = ftrl_solution(
                    linear[j], powered, scalars[0], scalars[1], scalars[2], scalars[4]
                )


class HparamHistory:
    """The numbers of all steps that rows may have missed.

    Args:
        widths: how many numbers each segment's rule has.
        decay: which of them is weight decay; None: it has none.
        dtype: of the rows: what steps multiply with is rounded to it.
    """

    def __init__(
        self, widths: Sequence[int], decay: Sequence[int | None], dtype: type[np.generic]
    ) -> None:
        self._dtype, self._widths, self._decay = dtype, tuple(widths), tuple(decay)
        self._firsts = np.zeros(16, np.int64)
        self._past = [np.zeros((16, WIDTH)) for _ in widths]
        # before the stretch, of both states; and of each of its steps
        self._logs = [np.zeros((16, 4)) for _ in widths]
        self._least = [np.full(WIDTH, np.inf) for _ in widths]
        self._most = [np.full(WIDTH, -np.inf) for _ in widths]
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def note(self, step: int, lines: Sequence[Sequence[float]]) -> None:
        """Step ``step``, the one after the last noted, has these numbers: a line for each
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
            factors = 1 - float(self._dtype(1 - line[1])), float(self._dtype(line[2]))
            logs = self._logs[index]
            logs[at, 2:] = np.log(np.clip(factors, 1e-300, None))
            if at:
                logs[at, :2] = logs[at - 1, :2] + logs[at - 1, 2:] * (step - self._firsts[at - 1])

    @property
    def decays(self) -> bool:
        """Whether some step may have moved a row whose states are those of a new one."""
        return any(
            most[at] > 0 for most, at in zip(self._most, self._decay, strict=True) if at is not None
        )

    def forget_before(self, step: int) -> None:
        """From here on nobody asks for what was before ``step``: drops the stretches that lie
        there.
        """
        begin = max(int(np.searchsorted(self._firsts[: self._count], step, side="right")) - 1, 0)
        for kept in (self._firsts, *self._past, *self._logs):
            kept[: self._count - begin] = kept[begin : self._count].copy()
        self._count -= begin

    def arguments(self, segment: int) -> tuple[Array, ...]:
        """What a kernel takes of the history of one segment."""
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
            self.note(first, lines)
