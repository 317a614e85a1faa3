"""The steps of Adam and AdamW that did not touch a row.  See [Note: steps made up for] in
deferred_updates.py.

``past`` holds: rate, beta1, beta2, eps, weight decay, and 1 where decay is decoupled (AdamW).
"""

from __future__ import annotations

import math

import numpy as np

from pserver.table.deferred_updates import LONG, end_of, run_of, tiny_of
from pserver.table.kernels import Array, kernel

EACH = 8  # steps between two looks at whether values still move


@kernel
def _fades(least: Array, most: Array) -> bool:
    """Whether steps without a gradient can only ever move a value less and less.

    So it is if a mean fades faster than the root of the squares, even relative to a value that
    decays.
    """
    coupled = most[4] != 0 and most[5] == 0
    return not coupled and most[1] <= math.sqrt(least[2]) * (1 - most[0] * most[4])


@kernel
def _still(
    row: Array, mean: Array, square: Array, step: int, least: Array, most: Array, tiny: float
) -> bool:
    """Whether no value moves from this step on, at whatever rate of the history."""
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
    """Takes steps from ``begun`` on until values are still, or to the last; returns the step
    after.
    """
    step, run = begun, run_of(firsts, begun)
    beta, beta_square, first, second = -1.0, -1.0, 0.0, 0.0
    while step <= last:
        stop = end_of(firsts, run, last)
        if past[run, 1] != beta or past[run, 2] != beta_square:
            beta, beta_square = past[run, 1], past[run, 2]
            first, second = beta**step, beta_square**step
            scalars[0], scalars[1], scalars[2] = 1 - beta, beta_square, 1 - beta_square
        scalars[3], scalars[4] = past[run, 3], past[run, 4] * (1 - past[run, 5])
        scalars[5] = 1 - past[run, 0] * past[run, 4] * past[run, 5]
        gain, keep_square, gain_square, eps, decay, shrink = (
            scalars[0],
            scalars[1],
            scalars[2],
            scalars[3],
            scalars[4],
            scalars[5],
        )
        while step <= stop:
            if (
                fades
                and (step == begun or step % EACH == 0)
                and _still(row, mean, square, step, least, most, tiny)
            ):
                return step
            scalars[6], scalars[7] = past[run, 0] / (1 - first), math.sqrt(1 - second)
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
        run += 1
    return step


@kernel
def _faded(firsts: Array, logs: Array, state: int, step: int) -> float:
    """The logarithm of what a state was multiplied with before ``step``."""
    run = run_of(firsts, step)
    return logs[run, state] + (step - firsts[run]) * logs[run, 2 + state]  # type: ignore[no-any-return]


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
    """Takes the steps from ``step`` to ``last``, of which values feel nothing but decoupled
    decay.
    """
    at_once = last - step >= LONG
    if at_once:
        for state in range(2):
            scalars[state] = math.exp(
                _faded(firsts, logs, state, last + 1) - _faded(firsts, logs, state, step)
            )
        for j in range(len(row)):
            mean[j] *= scalars[0]
            square[j] *= scalars[1]
    run = run_of(firsts, step)
    while step <= last and (decays or not at_once):
        stop = end_of(firsts, run, last)
        scalars[0], scalars[1], scalars[2] = (
            1 - past[run, 1],
            past[run, 2],
            1 - past[run, 0] * past[run, 4] * past[run, 5],
        )
        gain, keep_square, shrink = scalars[0], scalars[1], scalars[2]
        for _ in range(step, stop + 1 if shrink != 1 else step):
            for j in range(len(row)):
                row[j] *= shrink
        for _ in range(step, step if at_once else stop + 1):
            for j in range(len(row)):
                mean[j] += gain * (-mean[j])
                square[j] *= keep_square
        step = stop + 1
        run += 1


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
    """Averages run on, and decay."""
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
