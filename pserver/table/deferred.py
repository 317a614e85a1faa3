"""Deferred updates: the steps that did not touch a row, taken when it is next read or updated.

[Note: deferred updates]  torch's dense rules move every row at every step: a velocity runs on,
averages fade, decay shrinks.  A table takes a step with the rows that have a gradient only.  A
record says which steps its row has taken.  The row catches up before it is next used: it takes the
other steps one by one, with the hparams that they had.  So every reader sees what torch has.

``HparamHistory`` keeps the scalars of all steps, a line for each stretch of steps with the same
ones.  Averages soon fade to where they move no value any more: from there on a step changes a value
by less than half a unit in its last place, now and, as all that follows is smaller, at every later
step.  Then only the states are multiplied on.  With weight decay in the gradient (Adam's,
momentum's, Adagrad's) nothing ever fades, and a row takes every step that it missed.

A kernel takes

- ``rows``: the memory of the rows' records, [slots, columns], updated in place;
- ``words``: the same memory as int64[slots, words of 8 bytes];
- ``slots``: int64[u], the rows' slots; a row of slot -1 is left out;
- ``word``: which of the words is the last step that a row has taken;
- ``begin``, ``end``: the segment's columns;
- ``states``: int64, the first column in a record of each of the rule's states;
- ``last``: the last step to take;
- the history: ``firsts``, int64[stretches], the first step of each stretch; ``past``,
  float64[stretches, WIDTH], its scalars; ``least`` and ``most``, float64[WIDTH], the least and the
  greatest value that each scalar ever had; ``logs``, float64[stretches, 4], for states that fade.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pserver.table.kernels import Array, kernel
from pserver.table.rules import ftrl_solution, power, tiny_of
from transpiler.ir.rules import ROW_RULES

# ---- hparam history ----
#
# The hparams of all steps that some row has not taken yet.
#
# See [Note: deferred updates] in deferred.py.


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
        widths: the number of scalars of each segment's rule.
        decay: the index of weight decay among them; None: it has none.
        factors: (a step's scalars, dtype) -> the factors by which such a step multiplies each of
            two states that fade; None: none does.
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
        """Whether some step may have moved a row with a new row's states."""
        return any(
            most[at] > 0 for most, at in zip(self._most, self._decay, strict=True) if at is not None
        )

    def forget_before(self, step: int) -> None:
        """Drops the stretches that end before ``step``: every row has taken their steps.

        The rest is as :meth:`restore` makes it, so that rows catch up alike there.
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
        """The arguments of a deferred kernel from the history of one segment: ``firsts``, ``past``,
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
        """The history as data: for each stretch its first step, and a line for each segment."""
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


# ---- deferred adam ----
#
# The deferred update of Adam and AdamW.
#
# See [Note: deferred updates] in deferred.py.


EACH = 8  # steps between two checks whether values still move


@kernel
def _fades(least: Array, most: Array) -> bool:
    """Whether steps without a gradient move a value less and less.

    They do if a mean fades faster than the root of the squares, even relative to a value that
    decays.
    """
    coupled = most[4] != 0 and most[5] == 0
    return not coupled and most[1] <= math.sqrt(least[2]) * (1 - most[0] * most[4])


@kernel
def _still(
    row: Array, mean: Array, square: Array, step: int, least: Array, most: Array, tiny: float
) -> bool:
    """Whether no value moves from this step on, at the highest rate of the history."""
    rate = most[0] / (1 - most[1] ** step)
    for j in range(len(row)):
        if mean[j] != 0 and not rate * abs(mean[j]) <= tiny * abs(row[j]) * (
            math.sqrt(square[j]) + least[3]
        ):
            return False
    return True


