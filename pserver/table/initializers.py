"""Initial values of rows: they depend on the table's seed, the row's id and the column alone.

They are counter-based: value i of a row is a hash of (seed, id, i), so that no server need know
what another has drawn, or in which order.  Normal values come in pairs, by Box and Muller (A note
on the generation of random normal deviates, 1958).
"""

from __future__ import annotations

import math

import numpy as np

from pserver.table.ids import mix, plain
from pserver.table.kernels import Array, kernel
from transpiler.ir.tables import Initial

CONSTANT, UNIFORM, NORMAL = 0, 1, 2
KINDS = {"constant": CONSTANT, "uniform": UNIFORM, "normal": NORMAL}
UNIT = 2.0**-53


@kernel
def _key(seed: np.uint64, value: int) -> np.uint64:
    """The start of a row's sequence of hashes."""
    return mix(mix(np.uint64(value) ^ np.uint64(0xA0761D6478BD642F)) ^ seed)


@kernel
def _uniform(key: np.uint64, index: int) -> float:
    """Uniform value ``index`` of a row, in [0, 1)."""
    return (
        np.float64(mix(key + np.uint64(index) * np.uint64(0xD1B54A32D192ED03)) >> np.uint64(11))
        * UNIT
    )


@kernel
def write_initial(
    row: Array, dim: int, value: int, seed: np.uint64, kind: int, low: float, high: float
) -> None:
    """Writes the initial values of id ``value`` into ``row[:dim]``."""
    if kind == CONSTANT:
        for j in range(dim):
            row[j] = low
        return
    key = _key(seed, value)
    if kind == UNIFORM:
        for j in range(dim):
            row[j] = low + (high - low) * _uniform(key, j)
        return
    for pair in range((dim + 1) // 2):
        length = math.sqrt(-2.0 * math.log(1.0 - _uniform(key, 2 * pair)))
        angle = 2.0 * math.pi * _uniform(key, 2 * pair + 1)
        row[2 * pair] = low + high * length * math.cos(angle)
        if 2 * pair + 1 < dim:
            row[2 * pair + 1] = low + high * length * math.sin(angle)


@kernel
def chance(seed: np.uint64, value: int) -> float:
    """A uniform value in [0, 1) for an id, which decides whether it is admitted; none of its row's
    initial values.
    """
    return _uniform(_key(seed ^ np.uint64(0x8EBC6AF09C88C6E3), value), 0)


def seed_word(seed: int) -> np.uint64:
    """The seed as the kernels take it: any whole number, spread over all 64 bits."""
    return np.uint64(mix(np.uint64(seed % 2**64)))


def arguments_of(initial: Initial) -> tuple[int, float, float]:
    """An initializer as the kernels take it: its kind and two arguments of that kind."""
    return KINDS[initial.kind], initial.low, initial.high


@kernel
def _start(
    rows: Array,
    slots: Array,
    ids: Array,
    dim: int,
    template: Array,
    seed: np.uint64,
    kind: int,
    low: float,
    high: float,
) -> None:
    for i in range(len(slots)):
        row = rows[slots[i]]
        write_initial(row, dim, ids[i], seed, kind, low, high)
        for j in range(dim, rows.shape[1]):
            row[j] = template[j]


@kernel
def _initial(out: Array, ids: Array, seed: np.uint64, kind: int, low: float, high: float) -> None:
    for i in range(len(ids)):
        write_initial(out[i], out.shape[1], ids[i], seed, kind, low, high)


def initial_rows(initial: Initial, seed: int, ids: Array, out: Array) -> None:
    """Writes the initial values of the rows of some ids.

    Args:
        initial: the table's initializer.
        seed: the table's.
        ids: int64[n].
        out: float32[n, dim] or float64[n, dim], contiguous; written.
    """
    assert ids.dtype == np.int64 and out.shape[:1] == ids.shape and out.flags.c_contiguous
    _initial(out, plain(ids, "initial_rows"), seed_word(seed), *arguments_of(initial))


def start_rows(
    rows: Array,
    slots: Array,
    ids: Array,
    dim: int,
    template: Array,
    seed: np.uint64,
    initial: Initial,
) -> None:
    """Writes new records: initial values, and behind them what ``template`` has there.

    Args:
        rows: the memory of the rows' records, [slots, columns].
        slots: int64[n], of the new rows.
        ids: int64[n].
        dim: columns of a row's values.
        template: [columns].
        seed: the table's, of :func:`seed_word`.
        initial: the table's initializer.
    """
    _start(rows, slots, ids, dim, template, seed, *arguments_of(initial))
