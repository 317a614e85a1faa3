"""The rows of a table in memory: the index of their ids, and their records.

[Note: rounding at random]  A step of training is often smaller than half the distance between two
numbers of 16 bits.  Rounded to the nearest, it would be lost each time.  So the result of a step is
rounded up or down at random, with the probabilities that make the mean the exact result (stochastic
rounding: Gupta et al., "Deep Learning with Limited Numerical Precision", 2015).  The random bits
are a hash of the table's seed, the row's id, the column and the step: servers that take the same
steps hold the same bits.  A number of 16 bits stays what it is.  Values that are set, and not
stepped, are rounded to the nearest.

[Note: halves in memory]  A record has the values as 16 bits each, and behind them float32 states
and words as any other.  All arithmetic is in float32: the records of a step are copied into whole
ones, the kernels change those, and the values go back rounded.  So there is one set of kernels, and
a step costs two copies more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pserver.table.ids import mix, plain
from pserver.table.index import FETCHED, GrowingArray, Index, Layout
from pserver.table.kernels import Array, copy, kernel, prefetch
from pserver.table.rules import AHEAD, LINE
from transpiler.ir.tables import HALVES, Initial, Table

# ---- initializers ----
#
# Initial values of rows: they depend on the table's seed, the row's id and the column alone.
#
# They are counter-based: value i of a row is a hash of (seed, id, i), so that no server need know
# what another has drawn, or in which order.  Normal values come in pairs, by Box and Muller (A note
# on the generation of random normal deviates, 1958).


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
    """Writes new records: initial values, and in the columns behind them those of ``template``.

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


# ---- half precision ----
#
# Numbers of 16 bits, bfloat16 and float16, from and to float32.


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


# ---- rows ----


BLOCK = 65536  # rows that are handled at a time where all are
FLOATS = ("pushed", "show", "click", "unseen")  # words that are float64; the others are int64
_NO_WORDS = np.zeros((0, 0), np.int64)


class RowMemory(NamedTuple):
    """Rows for kernels to change.

    Attributes:
        records: [n, columns].
        words: the same memory as words.
        places: int64[n], where among them the rows are; -1 for missing ones.
    """

    records: Array
    words: Array
    places: Array


@kernel
def _gather(
    rows: Array,
    slots: Array,
    ids: Array,
    width: int,
    out: Array,
    template: Array,
    dim: int,
    seed: np.uint64,
    kind: int,
    low: float,
    high: float,
) -> None:
    """Copies the first ``width`` columns of records; of a missing row, its initial record."""
    start, record = rows.ctypes.data, rows.shape[1] * rows.itemsize
    into, size = out.ctypes.data, width * rows.itemsize
    for i in range(len(slots)):
        if i + AHEAD < len(slots):
            address = start + np.uint64(slots[i + AHEAD] * record)
            for line in range(0, size, LINE):
                prefetch(address + np.uint64(line))
        if slots[i] < 0:
            write_initial(out[i], dim, ids[i], seed, kind, low, high)
            for j in range(dim, width):
                out[i, j] = template[j]
        else:
            source, target = start + np.uint64(slots[i] * record), into + np.uint64(i * size)
            for line in range(0, size - LINE + 1, LINE):
                copy(target + np.uint64(line), source + np.uint64(line), LINE)
            done = size - size % LINE
            if done < size:
                copy(target + np.uint64(done), source + np.uint64(done), size - done)


