"""The update rules of rows: the effect of a step on the rows that it touches.

Each kernel does to a row what torch's optimizer of that name does, operation by operation and in
the row's own precision.  The scalars of a step (a rate divided by its bias correction) are computed
in double, once, as torch does; the function that computes them stands above its kernel.  Its effect
on rows that it does not touch is in deferred.py; a rule's hparams, flags and states are in
``transpiler.ir.rules``.

A kernel takes

- ``rows``: the memory of the rows' records, [slots, columns], updated in place;
- ``slots``: int64[u], the rows' slots; a row of slot -1 is left out;
- ``gradients``: [u, dim] of the rows' dtype; may be overwritten;
- ``begin``, ``end``: the segment's columns;
- ``states``: int64, the first column in a record of each of the rule's states;
- ``scalars``: the step's, of the rows' dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pserver.table.kernels import Array, kernel, prefetch
from transpiler.ir.rules import ROW_RULES

AHEAD = 16  # rows whose records are being fetched
LINE = 64  # bytes that are fetched at once

Scalars = tuple[float, ...]
Hparams = Mapping[str, Any]
Kernel = Callable[..., None]


@dataclass(frozen=True, slots=True)
class RowUpdate:
    """The effect of a step on the rows that it touches, under one rule.

    Attributes:
        kernel: updates rows in place; see the module's docstring.
        scalars: (the step's hparams and flags, the step's number from 1 on) -> the kernel's
            scalars, in the kernel's order.
    """

    kernel: Kernel
    scalars: Callable[[Hparams, int], Scalars]


ROW_UPDATES: dict[str, RowUpdate] = {}
"""Rule name -> update.  Complete once this module is imported: all the kernels are here."""


def row_update(rule: str, scalars: Callable[[Hparams, int], Scalars]) -> Callable[[Kernel], Kernel]:
    """Makes the decorated kernel the update of rows under ``rule``; see :class:`RowUpdate`."""
    assert rule in ROW_RULES, f"expected a rule for rows, got {rule!r}"

    def registered(kernel: Kernel) -> Kernel:
        ROW_UPDATES[rule] = RowUpdate(kernel, scalars)
        return kernel

    return registered


@kernel
def fetch(start: int, record: int, slots: Array, i: int) -> None:
    """Fetches the record of the row ``AHEAD`` places on; ``record``: its bytes."""
    if i + AHEAD < len(slots):
        address = start + np.uint64(slots[i + AHEAD] * record)
        for line in range(0, record, LINE):
            prefetch(address + np.uint64(line))


@kernel
def tiny_of(rows: Array) -> float:
    """The factor by which a change is surely too small for a value: a quarter of a unit in its last
    place.
    """
    return 2.0**-26 if rows.itemsize == 4 else 2.0**-55


def _sgd(hparams: Hparams, step: int) -> Scalars:
    return hparams["lr"], hparams["weight_decay"]


@row_update("sgd", _sgd)
@kernel
def sgd(
    rows: Array, slots: Array, gradients: Array, begin: int, end: int, states: Array, scalars: Array
) -> None:
    """torch.optim.SGD without momentum.  Scalars: rate, weight decay."""
    rate, decay = scalars[0], scalars[1]
    start, record = rows.ctypes.data, rows.shape[1] * rows.itemsize
    for i in range(len(slots)):
        fetch(start, record, slots, i)
        if slots[i] < 0:
            continue
        row, gradient = rows[slots[i]], gradients[i]
        for j in range(begin, end):
            row[j] -= rate * (gradient[j] + decay * row[j])


def _momentum(hparams: Hparams, step: int) -> Scalars:
    lr, momentum, gain = hparams["lr"], hparams["momentum"], 1 - hparams["dampening"]
    return lr, momentum, gain, hparams["weight_decay"], hparams["nesterov"]


@row_update("momentum", _momentum)
@kernel
def momentum(
    rows: Array, slots: Array, gradients: Array, begin: int, end: int, states: Array, scalars: Array
) -> None:
    """torch.optim.SGD with momentum.

    Scalars: rate, momentum, 1 - dampening (1 at first), weight decay, whether Nesterov's.
    """
    rate, keep, gain = scalars[0], scalars[1], scalars[2]
    decay, nesterov = scalars[3], scalars[4] != 0
    start, record = rows.ctypes.data, rows.shape[1] * rows.itemsize
    for i in range(len(slots)):
        fetch(start, record, slots, i)
        if slots[i] < 0:
            continue
        row, gradient = rows[slots[i]][begin:end], gradients[i][begin:end]
        velocity = rows[slots[i]][states[0] :]
        for j in range(len(row)):
            slope = gradient[j] + decay * row[j]
            if keep != 0:
                velocity[j] = velocity[j] * keep + gain * slope
                slope = slope + keep * velocity[j] if nesterov else velocity[j]
            row[j] -= rate * slope


def _adagrad(hparams: Hparams, step: int) -> Scalars:
    rate = hparams["lr"] / (1 + (step - 1) * hparams["lr_decay"])
    return rate, hparams["weight_decay"], hparams["eps"]


@row_update("adagrad", _adagrad)
@kernel
def adagrad(
    rows: Array, slots: Array, gradients: Array, begin: int, end: int, states: Array, scalars: Array
) -> None:
    """torch.optim.Adagrad.  Scalars: rate at this step, weight decay, eps."""
    rate, decay, eps = scalars[0], scalars[1], scalars[2]
    start, record = rows.ctypes.data, rows.shape[1] * rows.itemsize
    for i in range(len(slots)):
        fetch(start, record, slots, i)
        if slots[i] < 0:
            continue
        row, gradient = rows[slots[i]][begin:end], gradients[i][begin:end]
        squares = rows[slots[i]][states[0] :]
        for j in range(len(row)):
            slope = gradient[j] + decay * row[j]
            squares[j] += slope * slope
            row[j] -= rate * slope / (math.sqrt(squares[j]) + eps)


def _rowwise_adagrad(hparams: Hparams, step: int) -> Scalars:
    return hparams["lr"], hparams["weight_decay"], hparams["eps"]


@row_update("rowwise_adagrad", _rowwise_adagrad)
@kernel
def rowwise_adagrad(
    rows: Array, slots: Array, gradients: Array, begin: int, end: int, states: Array, scalars: Array
) -> None:
    """One accumulator a row, the mean of its squared gradients (Mudigere et al.: Software-hardware
    co-design for fast and scalable training of deep learning recommendation models, 2022).
    Scalars: rate, weight decay of touched rows, eps.
    """
    rate, decay, eps = scalars[0], scalars[1], scalars[2]
    start, record = rows.ctypes.data, rows.shape[1] * rows.itemsize
    for i in range(len(slots)):
        fetch(start, record, slots, i)
        if slots[i] < 0:
            continue
        row, gradient = rows[slots[i]][begin:end], gradients[i][begin:end]
        squares = rate - rate
        for j in range(len(row)):
            gradient[j] += decay * row[j]
            squares += gradient[j] * gradient[j]
        rows[slots[i], states[0]] += squares / len(row)
        divisor = math.sqrt(rows[slots[i], states[0]]) + eps
        for j in range(len(row)):
            row[j] -= rate * gradient[j] / divisor


def _decayed_adagrad(hparams: Hparams, step: int) -> Scalars:
    return hparams["lr"], hparams["decay"], 1 - hparams["decay"], hparams["eps"]


@row_update("decayed_adagrad", _decayed_adagrad)
@kernel
def decayed_adagrad(
    rows: Array, slots: Array, gradients: Array, begin: int, end: int, states: Array, scalars: Array
) -> None:
    """transpiler.optim.optim.DecayedAdagrad; the average of a row decays in the steps
    that touch it only.  Scalars: rate, decay, 1 - decay, eps.
    """
    rate, keep, gain, eps = scalars[0], scalars[1], scalars[2], scalars[3]
    start, record = rows.ctypes.data, rows.shape[1] * rows.itemsize
    for i in range(len(slots)):
        fetch(start, record, slots, i)
        if slots[i] < 0:
            continue
        row, gradient = rows[slots[i]][begin:end], gradients[i][begin:end]
        moment = rows[slots[i]][states[0] :]
        for j in range(len(row)):
            moment[j] = moment[j] * keep + gain * gradient[j] * gradient[j]
            row[j] -= rate * gradient[j] / (math.sqrt(moment[j]) + eps)


def _interval(hparams: Hparams, step: int) -> Scalars:
    return hparams["alpha"], step


@row_update("interval", _interval)
@kernel
def interval(
    rows: Array, slots: Array, gradients: Array, begin: int, end: int, states: Array, scalars: Array
) -> None:
    """A moving average of the steps between two that touch the row, whatever its gradient (Yi et
    al.: Sampling-bias-corrected neural modeling, 2019, algorithm 2).  Scalars: alpha, the step.
    """
    alpha, step = scalars[0], scalars[1]
    start, record = rows.ctypes.data, rows.shape[1] * rows.itemsize
    for i in range(len(slots)):
        fetch(start, record, slots, i)
        if slots[i] < 0:
            continue
        row, since = rows[slots[i]][begin:end], step - rows[slots[i], states[0]]
        for j in range(len(row)):
            row[j] = since if row[j] == 0 else row[j] + alpha * (since - row[j])
        rows[slots[i], states[0]] = step


def _adam(hparams: Hparams, step: int) -> Scalars:
    beta, beta_square = hparams["betas"]
    rate, root = hparams["lr"] / (1 - beta**step), (1 - beta_square**step) ** 0.5
    gains = 1 - beta, beta_square, 1 - beta_square
    return rate, *gains, root, hparams["eps"], hparams["weight_decay"], 1.0


def _adamw(hparams: Hparams, step: int) -> Scalars:
    return *_adam(hparams, step)[:6], 0.0, 1 - hparams["lr"] * hparams["weight_decay"]


@row_update("adam", _adam)
@row_update("adamw", _adamw)
@kernel
def adam(
    rows: Array, slots: Array, gradients: Array, begin: int, end: int, states: Array, scalars: Array
) -> None:
    """torch.optim.Adam and AdamW.

    Scalars: rate over its bias correction, 1 - beta1, beta2, 1 - beta2, the root of the other
    correction, eps, weight decay that is added to the gradient, and the factor of decoupled decay.
    """
    rate, gain, keep_square, gain_square = scalars[0], scalars[1], scalars[2], scalars[3]
    root, eps, decay, shrink = scalars[4], scalars[5], scalars[6], scalars[7]
    start, record = rows.ctypes.data, rows.shape[1] * rows.itemsize
    for i in range(len(slots)):
        fetch(start, record, slots, i)
        if slots[i] < 0:
            continue
        row, gradient = rows[slots[i]][begin:end], gradients[i][begin:end]
        mean, square = rows[slots[i]][states[0] :], rows[slots[i]][states[1] :]
        for j in range(len(row)):
            slope = gradient[j] + decay * row[j]
            value = row[j] * shrink
            mean[j] += gain * (slope - mean[j])
            square[j] = square[j] * keep_square + gain_square * slope * slope
            row[j] = value - rate * mean[j] / (math.sqrt(square[j]) / root + eps)


def _lazy_adam(hparams: Hparams, step: int) -> Scalars:
    beta, beta_square = hparams["betas"]
    rate = hparams["lr"] * (1 - beta_square**step) ** 0.5 / (1 - beta**step)
    return rate, 1 - beta, 1 - beta_square, hparams["eps"]


@row_update("lazy_adam", _lazy_adam)
@kernel
def lazy_adam(
    rows: Array, slots: Array, gradients: Array, begin: int, end: int, states: Array, scalars: Array
) -> None:
    """torch.optim.SparseAdam.

    Scalars: rate with both bias corrections, 1 - beta1, 1 - beta2, eps.
    """
    rate, gain, gain_square, eps = scalars[0], scalars[1], scalars[2], scalars[3]
    start, record = rows.ctypes.data, rows.shape[1] * rows.itemsize
    for i in range(len(slots)):
        fetch(start, record, slots, i)
        if slots[i] < 0:
            continue
        row, gradient = rows[slots[i]][begin:end], gradients[i][begin:end]
        mean, square = rows[slots[i]][states[0] :], rows[slots[i]][states[1] :]
        for j in range(len(row)):
            mean[j] += gain * (gradient[j] - mean[j])
            square[j] += gain_square * (gradient[j] * gradient[j] - square[j])
            row[j] -= rate * (mean[j] / (math.sqrt(square[j]) + eps))


@kernel
def power(value: float, exponent: float) -> float:
    """As torch's pow, which takes a root where the exponent says so."""
    return math.sqrt(value) if exponent == 0.5 else value**exponent


