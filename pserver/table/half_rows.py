"""The rows of a table whose values are numbers of 16 bits.

[Note: halves in memory]  A record has the values as 16 bits each, and behind them float32 states
and words as any other.  All arithmetic is in float32: the records of a step are copied into whole
ones, the kernels change those, and the values go back rounded.  So there is one set of kernels, and
a step costs two copies more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from pserver.table.half_precision import (
    NEAREST,
    initial_values,
    round_rows,
    round_to,
    widen_rows,
)
from pserver.table.initializers import initial_rows
from pserver.table.kernels import Array
from pserver.table.memory import Layout
from pserver.table.rows import Opened, Rows
from transpiler.ir.tables import HALVES, Table


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

    @contextmanager
    def opened(self, slots: Array, step: int = NEAREST) -> Iterator[Opened]:
        """See :meth:`Rows.opened`: copies of the records."""
        ids = self.index.ids.array[slots]
        copies = np.empty((len(slots), self.layout.columns), self.dtype)
        self.gather(slots, ids, copies)
        words = copies.view(np.int64) if self.layout.has_words else self.words
        yield copies, words, np.where(slots < 0, slots, np.arange(len(slots)))
        self._write(slots, ids, copies, step)

    def _write(self, slots: Array, ids: Array, records: Array, step: int) -> None:
        """Values rounded, and states as they are."""
        self._round(slots, ids, records, step)
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
