"""The deferred update of Adam and AdamW.

See [Note: deferred updates] in deferred_updates.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from pserver.table.hparam_history import LONG, end_of, faded, stretch_of
from pserver.table.kernels import Array, kernel
from pserver.table.update_kernels import tiny_of

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
    """By what a step multiplies both means where there is no gradient."""
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
    """Averages run on, and weights decay.

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