class Rows:
    """The rows of one table: index and records as one thing.

    One caller changes them at a time; calls of :meth:`locate` and :meth:`gather` may run beside
    each other.

    Args:
        table: the table's description in the plan.
        states: name and width of each state.
        words: names of the words of records; see ``Layout``.

    Attributes:
        dtype: of arithmetic and of states: np.float32 or np.float64.
        seed: the table's, as kernels take it.
        index: id -> slot.
        layout: of a record, as kernels see it.
        stored: of a record in memory; the same, where values are stored as they are computed.
        template: [columns], the contents of new records behind their values.
        epoch: the number of saves.
        calls: the number of calls that have changed rows.
        removed: ids whose rows were removed since the last save; None before the first save, when
            no removals are noted.
    """

    def __init__(
        self, table: Table, states: Sequence[tuple[str, int]], words: Sequence[str]
    ) -> None:
        self.table = table
        self.dtype: Any = np.float32 if table.computes_in == "float32" else np.float64
        self.seed = seed_word(table.seed)
        self._initial = arguments_of(table.initial)
        self.index = Index()
        self._states, self._words = tuple(states), tuple(words)
        self.layout = Layout(table.dim, self.dtype, states, words)
        self.stored = self._stored_layout()
        self._memory = GrowingArray(self.stored.columns, self.dtype)
        self.template: Array = np.zeros(self.layout.columns, self.dtype)
        self.epoch, self.calls = 0, 0
        self.removed: Index | None = None

    def __len__(self) -> int:
        return len(self.index)

    def _stored_layout(self) -> Layout:
        return self.layout

    @property
    def records(self) -> Array:
        """[slots, columns]: the memory itself."""
        return self._memory.array

    @property
    def words(self) -> Array:
        """The same memory as int64[slots, words of 8 bytes]; empty where records have none."""
        return self._memory.array.view(np.int64) if self.layout.has_words else _NO_WORDS

    def word_type(self, name: str) -> Any:
        """float64 or int64."""
        return np.float64 if name in FLOATS else np.int64

    def word(self, name: str) -> Array:
        """One word of every slot; the memory itself."""
        words: Array = self._memory.array.view(self.word_type(name))
        return words[:, self.stored.words[name]]

    def state(self, name: str) -> Array:
        """One state of every slot, [slots, width]; the memory itself."""
        begin, width = self.stored.states[name]
        return self.records[:, begin : begin + width]

    def has(self, name: str) -> bool:
        """Whether records have this word."""
        return self.layout.words[name] >= 0

    @property
    def bytes_held(self) -> int:
        """Memory of records and index, in bytes."""
        return self.index.used * self._memory.row_bytes + self.index.bytes_held

    def add_word(self, name: str) -> None:
        """Gives records one more word, which is 0; it becomes their first.

        Copies all rows.
        """
        self._words = (name, *self._words)
        old, held, template = self.stored, self._memory.array, self.template
        self.layout = Layout(self.table.dim, self.dtype, self._states, self._words)
        self.stored = self._stored_layout()
        self._memory = GrowingArray(self.stored.columns, self.dtype)
        self._memory.need(self.index.used)
        states = sum(width for _, width in self._states)
        width = self.stored.dim + states
        for begin in range(0, self.index.used, BLOCK):
            part = slice(begin, min(begin + BLOCK, self.index.used))
            self._memory.array[part, :width] = held[part, :width]
            for name, at in old.words.items():
                if at >= 0 and self.has(name):
                    self.words[part, self.stored.words[name]] = held.view(np.int64)[part, at]
        self.template = np.zeros(self.layout.columns, self.dtype)
        self.template[: self.table.dim + states] = template[: self.table.dim + states]

    def begin_change(self, slots: Array) -> RowMemory:
        """The records of rows for kernels to change, until :meth:`end_change`.

        Args:
            slots: int64[n], -1 for missing rows.
        """
        return RowMemory(self.records, self.words, slots)

    def end_change(self, slots: Array, memory: RowMemory, step: int) -> None:
        """Takes in what ``step`` has changed."""

    def set_values(self, slots: Array, values: Array) -> None:
        """Sets the values of rows, [n, dim]."""
        self.records[slots, : self.table.dim] = values

    def round_values(self, values: Array) -> None:
        """Rounds the values of [n, dim or more], in place, to numbers that rows can hold."""

    def gather(self, slots: Array, ids: Array, out: Array) -> None:
        """Copies the first columns of records, as many as ``out`` has; of a missing row (slot -1),
        its initial record.
        """
        _gather(
            self.records,
            slots,
            ids,
            out.shape[1],
            out,
            self.template,
            self.table.dim,
            self.seed,
            *self._initial,
        )

    def _prefetched(self, columns: int) -> tuple[int, int, int]:
        """The memory that the index prefetches of each slot: so many columns of the record."""
        return (
            self._memory.address,
            self._memory.row_bytes,
            min(columns * self.template.itemsize, FETCHED),
        )

    def locate(self, ids: Array) -> Array:
        """The slots of ids, -1 for those that have none; prefetches their values."""
        return self.index.locate(ids, self._prefetched(self.stored.dim))[0]

    def mark(self, ids: Array) -> tuple[Array, int, bool]:
        """Notes that a call changes these rows.

        Returns:
            int64[n]: their slots, -1 for ids without a row; how many ids have none; and whether an
            id may have come twice.
        """
        self.calls += 1
        return self.index.mark(ids, self.epoch, self.calls, self._prefetched(self.stored.columns))

    def mark_all(self) -> None:
        """Notes that all rows change."""
        cursor = 0
        while cursor >= 0:
            slots, cursor = self.index.listed(cursor, BLOCK)
            self.index.mark(self.index.ids.array[slots], self.epoch, self.calls)

    def make(self, ids: Array) -> Array:
        """Makes rows for ids that have none: their slots."""
        self.note_known(ids)
        slots = self.index.insert(ids, self.epoch, self.calls)
        self._memory.need(self.index.used)
        self._start_rows(slots, ids)
        return slots

    def _start_rows(self, slots: Array, ids: Array) -> None:
        start_rows(
            self.records, slots, ids, self.table.dim, self.template, self.seed, self.table.initial
        )

    def remove(self, ids: Array) -> None:
        """Removes the rows of those ids that have one."""
        self.index.remove(ids)
        self.note_removed(ids)

    def note_removed(self, ids: Array) -> None:
        """Notes that these ids, which differ, have no row any more and do not wait for one."""
        if self.removed is not None:
            slots, missing = self.removed.locate(ids)
            if missing:
                self.removed.insert(ids[slots < 0], 0, 0)

    def note_known(self, ids: Array) -> None:
        """Notes that these ids have a row again, or wait for one."""
        if self.removed is not None and len(self.removed):
            self.removed.remove(ids)

    def mark_saved(self) -> None:
        """Begins anew to note what changes."""
        self.epoch += 1
        if self.removed is None:
            self.removed = Index()
        self.removed.clear()

    def clear(self) -> None:
        """Forgets all rows."""
        if self.removed is not None:
            cursor = 0
            while cursor >= 0:
                slots, cursor = self.index.listed(cursor, BLOCK)
                self.note_removed(self.index.ids.array[slots])
        used = self.index.used
        self.index.clear()
        self._memory.clear(used)


