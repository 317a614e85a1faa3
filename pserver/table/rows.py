"""The rows of a table in memory: the index of their ids, and their records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from pserver.table.index import FETCHED, Index
from pserver.table.initializers import arguments_of, seed_word, start_rows, write_initial
from pserver.table.kernels import Array, copy, kernel, prefetch
from pserver.table.memory import Layout, Memory
from pserver.table.update_kernels import AHEAD, LINE
from transpiler.ir.tables import Table

BLOCK = 65536  # rows that are handled at a time where all are
FLOATS = ("pushed", "show", "click", "unseen")  # words that are float64; the others are int64
_NO_WORDS = np.zeros((0, 0), np.int64)

Opened = tuple[Array, Array, Array]
"""Records, [n, columns]; the same memory as words; and where among them the rows are."""


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
    """Copies the first ``width`` columns of records; of a row that is not there, what it would
    begin with.
    """
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
        template: [columns], what new records hold behind their values.
        epoch: how many saves there were.
        calls: how many calls have changed rows.
        removed: ids whose rows were removed since the last save; None before the first save, when
            no removals are noted.
    """

    def __init__(
        self, table: Table, states: Sequence[tuple[str, int]], words: Sequence[str]
    ) -> None:
        self.table = table
        self.dtype: Any = np.float32 if table.computes_in == "float32" else np.float64
        self.seed = seed_word(table.seed)
        self.index = Index()
        self._states, self._words = tuple(states), tuple(words)
        self.layout = Layout(table.dim, self.dtype, states, words)
        self.stored = self._stored_layout()
        self._memory = Memory(self.stored.columns, self.dtype)
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
        self._memory = Memory(self.stored.columns, self.dtype)
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

    @contextmanager
    def opened(self, slots: Array, step: int = 0) -> Iterator[Opened]:
        """The records of rows for kernels to change, until the block ends.

        Args:
            slots: int64[n], -1 for rows that are not there.
            step: that changes them.
        """
        yield self.records, self.words, slots

    def set_values(self, slots: Array, values: Array) -> None:
        """Sets the values of rows, [n, dim]."""
        self.records[slots, : self.table.dim] = values

    def round_values(self, values: Array) -> None:
        """Rounds the values of [n, dim or more], in place, to numbers that rows can hold."""

    def gather(self, slots: Array, ids: Array, out: Array) -> None:
        """Copies the first columns of records, as many as ``out`` has; of a row that is not there
        (slot -1), what it would begin with.
        """
        start = arguments_of(self.table.initial)
        _gather(
            self.records,
            slots,
            ids,
            out.shape[1],
            out,
            self.template,
            self.table.dim,
            self.seed,
            *start,
        )

    def _prefetched(self, columns: int) -> tuple[int, int, int]:
        """What the index prefetches of each slot: so many columns of the record."""
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