@kernel
def ftrl_solution(
    linear: float, powered: float, rate: float, l1: float, l2: float, beta: float
) -> float:
    """The weight that follows from the linear term and the accumulated squares to their power."""
    shrunk = linear - min(max(linear, -l1), l1)
    return -shrunk / ((powered + beta) / rate + l2)


def _ftrl(hparams: Hparams, step: int) -> Scalars:
    lr, l1, l2 = hparams["lr"], hparams["l1"], hparams["l2"]
    return lr, l1, l2, -hparams["lr_power"], hparams["beta"]


@row_update("ftrl", _ftrl)
@kernel
def ftrl(
    rows: Array, slots: Array, gradients: Array, begin: int, end: int, states: Array, scalars: Array
) -> None:
    """transpiler.optim.optim.Ftrl.  Scalars: rate, l1, l2, -lr_power, beta."""
    rate, l1, l2, exponent, beta = scalars[0], scalars[1], scalars[2], scalars[3], scalars[4]
    start, record = rows.ctypes.data, rows.shape[1] * rows.itemsize
    for i in range(len(slots)):
        fetch(start, record, slots, i)
        if slots[i] < 0:
            continue
        row, gradient = rows[slots[i]][begin:end], gradients[i][begin:end]
        squares, linear = rows[slots[i]][states[0] :], rows[slots[i]][states[1] :]
        for j in range(len(row)):
            before = power(squares[j], exponent)
            squares[j] += gradient[j] * gradient[j]
            after = power(squares[j], exponent)
            linear[j] = linear[j] + gradient[j] - (after - before) / rate * row[j]
            if squares[j] > 0:
                row[j] = ftrl_solution(linear[j], after, rate, l1, l2, beta)
