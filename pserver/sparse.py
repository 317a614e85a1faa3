"""A sparse table: rows by id, with their optimizer state, on one server or in one trainer.  Pure arithmetic.

A row is made by the first push to its id; until then, and when nobody asks, it takes no memory: whoever reads it gets its initial
value.  One caller changes a table at a time; lookups may run beside each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pserver.ids import checked, owners, plain, unique
from pserver.index import Index, outside
from pserver.initial import numbers, seed_word, start_rows, write_initial
from pserver.kernels import Array, kernel, prefetch
from pserver.records import Layout, Memory
from pserver.row_rules import AHEAD, DEFAULTS, UPDATES
from transpiler.plan import Number, Rule
from transpiler.tables import Table

DTYPES: Mapping[str, Any] = {"float32": np.float32, "float64": np.float64}


@kernel
def _gather(rows: Array, slots: Array, ids: Array, out: Array, seed: np.uint64, kind: int, low: float, high: float) -> None:
    dim = out.shape[1]
    start, size = rows.ctypes.data, rows.shape[1] * rows.itemsize
    for i in range(len(slots)):
        if i + AHEAD < len(slots):
            ahead = start + np.uint64(slots[i + AHEAD] * size)
            for line in range(0, dim * rows.itemsize, 64):
                prefetch(ahead + np.uint64(line))
        if slots[i] < 0:
            write_initial(out[i], dim, ids[i], seed, kind, low, high)
        else:
            row = rows[slots[i]]
            for j in range(dim):
                out[i, j] = row[j]


class SparseTable:
    """One server's part of a table.

    Args:
        table: what the plan says of it.
        rules: one for each of its segments; their numbers are the first step's until :meth:`update` brings others.
        server: which of the servers; ``servers``: how many there are.

    Raises:
        ValueError: a rule that rows do not have, or another number of rules than of segments.
    """

    def __init__(self, table: Table, rules: Sequence[Rule], server: int = 0, servers: int = 1) -> None:
        if len(rules) != len(table.segments):
            raise ValueError(
                f"table {table.name!r}: expected a rule for each of {len(table.segments)} segments, got {len(rules)}"
            )
        for rule in rules:
            if rule.type not in UPDATES:
                raise ValueError(f"table {table.name!r}: expected a rule among {', '.join(UPDATES)}, got {rule.type!r}")
        self.table, self.server, self.servers = table, server, servers
        self.step = 0
        self._rules = tuple(rules)
        self._numbers: list[dict[str, Number]] = [{**DEFAULTS[rule.type], **rule.numbers} for rule in rules]
        self._dtype = DTYPES[table.dtype]
        self._seed = seed_word(table.seed)
        self._index = Index()
        self._layout, self._states = self._laid_out()
        self._memory = Memory(self._layout.columns, self._dtype)
        self._template = np.zeros(self._layout.columns, self._dtype)
        self._calls, self._epoch = 0, 0
        self._counts = dict.fromkeys(("lookups", "pushes"), 0)
        self._refill()

    def _laid_out(self) -> tuple[Layout, list[Array]]:
        """The records' layout, and where each segment's states begin."""
        widths: dict[str, int] = {}
        offsets: list[list[tuple[str, int]]] = []
        for segment, rule in zip(self.table.segments, self._rules, strict=True):
            own = []
            for name, full in UPDATES[rule.type].states.items():
                own.append((name, widths.get(name, 0)))
                widths[name] = widths.get(name, 0) + (segment.end - segment.begin if full else 1)
            offsets.append(own)
        layout = Layout(self.table.dim, self._dtype, list(widths.items()), ())
        at = [np.array([layout.states[name][0] + offset for name, offset in own], np.int64) for own in offsets]
        return layout, at

    def _refill(self) -> None:
        """What the records of new rows begin with, behind their values."""
        for segment, rule, states, held in zip(self.table.segments, self._rules, self._states, self._numbers, strict=True):
            update = UPDATES[rule.type]
            for begin, full in zip(states, update.states.values(), strict=True):
                self._template[begin : begin + (segment.end - segment.begin if full else 1)] = update.begin(held)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def bytes_held(self) -> int:
        """Memory of records and of the index, in bytes."""
        return self._index.used * self._memory.row_bytes + self._index.bytes_held

    def counters(self) -> dict[str, int]:
        """What happened so far."""
        return {"rows": len(self), **self._counts}

    def _ids(self, ids: object) -> Array:
        found = checked(ids, f"table {self.table.name!r}")
        if self.table.rows is not None:
            at = outside(found, 0, self.table.rows)
            if at >= 0:
                raise ValueError(f"table {self.table.name!r}: expected ids from 0 to {self.table.rows - 1}, got {found[at]}")
        return found

    def _matrix(self, array: object, count: int, what: str) -> Array:
        expected = (count, self.table.dim)
        if not isinstance(array, np.ndarray) or array.dtype != self._dtype:
            kind = f"an array of {array.dtype}" if isinstance(array, np.ndarray) else type(array).__name__
            raise TypeError(f"table {self.table.name!r}: {what}: expected {self.table.dtype}, got {kind}")
        if array.shape != expected:
            raise ValueError(f"table {self.table.name!r}: {what}: expected shape {expected}, got {array.shape}")
        return plain(array, f"table {self.table.name!r}: {what}")

    def check_ids(self, ids: Array) -> None:
        """Returns if :meth:`update` would take these ids.

        Raises:
            TypeError: another dtype.
            ValueError: another shape, memory that is not contiguous, an id that comes twice or that the table does not have.
        """
        self._differ(self._ids(ids))

    def lookup(self, ids: Array, out: Array, now: float = 0.0) -> None:
        """Copies rows; an id without a row reads its initial value, and gets none.

        Args:
            ids: int64[n], in any order; they may repeat.
            out: [n, dim] of the table's dtype, written.
            now: seconds since some moment.

        Raises:
            TypeError: another dtype.
            ValueError: another shape, memory that is not contiguous, or an id that the table does not have.
        """
        ids = self._ids(ids)
        if self._matrix(out, len(ids), "out") is not out:
            raise ValueError(f"table {self.table.name!r}: out: expected memory that may be written")
        slots, _ = self._index.locate(ids)
        _gather(self._memory.array, slots, ids, out, self._seed, *numbers(self.table.initial))
        self._counts["lookups"] += len(ids)

    def update(
        self,
        ids: Array,
        gradients: Array,
        numbers: Sequence[Mapping[str, Number]] = (),
        statistics: Array | None = None,
        now: float = 0.0,
    ) -> None:
        """One step of the table.

        Args:
            ids: int64[u], each once.
            gradients: [u, dim] of the table's dtype; may be overwritten.
            numbers: of this step, one mapping for each segment; what is missing stays as it was.

        Raises:
            TypeError: another dtype.
            ValueError: another shape, memory that is not contiguous, an id that comes twice or that the table does not have.
        """
        ids = self._ids(ids)
        gradients = self._matrix(gradients, len(ids), "gradients")
        slots = self._rows(ids)
        for held, given in zip(self._numbers, numbers, strict=False):
            held.update(given)
        self.step += 1
        if self.step == 1:
            self._refill()
        for segment, rule, states, held in zip(self.table.segments, self._rules, self._states, self._numbers, strict=True):
            update = UPDATES[rule.type]
            scalars = np.array(update.scalars(held, self.step), self._dtype)
            if rule.flags.get("maximize"):
                np.negative(gradients[:, segment.begin : segment.end], out=gradients[:, segment.begin : segment.end])
            update.kernel(self._memory.array, slots, gradients, segment.begin, segment.end, states, scalars)
        self._counts["pushes"] += len(ids)

    def _rows(self, ids: Array) -> Array:
        """The slots of these ids; missing rows are made."""
        self._calls += 1
        slots, missing, twice = self._index.mark(ids, self._epoch, self._calls)
        if twice:
            self._differ(ids)
        if missing:
            lacking = np.flatnonzero(slots < 0)
            self._differ(ids[lacking])
            slots[lacking] = self._make(ids[lacking])
        return slots

    def _make(self, ids: Array) -> Array:
        slots = self._index.insert(ids, self._epoch, self._calls)
        self._memory.need(self._index.used)
        start_rows(self._memory.array, slots, ids, self.table.dim, self._template, self._seed, self.table.initial)
        return slots

    def _differ(self, ids: Array) -> None:
        found, inverse = unique(ids)
        if len(found) != len(ids):
            again = int(found[np.argmax(np.bincount(inverse) > 1)])
            raise ValueError(f"table {self.table.name!r}: expected each id once, got {again} again")

    def assign(self, ids: Array, values: Array) -> None:
        """Sets rows, admitted or not; a row that is new has the state of a new row."""
        ids = self._ids(ids)
        values = self._matrix(values, len(ids), "values")
        self._memory.array[self._rows(ids), : self.table.dim] = values

    def add(self, ids: Array, deltas: Array) -> None:
        """Adds to rows; missing rows are made."""
        ids = self._ids(ids)
        deltas = self._matrix(deltas, len(ids), "deltas")
        self._memory.array[self._rows(ids), : self.table.dim] += deltas
        self._counts["pushes"] += len(ids)

    def scan(self, cursor: int, most: int, changed: bool = False) -> tuple[dict[str, Array], int]:
        """Whole records from ``cursor`` (0 at first) on, at most ``most``, and where to go on: -1 at the end."""
        slots, after = self._index.listed(cursor, most, self._epoch if changed else -1)
        rows = self._memory.array[slots]
        chunk = {"ids": self._index.ids.array[slots], "values": np.ascontiguousarray(rows[:, : self.table.dim])}
        for name, (begin, width) in self._layout.states.items():
            chunk[f"state.{name}"] = np.ascontiguousarray(rows[:, begin : begin + width])
        return chunk, after

    def mark_saved(self) -> None:
        """From here on ``scan(changed=True)`` gives what changes after this call."""
        self._epoch += 1

    def load(self, chunk: Mapping[str, Array]) -> None:
        """Takes over the rows of a chunk that this server owns, in place of those that it has."""
        ids = checked(chunk["ids"], f"table {self.table.name!r}: chunk")
        own = np.flatnonzero(owners(ids, self.servers) == self.server)
        slots = self._rows(np.ascontiguousarray(ids[own]))
        values = self._matrix(chunk["values"], len(ids), "chunk")
        self._memory.array[slots, : self.table.dim] = values[own]
        for name, (begin, width) in self._layout.states.items():
            self._memory.array[slots, begin : begin + width] = chunk[f"state.{name}"][own]

    def facts(self) -> dict[str, Any]:
        """What is not in rows: JSON-able."""
        return {"step": self.step, "numbers": self._numbers, "counts": dict(self._counts)}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Takes over what :meth:`facts` returned."""
        self.step = int(facts["step"])
        self._numbers = [dict(held) for held in facts["numbers"]]
        self._counts.update(facts["counts"])

    def clear(self) -> None:
        """Forgets all rows."""
        self._memory.clear(self._index.used)
        self._index.clear()
