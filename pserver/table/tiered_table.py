"""A sparse table of which memory holds a part: the rows that nobody has pushed to for longest are
on disk.

[Note: two tiers]  A row is in memory or on disk, never in both.  A push brings its rows into
memory; where that would be more than the budget, rows leave it first, in blocks, those that have
waited longest.  What does not push (a lookup, a scan) has rows from the disk as guests: they are
put into memory, read by the code that reads all rows, and taken out again.  So the arithmetic knows
of one tier only, and every number is that of a table without a budget.

Records on disk say which steps they have seen, those in memory only where steps move rows that they
do not touch.  A schedule may make such rules of others at step T: what went to disk before has then
missed nothing up to T.

Ids that wait for admission stay in memory.  A call's own rows are in memory together, whatever the
budget.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pserver.table.disk_tier import ColdRows
from pserver.table.eviction import victims
from pserver.table.ids import owners, unique
from pserver.table.kernels import Array
from pserver.table.rows import BLOCK
from pserver.table.sparse_table import SparseTable
from transpiler.ir.rules import Hparam, Rule
from transpiler.ir.tables import Table

COLD = 1 << 62  # where cursors of rows on disk begin
INDEX_BYTES = 40  # of a row, besides its record: an entry of a table that is 3/5 full, and its id
SHARE = 16  # a part of the budget that leaves memory at once

Chunk = dict[str, Array]


def open_table(
    table: Table, rules: Sequence[Rule], server: int = 0, servers: int = 1, root: Path | None = None
) -> SparseTable:
    """A table in memory, or in two tiers where it has ``memory_bytes``.

    Args:
        root: where rows go that leave memory; None: where temporary files go.

    Raises:
        ValueError, ImportError: as :class:`SparseTable` and :class:`TieredTable`.
    """
    if table.memory_bytes is None:
        return SparseTable(table, rules, server, servers)
    return TieredTable(table, rules, server, servers, root)


class TieredTable(SparseTable):
    """See the module's docstring.  One caller at a time, lookups too; between the calls of a scan
    nothing is pushed.

    Args:
        table: with ``memory_bytes``, of rows in memory on all servers together; the others as of
            :class:`SparseTable`.
        root: below which this table's directory on disk is made; None: where temporary files go.

    Raises:
        ValueError: the table has no ``memory_bytes``.
        ImportError: rocksdict is not installed.
    """

    def __init__(
        self,
        table: Table,
        rules: Sequence[Rule],
        server: int = 0,
        servers: int = 1,
        root: Path | None = None,
    ) -> None:
        if table.memory_bytes is None:
            raise ValueError(f"table {table.name!r}: expected memory_bytes, got None")
        super().__init__(table, rules, server, servers)
        self._rules = tuple(rules)
        self._budget = table.memory_bytes / servers
        chunk, _ = super().scan(0, 1)
        columns = {
            name: (column.dtype, column.shape[1:])
            for name, column in chunk.items()
            if name != "ids"
        }
        waits = {name for name in columns if name.startswith("waiting.")}
        columns = {name: column for name, column in columns.items() if name not in waits} | {
            "step": (np.dtype(np.int64), ())
        }
        self._cold = ColdRows(columns, root)
        self._known_at = 0  # the step from which on records in memory say what they have seen
        self._moved = {"spilled": 0, "fetched": 0}

    @property
    def most_rows(self) -> int:
        """Rows that may stay in memory."""
        rows = self._updater.rows
        return max(
            int(self._budget // (rows.layout.columns * rows.records.itemsize + INDEX_BYTES)), 1
        )

    def __len__(self) -> int:
        return super().__len__() + len(self._cold)

    def counters(self) -> dict[str, int]:
        """As of any table; rows on disk, rows that went there, and rows that were read from
        there.
        """
        return {**super().counters(), "cold": len(self._cold), **self._moved}

    def close(self) -> None:
        """Removes what is on disk; the table is not used any more."""
        self._cold.close()

    # ---- between the tiers ----

    def _absent(self, ids: Array) -> Array:
        """Those of the ids that have no row in memory, each once."""
        slots, missing = self._updater.rows.index.locate(ids)
        return unique(ids[slots < 0])[0] if missing else ids[:0]

    def _enter(self, chunk: Chunk) -> Array:
        """Puts records into memory: their slots."""
        if self._updater.rows.has("step"):
            chunk = {**chunk, "step": np.maximum(chunk["step"], self._known_at)}
        else:
            chunk = {name: column for name, column in chunk.items() if name != "step"}
        self._chunks.load(chunk, self.server, self.servers)
        return self._updater.rows.index.locate(chunk["ids"])[0]

    def _leave(self, ids: Array) -> None:
        """Takes rows out of memory that are on disk."""
        self._updater.rows.index.remove(ids)

    def _warm(self, ids: Array) -> None:
        """Has the rows of these ids in memory, and room for those that have none yet."""
        if not len(self._cold) and super().__len__() + len(ids) <= self.most_rows:
            return
        self._make_room(len(self._absent(ids)))
        chunk = self._cold.get(self._absent(ids))
        if len(chunk["ids"]):
            self._enter(chunk)
            self._cold.remove(chunk["ids"])
            self._moved["fetched"] += len(chunk["ids"])

    def _make_room(self, count: int) -> None:
        """Rows leave memory until so many more fit into the budget."""
        rows = self._updater.rows
        excess = min(len(rows) + count - self.most_rows, len(rows))
        if excess <= 0:
            return
        gone = victims(
            rows, min(max(excess, self.most_rows // SHARE), len(rows)), self._moved["spilled"]
        )
        for begin in range(0, len(gone), BLOCK):
            slots = gone[begin : begin + BLOCK]
            ids = rows.index.ids.array[slots]
            chunk = self._chunks.rows(slots)
            chunk.setdefault("step", np.full(len(slots), self.step))
            self._cold.put(chunk, rows.index.changed_in(ids, rows.epoch))
            self._leave(ids)
            self._moved["spilled"] += len(slots)

    def _forget(self, ids: Array) -> None:
        """Drops what is on disk of these ids."""
        held = self._cold.get(np.unique(ids))["ids"]
        if len(held):
            self._cold.remove(held)

    # ---- as any table ----

    def lookup(self, ids: Array, out: Array, now: float = 0.0) -> None:
        """As of any table; rows on disk stay there."""
        guests = self._cold.get(self._absent(self._ids(ids))) if len(self._cold) else None
        if guests is None or not len(guests["ids"]):
            super().lookup(ids, out, now)
            return
        self._enter(guests)
        try:
            super().lookup(ids, out, now)
        finally:
            self._leave(guests["ids"])

    def update(
        self,
        ids: Array,
        gradients: Array,
        hparams: Sequence[Mapping[str, Hparam]],
        statistics: Array | None = None,
        now: float = 0.0,
    ) -> None:
        """As of any table.

        Raises:
            OSError: the disk is full, or refuses; nothing is changed.
        """
        self._warm(self._ids(ids))
        knew, step = self._updater.rows.has("step"), self.step
        super().update(ids, gradients, hparams, statistics, now)
        self._note_steps(knew, step)

    def _note_steps(self, knew: bool, step: int) -> None:
        if not knew and self._updater.rows.has("step"):
            self._known_at = step

    def add(
        self, ids: Array, deltas: Array, statistics: Array | None = None, now: float = 0.0
    ) -> None:
        """As of any table."""
        self._warm(self._ids(ids))
        super().add(ids, deltas, statistics, now)

    def assign(self, ids: Array, values: Array) -> None:
        """As of any table."""
        self._warm(self._ids(ids))
        super().assign(ids, values)

    def scan(
        self, cursor: int, most: int, changed: bool = False, materialized: bool = False
    ) -> tuple[Chunk, int]:
        """As of any table: first what is in memory, then what is on disk."""
        if cursor < COLD:
            chunk, after = super().scan(cursor, most, changed, materialized)
            return chunk, COLD if after < 0 and len(self._cold) else after
        guests, place = self._cold.scan(cursor - COLD, most, changed)
        slots = self._enter(guests)
        chunk = self._chunks.rows(slots, changed, materialized)
        self._leave(guests["ids"])
        return chunk, -1 if place < 0 else COLD + place

    def mark_saved(self) -> None:
        """As of any table."""
        super().mark_saved()
        self._cold.mark_saved()

    def load(self, chunk: Mapping[str, Array]) -> None:
        """As of any table."""
        knew, step = self._updater.rows.has("step"), self.step
        super().load(chunk)
        self._note_steps(knew, step)
        for name in ("ids", "waiting.ids", "removed"):
            ids = chunk.get(name, np.empty(0, np.int64))
            self._forget(ids[owners(ids, self.servers) == self.server])
        self._make_room(0)

    def restore(self, metadata: Mapping[str, Any]) -> None:
        """As of any table."""
        knew, step = self._updater.rows.has("step"), self.step
        super().restore(metadata)
        self._note_steps(knew, step)

    # ---- all rows ----

    def _blocks(self) -> Iterator[Chunk]:
        """All records on disk, some at a time; those that were given out may be replaced or removed
        meanwhile.
        """
        cursor = 0
        while cursor >= 0:
            chunk, cursor = self._cold.scan(cursor, BLOCK)
            if len(chunk["ids"]):
                yield chunk

    def shrink(self, now: float, days: float = 1.0, threshold: float | None = None) -> int:
        """As of any table."""
        removed = super().shrink(now, days, threshold)
        if self._lifecycle.entry is not None:
            removed += self._visit("shrunk", now, days, threshold)
        return removed

    def expire(self, now: float) -> int:
        """As of any table."""
        removed = super().expire(now)
        if self.table.ttl is not None:
            removed += self._visit("expired", now)
        return removed

    def _visit(
        self, what: str, now: float, days: float = 0.0, threshold: float | None = None
    ) -> int:
        """Has rows on disk shrunk or expired, a block at a time, in a table of their own; returns
        how many are gone.
        """
        other, total = SparseTable(self.table, self._rules, self.server, self.servers), 0
        other.restore(self.metadata())
        for block in self._blocks():
            other.load(block)
            removed = other.shrink(now, days, threshold) if what == "shrunk" else other.expire(now)
            stays = np.isin(block["ids"], other.scan(0, len(block["ids"]))[0]["ids"])
            changed = self._cold.changed(block["ids"])
            left = {name: column[stays] for name, column in block.items()}
            if what == "shrunk":
                changed[:] = True
                chunk, _ = other.scan(0, len(stays))
                left = {**left, **_ordered(chunk, left["ids"], ("show", "click", "unseen"))}
            self._cold.remove(block["ids"])
            self._cold.put(left, changed[stays])
            self._updater.rows.note_removed(block["ids"][~stays])
            other.clear()
            total += removed
        self._lifecycle.counts[what] += total
        return total

    def clear(self) -> None:
        """As of any table."""
        super().clear()
        if self._updater.rows.removed is not None:
            for block in self._blocks():
                self._updater.rows.note_removed(block["ids"])
        self._cold.clear()


def _ordered(chunk: Mapping[str, Array], ids: Array, names: Sequence[str]) -> Chunk:
    """Columns of a chunk in the order of these ids, all of which it has."""
    order = np.argsort(chunk["ids"])
    places = order[np.searchsorted(chunk["ids"][order], ids)]
    return {name: chunk[name][places] for name in names}
