"""The update rules of rows, as kernels over rows that a step touches.

Each does to a row what torch's optimizer of that name does, operation by operation and in the row's own precision; the scalars of
a step (a rate divided by its bias correction) are worked out in double, once, as torch does.  See missed.py for the steps that
did not touch a row.

A kernel takes the memory of records, the slots of the rows (-1: leave out), their gradients [u, dim], the segment's columns
[begin, end), the first column of each state, and the step's scalars.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from pserver.kernels import Array, kernel, prefetch
from transpiler.plan import Number

AHEAD = 8  # rows whose records are being fetched
LINE = 64  # bytes that are fetched at once


@kernel
def fetch(start: int, row_bytes: int, slot: int) -> None:
    """Has a record fetched."""
    for line in range(0, row_bytes, LINE):
        prefetch(start + np.uint64(slot * row_bytes + line))


@kernel
def _sgd(rows: Array, slots: Array, gradients: Array, begin: int, end: int, states: Array, scalars: Array) -> None:
    rate, decay = scalars[0], scalars[1]
    start, size = rows.ctypes.data, rows.shape[1] * rows.itemsize
    for i in range(len(slots)):
        if i + AHEAD < len(slots):
            fetch(start, size, slots[i + AHEAD])
        if slots[i] < 0:
            continue
        row, gradient = rows[slots[i]], gradients[i]
        if decay != 0:
            for j in range(begin, end):
                row[j] -= rate * (gradient[j] + decay * row[j])
        else:
            for j in range(begin, end):
                row[j] -= rate * gradient[j]


@kernel
def _adagrad(rows: Array, slots: Array, gradients: Array, begin: int, end: int, states: Array, scalars: Array) -> None:
    rate, decay, eps = scalars[0], scalars[1], scalars[2]
    start, size = rows.ctypes.data, rows.shape[1] * rows.itemsize
    for i in range(len(slots)):
        if i + AHEAD < len(slots):
            fetch(start, size, slots[i + AHEAD])
        if slots[i] < 0:
            continue
        row, gradient, sums = rows[slots[i]], gradients[i], rows[slots[i]][states[0] - begin :]
        for j in range(begin, end):
            slope = gradient[j] + decay * row[j]
            sums[j] += slope * slope
            row[j] -= rate * slope / (math.sqrt(sums[j]) + eps)


def _sgd_scalars(numbers: Mapping[str, Any], step: int) -> tuple[float, ...]:
    return float(numbers["lr"]), float(numbers["weight_decay"])


def _adagrad_scalars(numbers: Mapping[str, Any], step: int) -> tuple[float, ...]:
    return numbers["lr"] / (1 + (step - 1) * numbers["lr_decay"]), float(numbers["weight_decay"]), float(numbers["eps"])


def _none(numbers: Mapping[str, Any]) -> float:
    return 0.0


def _initial_sum(numbers: Mapping[str, Any]) -> float:
    return float(numbers["initial_accumulator_value"])


@dataclass(frozen=True, slots=True)
class Update:
    """One rule.

    Attributes:
        kernel: see the module.
        scalars: (the step's numbers, the step's number from 1 on) -> what the kernel takes.
        states: name -> whether it has a number for each of the segment's columns, or one for the row.
        begin: numbers of the first step -> what states begin with.
    """

    kernel: Callable[..., None]
    scalars: Callable[[Mapping[str, Any], int], tuple[float, ...]]
    states: Mapping[str, bool]
    begin: Callable[[Mapping[str, Any]], float] = _none


UPDATES: Mapping[str, Update] = MappingProxyType(
    {
        "sgd": Update(_sgd, _sgd_scalars, {}),
        "adagrad": Update(_adagrad, _adagrad_scalars, {"sum": True}, _initial_sum),
    }
)

DEFAULTS: Mapping[str, Mapping[str, Number]] = MappingProxyType(
    {
        "sgd": {"lr": 1e-3, "weight_decay": 0.0},
        "adagrad": {"lr": 1e-2, "lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10},
    }
)
"""What numbers are where neither the plan nor a step gives them: as torch's constructors have it."""
