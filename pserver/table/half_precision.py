"""Numbers of 16 bits, bfloat16 and float16, from and to float32.

[Note: rounding at random]  A step of training is often smaller than half the distance between two
numbers of 16 bits.  Rounded to the nearest, it would be lost each time.  So the result of a step is
rounded up or down at random, with the probabilities that make the mean the exact result (stochastic
rounding: Gupta et al., "Deep Learning with Limited Numerical Precision", 2015).  The random bits
are a hash of the table's seed, the row's id, the column and the step: servers that take the same
steps hold the same bits.  A number of 16 bits stays what it is.  Values that are set, and not
stepped, are rounded to the nearest.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pserver.table.ids import mix
from pserver.table.initializers import initial_rows
from pserver.table.kernels import Array, kernel
from transpiler.ir.tables import HALVES, Table

NEAREST = -1  # in place of a step
_FLOAT16 = HALVES.index("float16")


@kernel
def _float32_bits(half: int, kind: int) -> np.uint32:
    """A number's bits as a float32."""
    bits = np.uint32(half)
    if kind != _FLOAT16:
        return bits << np.uint32(16)
    sign = (bits & np.uint32(0x8000)) << np.uint32(16)
    exponent, fraction = (bits >> np.uint32(10)) & np.uint32(31), bits & np.uint32(1023)
    if exponent == 31:
        return sign | np.uint32(0x7F800000) | (fraction << np.uint32(13))
    if exponent:
        return sign | ((exponent + np.uint32(112)) << np.uint32(23)) | (fraction << np.uint32(13))
    shift = np.uint32(0)
    while fraction and fraction < 1024:  # below the least normal float16
        fraction, shift = fraction << np.uint32(1), shift + np.uint32(1)
    if not fraction:
        return sign
    fraction = (fraction & np.uint32(1023)) << np.uint32(13)
    return sign | ((np.uint32(113) - shift) << np.uint32(23)) | fraction


@kernel
def _bfloat16(bits: int, chance: int) -> int:
    """A float32's bits, rounded; ``chance``: 16 random bits, or NEAREST."""
    if bits & 0x7FFFFFFF > 0x7F800000:
        return (bits >> 16) | 0x40  # still no number
    if chance == NEAREST:
        chance = 0x7FFF + ((bits >> 16) & 1)
    return (bits + chance) >> 16


@kernel
def _float16(bits: int, value: float, chance: int) -> int:
    """As :func:`_bfloat16`; ``value``: what the bits are."""
    sign, size = (bits >> 16) & 0x8000, bits & 0x7FFFFFFF
    if size >= 0x7F800000:
        return sign | 0x7C00 | (0x200 if size > 0x7F800000 else 0)
    exponent = max((size >> 23) - 127, -14)
    units = math.ldexp(abs(value), 10 - exponent)
    if chance == NEAREST:
        whole = int(np.rint(units))
    else:
        whole = int(math.floor(units + chance / 65536.0))
    return sign | min(((exponent + 14) << 10) + whole, 0x7C00)


@kernel
def _chances(seed: np.uint64, step: int, value: int, column: int) -> np.uint64:
    """Random bits for four columns of id ``value``."""
    row = mix(np.uint64(value) ^ mix(seed ^ np.uint64(step) ^ np.uint64(0x9F8D3C2B7A6E5D41)))
    return mix(row + np.uint64(column >> 2) * np.uint64(0xD1B54A32D192ED03))


@kernel
def round_rows(
    values: Array,
    bits: Array,
    dim: int,
    ids: Array,
    seed: np.uint64,
    step: int,
    kind: int,
    halves: Array,
    slots: Array,
) -> None:
    """Writes values as halves.

    Args:
        values: float32[n, columns or more], of which ``dim`` are rounded.
        bits: the same memory as uint32.
        ids: int64[n].
        seed: of the table, see ``seed_word``.
        step: that has made the values, or NEAREST.  See [Note: rounding at random].
        kind: index among HALVES.
        halves: uint16[slots, dim or more], written.
        slots: int64[n], where each row goes; -1: nowhere.
    """
    chances: Any = np.uint64(0)
    chance: Any = NEAREST
    for i in range(len(slots)):
        if slots[i] < 0:
            continue
        row = halves[slots[i]]
        for j in range(dim):
            if step != NEAREST:
                if j % 4 == 0:
                    chances = _chances(seed, step, ids[i], j)
                chance = np.int64(chances & np.uint64(0xFFFF))
                chances >>= np.uint64(16)
            each: Any = np.int64(bits[i, j])
            row[j] = (
                _float16(each, values[i, j], chance)
                if kind == _FLOAT16
                else _bfloat16(each, chance)
            )


@kernel
def widen_rows(halves: Array, slots: Array, dim: int, kind: int, bits: Array) -> None:
    """Writes halves as float32.

    Args:
        halves: uint16[slots, dim or more].
        slots: int64[n]; -1: the row stays as it is.
        kind: index among HALVES.
        bits: float32[n, dim or more] as uint32, written.
    """
    for i in range(len(slots)):
        if slots[i] < 0:
            continue
        row = halves[slots[i]]
        for j in range(dim):
            bits[i, j] = _float32_bits(row[j], kind)


def round_to(values: Array, dim: int, kind: int) -> None:
    """Rounds the first ``dim`` columns of float32[n, columns], in place, to the nearest."""
    every, halves = np.arange(len(values)), np.empty((len(values), dim), np.uint16)
    bits = values.view(np.uint32)
    round_rows(values, bits, dim, every, np.uint64(0), NEAREST, kind, halves, every)
    widen_rows(halves, every, dim, kind, bits)


def initial_values(table: Table, ids: Array, out: Array) -> None:
    """Writes the initial values of the rows of some ids, as a table holds them.

    Args:
        ids: int64[n].
        out: [n, dim] of the dtype that the table computes in, contiguous; written.
    """
    initial_rows(table.initial, table.seed, ids, out)
    if table.dtype in HALVES:
        round_to(out, table.dim, HALVES.index(table.dtype))