# ---- half rows ----
#
# The rows of a table whose values are numbers of 16 bits.


class HalfRows(Rows):
    """As :class:`Rows`; see [Note: halves in memory]."""

    def __init__(
        self, table: Table, states: Sequence[tuple[str, int]], words: Sequence[str]
    ) -> None:
        self._kind = HALVES.index(table.dtype)
        super().__init__(table, states, words)

    def _stored_layout(self) -> Layout:
        return Layout(-(-self.table.dim // 2), self.dtype, self._states, self._words)

    @property
    def _halves(self) -> Array:
        """uint16[slots, dim or more]: the memory itself."""
        return self.records.view(np.uint16)

    def begin_change(self, slots: Array) -> RowMemory:
        """See :meth:`Rows.begin_change`: copies of the records."""
        copies = np.empty((len(slots), self.layout.columns), self.dtype)
        self.gather(slots, self.index.ids.array[slots], copies)
        words = copies.view(np.int64) if self.layout.has_words else self.words
        return RowMemory(copies, words, np.where(slots < 0, slots, np.arange(len(slots))))

    def end_change(self, slots: Array, memory: RowMemory, step: int) -> None:
        """See :meth:`Rows.end_change`: values are rounded, and states stay as they are."""
        records = memory.records
        self._round(slots, self.index.ids.array[slots], records, step)
        held = slots >= 0
        for name, (begin, width) in self.layout.states.items():
            self.state(name)[slots[held]] = records[held, begin : begin + width]

    def _round(self, slots: Array, ids: Array, values: Array, step: int) -> None:
        bits = values.view(np.uint32)
        dim, halves = self.table.dim, self._halves
        round_rows(values, bits, dim, ids, self.seed, step, self._kind, halves, slots)

    def gather(self, slots: Array, ids: Array, out: Array) -> None:
        """See :meth:`Rows.gather`."""
        dim, width = self.table.dim, out.shape[1]
        absent = slots < 0
        if absent.any():
            out[absent, dim:] = self.template[dim:width]
            begun = np.empty((int(absent.sum()), dim), self.dtype)
            initial_values(self.table, ids[absent], begun)
            out[absent, :dim] = begun
        widen_rows(self._halves, slots, dim, self._kind, out.view(np.uint32))
        if width > dim:
            self._gather_rest(slots, ~absent, out)

    def _gather_rest(self, slots: Array, held: Array, out: Array) -> None:
        for name, (begin, columns) in self.layout.states.items():
            out[held, begin : begin + columns] = self.state(name)[slots[held]]
        for name, at in self.layout.words.items():
            if at >= 0:
                out.view(np.int64)[held, at] = self.words[slots[held], self.stored.words[name]]

    def set_values(self, slots: Array, values: Array) -> None:
        """See :meth:`Rows.set_values`: rounded to the nearest."""
        values = np.ascontiguousarray(values)
        self._round(slots, slots, values, NEAREST)

    def round_values(self, values: Array) -> None:
        """See :meth:`Rows.round_values`."""
        round_to(values, self.table.dim, self._kind)

    def _start_rows(self, slots: Array, ids: Array) -> None:
        records = np.empty((len(slots), self.table.dim), self.dtype)
        initial_rows(self.table.initial, self.table.seed, ids, records)
        self._round(slots, ids, records, NEAREST)
        self.records[slots, self.stored.dim :] = 0
        for name, (begin, width) in self.layout.states.items():
            self.state(name)[slots] = self.template[begin : begin + width]
