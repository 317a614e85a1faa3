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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pserver.table import deferred_adam
from pserver.table.hparam_history import LONG, Factors, end_of, faded, stretch_of
from pserver.table.kernels import Array, kernel
from pserver.table.update_kernels import ftrl_solution, power, tiny_of
from transpiler.ir.rules import ROW_RULES

Scalars = tuple[float, ...]
Hparams = Mapping[str, Any]
Kernel = Callable[..., None]


@dataclass(frozen=True, slots=True)
class DeferredUpdate:
    """What a step does to the rows that it does not touch, under one rule.

    Attributes:
        kernel: takes missed steps, in place; see the module's docstring.
        scalars: (a step's hparams and flags) -> the kernel's scalars, in the kernel's order.
        decay: which of the scalars is weight decay; None: there is none.
        factors: (a step's scalars, dtype) -> by what the step multiplies each of two states where
            they only fade; None: none does.
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
    ("adam", deferred_adam.adam_scalars),
    ("adamw", deferred_adam.adamw_scalars),
):
    deferred_update(_rule, _scalars, 4, deferred_adam.adam_factors)(deferred_adam.adam)


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
    """The velocity runs on.

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
