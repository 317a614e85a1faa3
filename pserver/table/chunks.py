"""A table as chunks of arrays: whole records out, and in again, on any number of servers.

A chunk has, for each of m rows, "ids" int64[m], "values" [m, dim], "state.NAME" [m, width], and
what records know of pushes: "step", "pushed", "order", "pushes", "show", "click", "unseen" [m], as
far as the table has them.  Where ids may have to wait for their row it has "waiting.ids" int64[w]
and "waiting.NAME" float64[w]; and where only changes are asked for, "removed": ids that have
neither any more.  Every chunk of a table has the same arrays; some may be empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pserver.table.ids import owners
from pserver.table.index import Index
from pserver.table.kernels import Array
from pserver.table.lifecycle import RowLifecycle
from pserver.table.updater import RowUpdater

ROWS, WAITING, REMOVED = 0, 1, 2  # in this order; a cursor is one of them and a slot
PLACE = 1 << 48


class TableChunks:
    """Takes a table apart and puts it together.

    Args:
        what: the table's name, for messages.
        updater, lifecycle: the table.
    """

    def __init__(self, what: str, updater: RowUpdater, lifecycle: RowLifecycle) -> None:
        self._what, self._updater, self._lifecycle = what, updater, lifecycle

    def scan(
        self, cursor: int, most: int, changed: bool, materialized: bool
    ) -> tuple[dict[str, Array], int]:
        """Some rows, waiting or removed ids; see ``SparseTable.scan``."""
        part, place = divmod(cursor, PLACE)
        epoch = self._updater.rows.epoch if changed else -1
        empty = np.empty(0, np.int64)
        found = {ROWS: empty, WAITING: empty, REMOVED: empty}
        while not len(found[part]):
            index = self._index(part)
            if index is not None:
                found[part], place = index.listed(place, most, -1 if part == REMOVED else epoch)
            if index is None or place < 0:
                part, place = part + 1, 0
            if part > REMOVED:
                break
        return self._arrays(
            found, changed, materialized
        ), -1 if part > REMOVED else part * PLACE + place

    def rows(
        self, slots: Array, changed: bool = False, materialized: bool = False
    ) -> dict[str, Array]:
        """The chunk that has the rows in these slots."""
        empty = np.empty(0, np.int64)
        return self._arrays({ROWS: slots, WAITING: empty, REMOVED: empty}, changed, materialized)

    def _arrays(
        self, found: Mapping[int, Array], changed: bool, materialized: bool
    ) -> dict[str, Array]:
        chunk = self._row_arrays(found[ROWS], materialized)
        if self._lifecycle.admission.waits:
            chunk.update(self._waiting_arrays(found[WAITING]))
        if changed:
            removed = self._updater.rows.removed
            chunk["removed"] = (
                np.empty(0, np.int64) if removed is None else removed.ids.array[found[REMOVED]]
            )
        return chunk

    def _index(self, part: int) -> Index | None:
        rows = self._updater.rows
        return {ROWS: rows.index, WAITING: self._lifecycle.admission.index, REMOVED: rows.removed}[
            part
        ]

    def _row_arrays(self, slots: Array, materialized: bool) -> dict[str, Array]:
        rows = self._updater.rows
        ids = rows.index.ids.array[slots]
        records = np.empty((len(slots), rows.layout.columns), rows.dtype)
        if materialized:
            self._updater.read(slots, ids, records)
        else:
            rows.gather(slots, ids, records)
        chunk = {"ids": ids, "values": np.ascontiguousarray(records[:, : rows.layout.dim])}
        for name, (begin, width) in rows.layout.states.items():
            chunk[f"state.{name}"] = np.ascontiguousarray(records[:, begin : begin + width])
        for name, at in rows.layout.words.items():
            if at >= 0:
                chunk[name] = rows.word(name)[slots]
        if materialized and "step" in chunk:
            chunk["step"] = np.full(len(slots), self._updater.step)
        return chunk

    def _waiting_arrays(self, slots: Array) -> dict[str, Array]:
        waiting = self._lifecycle.admission
        facts = {
            f"waiting.{name}": waiting.facts[slots, at] for at, name in enumerate(waiting.names)
        }
        return {"waiting.ids": waiting.index.ids.array[slots], **facts}

    # ---- in again ----

    def load(self, chunk: Mapping[str, Array], server: int, servers: int) -> None:
        """Takes over what of a chunk belongs to this server; what it had of those ids goes.

        The chunk was checked.
        """
        rows, waiting = self._updater.rows, self._lifecycle.admission
        if "removed" in chunk:
            ids = self._own(chunk["removed"], server, servers)[0]
            rows.remove(ids)
            waiting.index.remove(ids)
        if "waiting.ids" in chunk and waiting.waits:
            ids, own = self._own(chunk["waiting.ids"], server, servers)
            rows.index.remove(ids)
            rows.note_known(ids)
            waiting.index.remove(ids)
            slots = waiting.add(ids, rows.epoch)
            for at, name in enumerate(waiting.names):
                waiting.facts[slots, at] = chunk.get(f"waiting.{name}", np.zeros(len(own)))[own]
        ids, own = self._own(chunk["ids"], server, servers)
        waiting.index.remove(ids)
        if "step" in chunk:
            self._updater.track_steps()
        slots, _, _ = rows.mark(ids)
        slots[slots < 0] = self._updater.make(ids[slots < 0], current=True)
        rows.records[slots, : rows.layout.dim] = chunk["values"][own]
        for name, (begin, width) in rows.layout.states.items():
            rows.records[slots, begin : begin + width] = chunk[f"state.{name}"][own]
        self._load_words(chunk, slots, own)

    def _own(self, ids: Array, server: int, servers: int) -> tuple[Array, Array]:
        """Those of the ids that belong to this server, and which they are."""
        own = np.flatnonzero(owners(ids, servers) == server)
        return np.ascontiguousarray(ids[own]), own

    def _load_words(self, chunk: Mapping[str, Array], slots: Array, own: Array) -> None:
        rows, lifecycle = self._updater.rows, self._lifecycle
        missing = {
            "step": self._updater.step,
            "pushed": lifecycle.now,
            "order": lifecycle.order + np.arange(len(slots)),
        }
        for name, at in rows.layout.words.items():
            if at >= 0:
                rows.word(name)[slots] = chunk[name][own] if name in chunk else missing.get(name, 0)
        if rows.has("order") and len(slots):
            lifecycle.order = max(lifecycle.order, int(rows.word("order")[slots].max()) + 1)

    def check(self, chunk: Mapping[str, Array]) -> None:
        """Returns if a chunk is one of a table like this.

        Raises:
            ValueError: an array is missing, of another shape or dtype, or of a state that rows do
                not have here.
        """
        rows = self._updater.rows
        count = len(chunk["ids"])
        expected: dict[str, tuple[tuple[int, ...], Any]] = {
            "values": ((count, rows.layout.dim), rows.dtype)
        }
        for name, (_, width) in rows.layout.states.items():
            expected[f"state.{name}"] = ((count, width), rows.dtype)
        expected.update(
            {name: ((count,), rows.word_type(name)) for name in rows.layout.words if name in chunk}
        )
        states = {name for name in chunk if name.startswith("state.")}
        if not states <= expected.keys():
            raise ValueError(
                f"{self._what}: chunk: expected {', '.join(expected)}, got "
                f"{', '.join(sorted(states))}"
            )
        for name, (shape, dtype) in expected.items():
            if name not in chunk:
                raise ValueError(
                    f"{self._what}: chunk: expected {', '.join(expected)}, got no {name}"
                )
            if chunk[name].shape != shape or chunk[name].dtype != dtype:
                got = f"{chunk[name].dtype}{list(chunk[name].shape)}"
                raise ValueError(
                    f"{self._what}: chunk: {name}: expected {np.dtype(dtype)}{list(shape)}, got "
                    f"{got}"
                )
