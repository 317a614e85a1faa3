"""The update rules of rows, as kernels over the rows that a step touches.

Each does to a row what torch's optimizer of that name does, operation by operation and in the row's
own precision; the scalars of a step (a rate divided by its bias correction) are worked out in
double, once, as torch does.  What a step does to rows that it does not touch is in deferred_updates.py.

A kernel takes the memory of records, the slots of the rows (-1: leave out), their gradients [u,
dim], the segment's columns [begin, end), the first column of each state, and the step's scalars.
"""

from __future__ import annotations

import math

import numpy as np

from pserver.table.kernels import Array, kernel, prefetch

AHEAD = 16  # rows whose records are being fetched
LINE = 64  # bytes that are fetched at once


@kernel
def fetch(start: int, record: int, slots: Array, i: int) -> None:
    """Has the record of a row further on fetched; ``record``: its bytes."""
    if i + AHEAD < len(slots):
        address = start + np.uint64(slots[i + AHEAD] * record)
        for line in range(0, record, LINE):
            prefetch(address + np.uint64(line))


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


@kernel
def momentum(
    rows: Array, slots: Array, gradients: Array, begin: int, end: int, states: Array, scalars: Array
) -> None:
    """torch.optim.SGD with momentum.

    Scalars: rate, momentum, 1 - dampening (1 at first), weight decay, whether Nesterov's.
    """
    rate, keep, gain, decay, nesterov = (
        scalars[0],
        scalars[1],
        scalars[2],
        scalars[3],
        scalars[4] != 0,
    )
    start, record = rows.ctypes.data, rows.shape[1] * rows.itemsize
    for i in range(len(slots)):
        fetch(start, record, slots, i)
        if slots[i] < 0:
            continue
        row, gradient, velocity = (
            rows[slots[i]][begin:end],
            gradients[i][begin:end],
            rows[slots[i]][states[0] :],
        )
        for j in range(len(row)):
            slope = gradient[j] + decay * row[j]
            if keep != 0:
                velocity[j] = velocity[j] * keep + gain * slope
                slope = slope + keep * velocity[j] if nesterov else velocity[j]
            row[j] -= rate * slope


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
        row, gradient, squares = (
            rows[slots[i]][begin:end],
            gradients[i][begin:end],
            rows[slots[i]][states[0] :],
        )
        for j in range(len(row)):
            slope = gradient[j] + decay * row[j]
            squares[j] += slope * slope
            row[j] -= rate * slope / (math.sqrt(squares[j]) + eps)


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


@kernel
def adam(
    rows: Array, slots: Array, gradients: Array, begin: int, end: int, states: Array, scalars: Array
) -> None:
    """torch.optim.Adam and AdamW.  Scalars: see ``row_optimizer.adam_scalars``."""
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
    """The weight that minimises what ``linear`` and the accumulated squares (to their power) stand
    for.
    """
    shrunk = linear - min(max(linear, -l1), l1)
    return -shrunk / ((powered + beta) / rate + l2)


@kernel
def ftrl(
    rows: Array, slots: Array, gradients: Array, begin: int, end: int, states: Array, scalars: Array
) -> None:
    """transpiler.optim.ftrl.Ftrl.  Scalars: rate, l1, l2, -lr_power, beta."""
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