@kernel
def _steps(
    row: Array,
    mean: Array,
    square: Array,
    begun: int,
    last: int,
    firsts: Array,
    past: Array,
    scalars: Array,
    fades: bool,
    least: Array,
    most: Array,
    tiny: float,
) -> int:
    """Takes steps from ``begun`` on until no value moves, or to the last; returns the step
    after.
    """
    step, stretch = begun, stretch_of(firsts, begun)
    beta, beta_square, first, second = -1.0, -1.0, 0.0, 0.0
    while step <= last:
        stop = end_of(firsts, stretch, last)
        if past[stretch, 1] != beta or past[stretch, 2] != beta_square:
            beta, beta_square = past[stretch, 1], past[stretch, 2]
            first, second = beta**step, beta_square**step
            scalars[0], scalars[1], scalars[2] = 1 - beta, beta_square, 1 - beta_square
        scalars[3], scalars[4] = past[stretch, 3], past[stretch, 4] * (1 - past[stretch, 5])
        scalars[5] = 1 - past[stretch, 0] * past[stretch, 4] * past[stretch, 5]
        gain, keep_square, gain_square = scalars[0], scalars[1], scalars[2]
        eps, decay, shrink = scalars[3], scalars[4], scalars[5]
        while step <= stop:
            if (
                fades
                and (step == begun or step % EACH == 0)
                and _still(row, mean, square, step, least, most, tiny)
            ):
                return step
            scalars[6], scalars[7] = past[stretch, 0] / (1 - first), math.sqrt(1 - second)
            rate, root = scalars[6], scalars[7]
            for j in range(len(row)):
                slope = decay * row[j]
                value = row[j] * shrink
                mean[j] += gain * (slope - mean[j])
                square[j] = square[j] * keep_square + gain_square * slope * slope
                row[j] = value - rate * mean[j] / (math.sqrt(square[j]) / root + eps)
            first *= beta
            second *= beta_square
            step += 1
        stretch += 1
    return step


@kernel
def _fade(
    row: Array,
    mean: Array,
    square: Array,
    step: int,
    last: int,
    firsts: Array,
    past: Array,
    logs: Array,
    scalars: Array,
    decays: bool,
) -> None:
    """Takes the steps from ``step`` to ``last``, in which nothing but decoupled decay moves
    values.
    """
    at_once = last - step >= LONG
    if at_once:
        for state in range(2):
            scalars[state] = faded(firsts, logs, state, step, last)
        for j in range(len(row)):
            mean[j] *= scalars[0]
            square[j] *= scalars[1]
    stretch = stretch_of(firsts, step)
    while step <= last and (decays or not at_once):
        stop = end_of(firsts, stretch, last)
        scalars[0], scalars[1] = 1 - past[stretch, 1], past[stretch, 2]
        scalars[2] = 1 - past[stretch, 0] * past[stretch, 4] * past[stretch, 5]
        gain, keep_square, shrink = scalars[0], scalars[1], scalars[2]
        for _ in range(step, stop + 1 if shrink != 1 else step):
            for j in range(len(row)):
                row[j] *= shrink
        for _ in range(step, step if at_once else stop + 1):
            for j in range(len(row)):
                mean[j] += gain * (-mean[j])
                square[j] *= keep_square
        step = stop + 1
        stretch += 1


def adam_scalars(hparams: Mapping[str, Any]) -> tuple[float, ...]:
    """The scalars of a step of Adam; see :func:`adam`."""
    return hparams["lr"], *hparams["betas"], hparams["eps"], hparams["weight_decay"], 0.0


def adamw_scalars(hparams: Mapping[str, Any]) -> tuple[float, ...]:
    """The scalars of a step of AdamW; see :func:`adam`."""
    return hparams["lr"], *hparams["betas"], hparams["eps"], hparams["weight_decay"], 1.0


def adam_factors(scalars: Array, dtype: Any) -> tuple[float, float]:
    """The factors by which a step multiplies both means where there is no gradient."""
    return 1 - float(dtype(1 - scalars[1])), float(dtype(scalars[2]))


