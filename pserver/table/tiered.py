"""A sparse table in two tiers: memory holds the rows that were pushed to last, the disk the others.

[Note: two tiers]  A row is in memory or on disk, never in both.  A push brings its rows into
memory.  Where memory would then exceed the budget, rows move to disk first, in blocks: those that
had no push for the longest time.  A lookup or a scan puts rows of the disk into memory, reads them
by the code that reads all rows, and takes them out again.  So the arithmetic knows of one tier
only, and every value is that of a table without a budget.

Rows that a schedule has catch up in turn, [Note: a history that ends] in updater.py, do so on disk
as in memory, and with the same step: what a row holds depends, in its last bits, on where its
missed steps were parted.  A step reads its rows of the disk in one run, since they lie there by the
hashes that say whose turn it is, and writes them back: one row in ``PERIOD``, and no more than
``BLOCK`` in memory at once.  To leave rows on disk alone until they are needed would take the
hparams of all steps for ever, in memory and in every checkpoint, and a row that comes back would
have all these steps to take at once.

Records on disk say which steps they have taken; those in memory do so only where steps move rows
that they do not touch.  A schedule may begin to move such rows at step T: what went to disk before
has then missed nothing up to T.

Ids that wait for admission stay in memory.  The rows of one call are in memory at once, even beyond
the budget.
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
from pserver.table.table_cut import TableCut
from transpiler.ir.rules import Hparam, Rule
from transpiler.ir.tables import Table

COLD = 1 << 62  # where cursors of rows on disk begin
SHARE = 16  # this part of the budget moves to disk at once

Chunk = dict[str, Array]


def open_table(
    table: Table, rules: Sequence[Rule], server: int = 0, servers: int = 1, root: Path | None = None
) -> SparseTable:
    """Makes a table: in memory, or in two tiers where it has ``memory_bytes``.

    Args:
        table: the table's description in the plan.
        rules: one for each of its segments.
        server: which of the servers this is.
        servers: how many servers share the table.
        root: the directory below which rows go to disk; None: that of temporary files.

    Returns:
        The table, empty.

    Raises:
        ValueError, ImportError: as :class:`SparseTable` and :class:`TieredTable`.
    """
    if table.memory_bytes is None:
        return SparseTable(table, rules, server, servers)
    return TieredTable(table, rules, server, servers, root)


class TieredTable(SparseTable):
    """One server's part of a table that keeps some rows in memory and the others on disk.

    One caller at a time, lookups too.  Between the calls of a scan nothing is pushed.  See
    [Note: two tiers].

    Args:
        table: with ``memory_bytes``, the budget of all servers for rows in memory.
        rules: as of :class:`SparseTable`; likewise ``server`` and ``servers``.
        root: the directory below which this table's own is made; None: that of temporary files.

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
        self._tracked_from = 0  # the step from which on records in memory say what they have taken
        self._moved = {"spilled": 0, "fetched": 0, "lookups_disk": 0}

    @property
    def max_rows(self) -> int:
        """Rows that may stay in memory."""
        return max(int(self._budget // self.row_bytes), 1)

    def growth(self, count: int) -> int:
        """As of :class:`SparseTable`: what does not fit into the budget goes to disk."""
        return min(count, max(self.max_rows - super().__len__(), 0)) * self.row_bytes

    def __len__(self) -> int:
        return super().__len__() + len(self._cold)

    def counters(self) -> dict[str, int]:
        """As of :class:`SparseTable`; and "cold": rows on disk, "spilled": rows moved there,
        "fetched": rows moved back, "lookups_disk": ids looked up whose row was there.
        """
        return {**super().counters(), "cold": len(self._cold), **self._moved}

    def close(self) -> None:
        """Removes the table's directory; the table is not used any more."""
        self._cold.close()

    # ---- between the tiers ----

    def _absent(self, ids: Array) -> Array:
        """Those of the ids that have no row in memory, each once."""
        slots, missing = self._rows.index.locate(ids)
        return unique(ids[slots < 0])[0] if missing else ids[:0]

    def _put_in_memory(self, chunk: Chunk) -> Array:
        """Puts records into memory: their slots."""
        if self._rows.has("step"):
            chunk = {**chunk, "step": np.maximum(chunk["step"], self._tracked_from)}
        else:
            chunk = {name: column for name, column in chunk.items() if name != "step"}
        self._chunks.load(chunk, self.server, self.servers)
        return self._rows.index.locate(chunk["ids"])[0]

    def _take_out(self, ids: Array) -> None:
        """Takes rows out of memory whose records are on disk."""
        self._rows.index.remove(ids)

    def _fetch(self, ids: Array) -> None:
        """Moves the rows of these ids into memory, and makes room for those that have none yet."""
        if not len(self._cold) and super().__len__() + len(ids) <= self.max_rows:
            return
        self._make_room(len(self._absent(ids)))
        chunk = self._cold.get(self._absent(ids))
        if len(chunk["ids"]):
            self._put_in_memory(chunk)
            self._cold.remove(chunk["ids"])
            self._moved["fetched"] += len(chunk["ids"])

    def _make_room(self, count: int) -> None:
        """Moves rows to disk until ``count`` more fit into the budget."""
        rows = self._rows
        excess = min(len(rows) + count - self.max_rows, len(rows))
        if excess <= 0:
            return
        gone = victims(
            rows, min(max(excess, self.max_rows // SHARE), len(rows)), self._moved["spilled"]
        )
        for begin in range(0, len(gone), BLOCK):
            slots = gone[begin : begin + BLOCK]
            ids = rows.index.ids.array[slots]
            chunk = self._chunks.rows(slots)
            chunk.setdefault("step", np.full(len(slots), self.step))
            self._cold.put(chunk, rows.index.changed_in(ids, rows.epoch))
            self._take_out(ids)
            self._moved["spilled"] += len(slots)

    def _catch_up_in_turn(self) -> None:
        """Has the rows on disk catch up whose turn comes with the next step.

        Before that step: if the disk refuses, nothing was counted yet, and to catch up twice
        between two steps is to do so once.
        """
        begin, end = self._updater.turn
        if begin == end or not len(self._cold):
            return
        for guests in self._cold.within(begin, end, BLOCK):
            slots = self._put_in_memory(guests)
            self._updater.catch_up(slots)
            chunk = self._chunks.rows(slots)
            self._take_out(guests["ids"])
            self._cold.replace(chunk)

    def _forget(self, ids: Array) -> None:
        """Drops the records on disk of these ids."""
        held = self._cold.get(np.unique(ids))["ids"]
        if len(held):
            self._cold.remove(held)

    # ---- calls of a SparseTable ----

    def lookup(self, ids: Array, out: Array, now: float = 0.0, counts: bool = True) -> None:
        """As of :class:`SparseTable`; rows on disk stay there."""
        guests = self._cold.get(self._absent(self._ids(ids))) if len(self._cold) else None
        if guests is None or not len(guests["ids"]):
            super().lookup(ids, out, now, counts)
            return
        self._moved["lookups_disk"] += len(guests["ids"]) if counts else 0
        self._put_in_memory(guests)
        try:
            super().lookup(ids, out, now, counts)
        finally:
            self._take_out(guests["ids"])

    def update(
        self,
        ids: Array,
        gradients: Array,
        hparams: Sequence[Mapping[str, Hparam]],
        statistics: Array | None = None,
        now: float = 0.0,
    ) -> None:
        """As of :class:`SparseTable`.

        Raises:
            OSError: the disk is full, or refuses; nothing is changed.
        """
        self._fetch(self._ids(ids))
        self._catch_up_in_turn()
        tracked, step = self._rows.has("step"), self.step
        super().update(ids, gradients, hparams, statistics, now)
        self._note_tracking(tracked, step)

    def _note_tracking(self, tracked: bool, step: int) -> None:
        """Notes the step from which on records say what they have taken, where that is new."""
        if not tracked and self._rows.has("step"):
            self._tracked_from = step
            self._cold.mark_all()

    def add(
        self, ids: Array, deltas: Array, statistics: Array | None = None, now: float = 0.0
    ) -> None:
        """As of :class:`SparseTable`."""
        self._fetch(self._ids(ids))
        super().add(ids, deltas, statistics, now)

    def assign(self, ids: Array, values: Array, current: bool = True) -> None:
        """As of :class:`SparseTable`."""
        self._fetch(self._ids(ids))
        super().assign(ids, values, current)

    def scan(
        self,
        cursor: int,
        limit: int,
        changed_since_save: bool = False,
        materialized: bool = False,
    ) -> tuple[Chunk, int]:
        """As of :class:`SparseTable`: first the rows in memory, then those on disk."""
        if cursor < COLD:
            chunk, after = super().scan(cursor, limit, changed_since_save, materialized)
            return chunk, COLD if after < 0 and len(self._cold) else after
        guests, place = self._cold.scan(cursor - COLD, limit, changed_since_save)
        slots = self._put_in_memory(guests)
        chunk = self._chunks.rows(slots, changed_since_save, materialized)
        self._take_out(guests["ids"])
        return chunk, -1 if place < 0 else COLD + place

    def mark_saved(self) -> None:
        """As of :class:`SparseTable`."""
        super().mark_saved()
        self._cold.mark_saved()

    def cut(self, changed_since_save: bool = False, marks: bool = True) -> TableCut:
        """As of :class:`SparseTable`; of the rows on disk RocksDB keeps what they were."""
        cold = self._cold.cut(BLOCK, changed_since_save) if len(self._cold) else iter(())
        tracked_from = self._tracked_from  # as of this moment

        def chunks() -> Iterator[Chunk]:
            for chunk in cold:
                chunk["step"] = np.maximum(chunk["step"], tracked_from)
                yield chunk

        return self._cut(changed_since_save, marks, chunks())

    def load(self, chunk: Mapping[str, Array]) -> None:
        """As of :class:`SparseTable`."""
        tracked, step = self._rows.has("step"), self.step
        super().load(chunk)
        self._note_tracking(tracked, step)
        for name in ("ids", "waiting.ids", "removed"):
            ids = chunk.get(name, np.empty(0, np.int64))
            self._forget(ids[owners(ids, self.servers) == self.server])
        self._make_room(0)

    def restore(self, metadata: Mapping[str, Any]) -> None:
        """As of :class:`SparseTable`."""
        tracked, step = self._rows.has("step"), self.step
        super().restore(metadata)
        self._note_tracking(tracked, step)

    # ---- calls over all rows ----

    def _blocks(self) -> Iterator[Chunk]:
        """All records on disk, a block at a time; those of earlier blocks may be replaced or
        removed meanwhile.
        """
        cursor = 0
        while cursor >= 0:
            chunk, cursor = self._cold.scan(cursor, BLOCK)
            if len(chunk["ids"]):
                yield chunk

    def shrink(self, now: float, days: float = 1.0, threshold: float | None = None) -> int:
        """As of :class:`SparseTable`."""
        removed = super().shrink(now, days, threshold)
        if self._lifecycle.entry is not None:
            removed += self._visit("shrunk", now, days, threshold)
        return removed

    def expire(self, now: float) -> int:
        """As of :class:`SparseTable`."""
        removed = super().expire(now)
        if self.table.ttl is not None:
            removed += self._visit("expired", now)
        return removed

    def _visit(
        self, what: str, now: float, days: float = 0.0, threshold: float | None = None
    ) -> int:
        """Shrinks or expires the rows on disk, a block at a time, in a table of their own; returns
        how many were removed.
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
            self._rows.note_removed(block["ids"][~stays])
            other.clear()
            total += removed
        self._lifecycle.counts[what] += total
        return total

    def clear(self) -> None:
        """As of :class:`SparseTable`."""
        super().clear()
        if self._rows.removed is not None:
            for block in self._blocks():
                self._rows.note_removed(block["ids"])
        self._cold.clear()


def _ordered(chunk: Mapping[str, Array], ids: Array, names: Sequence[str]) -> Chunk:
    """Columns of a chunk in the order of these ids, all of which it has."""
    order = np.argsort(chunk["ids"])
    places = order[np.searchsorted(chunk["ids"][order], ids)]
    return {name: chunk[name][places] for name in names}