@kernel
def adam(
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
    """Averages continue, and weights decay.

    Scalars: rate, beta1, beta2, eps, weight decay, and 1 where decay is decoupled (AdamW).
    """
    scalars, tiny, fades = np.empty(8, rows.dtype), tiny_of(rows), _fades(least, most)
    for i in range(len(slots)):
        if slots[i] < 0 or len(firsts) == 0:
            continue
        record = rows[slots[i]]
        row, mean = record[begin:end], record[states[0] : states[0] + end - begin]
        square = record[states[1] : states[1] + end - begin]
        step = max(words[slots[i], word] + 1, firsts[0])
        if step <= last:
            step = _steps(
                row, mean, square, step, last, firsts, past, scalars, fades, least, most, tiny
            )
        if step <= last:
            _fade(row, mean, square, step, last, firsts, past, logs, scalars, most[4] != 0)


# ---- deferred updates ----


Scalars = tuple[float, ...]
Hparams = Mapping[str, Any]
Kernel = Callable[..., None]


@dataclass(frozen=True, slots=True)
class DeferredUpdate:
    """The effect of a step on the rows that it does not touch, under one rule.

    Attributes:
        kernel: takes missed steps, in place; see the module's docstring.
        scalars: (a step's hparams and flags) -> the kernel's scalars, in the kernel's order.
        decay: the index of weight decay among the scalars; None: there is none.
        factors: (a step's scalars, dtype) -> the factors by which the step multiplies each of two
            states where they only fade; None: none does.
    """

    kernel: Kernel
    scalars: Callable[[Hparams], Scalars]
    decay: int | None
    factors: Factors | None


DEFERRED_UPDATES: dict[str, DeferredUpdate] = {}
"""Rule name -> deferred update, for the rules that move untouched rows.  Complete once this module
is imported: the kernels are here, but for Adam's, which this module enters."""


def deferred_update(
    rule: str,
    scalars: Callable[[Hparams], Scalars],
    decay: int | None = None,
    factors: Factors | None = None,
) -> Callable[[Kernel], Kernel]:
    """Makes the decorated kernel the deferred update of ``rule``; see :class:`DeferredUpdate`."""
    assert ROW_RULES[rule].untouched != "stay", f"{rule!r} moves no untouched row"

    def registered(kernel: Kernel) -> Kernel:
        DEFERRED_UPDATES[rule] = DeferredUpdate(kernel, scalars, decay, factors)
        return kernel

    return registered


for _rule, _scalars in (
    ("adam", adam_scalars),
    ("adamw", adamw_scalars),
):
    deferred_update(_rule, _scalars, 4, adam_factors)(adam)


def _sgd(hparams: Hparams) -> Scalars:
    return hparams["lr"], hparams["weight_decay"]


@deferred_update("sgd", _sgd, decay=1)
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
    """Weight decay.  Scalars: rate, weight decay."""
    scalars = np.empty(2, rows.dtype)
    for i in range(len(slots)):
        if slots[i] < 0 or len(firsts) == 0:
            continue
        row = rows[slots[i]][begin:end]
        step = max(words[slots[i], word] + 1, firsts[0])
        stretch = stretch_of(firsts, step)
        while step <= last:
            stop = end_of(firsts, stretch, last)
            scalars[:] = past[stretch, :2]
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
            stretch += 1


@kernel
def _runs_out(row: Array, velocity: Array, rate: float, tiny: float) -> bool:
    """Whether a velocity that only fades from here on moves no value any more, at a rate of at most
    ``rate``.
    """
    for j in range(len(row)):
        if velocity[j] != 0 and not rate * abs(velocity[j]) <= tiny * abs(row[j]):
            return False
    return True


def _momentum(hparams: Hparams) -> Scalars:
    lr, momentum, gain = hparams["lr"], hparams["momentum"], 1 - hparams["dampening"]
    return lr, momentum, gain, hparams["weight_decay"], hparams["nesterov"]


def _momentum_factors(scalars: Array, dtype: Any) -> tuple[float, float]:
    return float(dtype(scalars[1])), 1.0


@deferred_update("momentum", _momentum, 3, _momentum_factors)
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
    """The velocity continues.

    Scalars: rate, momentum, 1 - dampening, weight decay, whether Nesterov's.
    """
    scalars, tiny = np.empty(5, rows.dtype), tiny_of(rows)
    fading = most[3] == 0 and most[1] < 1
    for i in range(len(slots)):
        if slots[i] < 0 or len(firsts) == 0:
            continue
        row = rows[slots[i]][begin:end]
        velocity = rows[slots[i]][states[0] : states[0] + end - begin]
        step = max(words[slots[i], word] + 1, firsts[0])
        stretch = stretch_of(firsts, step)
        still = False
        while step <= last:
            stop = end_of(firsts, stretch, last)
            scalars[:] = past[stretch, :5]
            rate, keep, gain = scalars[0], scalars[1], scalars[2]
            decay, nesterov = scalars[3], scalars[4] != 0
            while step <= stop and not still:
                still = fading and _runs_out(row, velocity, most[0], tiny)
                if not still:
                    _run_on(row, velocity, rate, keep, gain, decay, nesterov)
                    step += 1
            if still and last - step >= LONG and least[1] > 0:
                # at once: step by step it would be slow, most of all where numbers are denormal
                scalars[0] = faded(firsts, logs, 0, step, last)
                for j in range(len(row)):
                    velocity[j] *= scalars[0]
                break
            if step <= stop and keep != 0:  # no value moves any more
                scalars[0] = past[stretch, 1] ** (stop + 1 - step)
                for j in range(len(row)):
                    velocity[j] *= scalars[0]
            step = stop + 1
            stretch += 1


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


def _adagrad(hparams: Hparams) -> Scalars:
    return hparams["lr"], hparams["lr_decay"], hparams["weight_decay"], hparams["eps"]


@deferred_update("adagrad", _adagrad, decay=2)
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
    """Weight decay, as a gradient.  Scalars: rate, its decay, weight decay, eps."""
    scalars = np.empty(3, rows.dtype)
    for i in range(len(slots)):
        if slots[i] < 0 or len(firsts) == 0:
            continue
        row = rows[slots[i]][begin:end]
        squares = rows[slots[i]][states[0] : states[0] + end - begin]
        step = max(words[slots[i], word] + 1, firsts[0])
        stretch = stretch_of(firsts, step)
        while step <= last:
            stop = end_of(firsts, stretch, last)
            scalars[1:3] = past[stretch, 2:4]
            decay, eps = scalars[1], scalars[2]
            while decay != 0 and step <= stop:
                scalars[0] = past[stretch, 0] / (1 + (step - 1) * past[stretch, 1])
                rate = scalars[0]
                for j in range(len(row)):
                    slope = decay * row[j]
                    squares[j] += slope * slope
                    row[j] -= rate * slope / (math.sqrt(squares[j]) + eps)
                step += 1
            step = stop + 1
            stretch += 1


def _ftrl(hparams: Hparams) -> Scalars:
    lr, l1, l2 = hparams["lr"], hparams["l1"], hparams["l2"]
    return lr, l1, l2, -hparams["lr_power"], hparams["beta"]


@deferred_update("ftrl", _ftrl)
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
    """Weights follow from the states and the last step's scalars alone.

    Scalars: rate, l1, l2, -lr_power, beta.
    """
    scalars = np.empty(5, rows.dtype)
    for i in range(len(slots)):
        if slots[i] < 0 or len(firsts) == 0 or words[slots[i], word] >= last:
            continue
        stretch = stretch_of(firsts, last)
        if stretch == stretch_of(firsts, words[slots[i], word]):
            continue
        row = rows[slots[i]][begin:end]
        squares = rows[slots[i]][states[0] : states[0] + end - begin]
        linear = rows[slots[i]][states[1] : states[1] + end - begin]
        scalars[:] = past[stretch, :5]
        for j in range(len(row)):
            if squares[j] > 0:
                powered = power(squares[j], scalars[3])
                row[j] = ftrl_solution(
                    linear[j], powered, scalars[0], scalars[1], scalars[2], scalars[4]
                )
