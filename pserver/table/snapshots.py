"""A table as chunks of arrays: whole records out, and in again, on any number of servers.

A chunk has these arrays, as far as the table has them.  Every chunk of a table has the same arrays;
some may be empty.

====================================  ===========  ====================================
"ids"                                 int64[m]     of the chunk's rows
"values"                              [m, dim]     in the dtype that the table computes in
"state.NAME"                          [m, width]   likewise
"step"                                int64[m]     the last step that the row has taken
"order", "pushes"                     int64[m]     what the record knows of pushes: see
"pushed", "show", "click", "unseen"   float64[m]   ``Layout``
"waiting.ids"                         int64[w]     ids that wait for admission
"waiting.NAME"                        float64[w]   what is known of them: see ``AdmissionFilter``
"removed"                             int64[r]     ids that have no row and do not wait any more;
                                                   in a scan of changes only
====================================  ===========  ====================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pserver.table.ids import owners
from pserver.table.index import Index
from pserver.table.kernels import Array
from pserver.table.lifecycle import RowLifecycle
from pserver.table.rows import Rows
from pserver.table.updater import RowUpdater

# A scan goes through these in this order; a cursor is one of them times PLACE, and a slot.
ROWS, WAITING, REMOVED = 0, 1, 2
PLACE = 1 << 48
NONE = np.empty(0, np.int64)


class TableChunks:
    """Reads a table as chunks, and loads chunks into it.

    One caller at a time.

    Args:
        what: the table, for error messages.
        rows: the table's.
        updater: takes the steps that rows have missed.
        lifecycle: knows its ids that wait.
    """

    def __init__(self, what: str, rows: Rows, updater: RowUpdater, lifecycle: RowLifecycle) -> None:
        self._what, self._rows = what, rows
        self._updater, self._lifecycle = updater, lifecycle

    def scan(
        self, cursor: int, limit: int, changed_since_save: bool, materialized: bool
    ) -> tuple[dict[str, Array], int]:
        """A chunk of rows, waiting or removed ids; see ``SparseTable.scan``."""
        part, place = divmod(cursor, PLACE)
        epoch = self._rows.epoch if changed_since_save else -1
        found = {ROWS: NONE, WAITING: NONE, REMOVED: NONE}
        while not len(found[part]):
            index = self._index(part)
            if index is not None:
                found[part], place = index.listed(place, limit, -1 if part == REMOVED else epoch)
            if index is None or place < 0:
                part, place = part + 1, 0
            if part > REMOVED:
                break
        after = -1 if part > REMOVED else part * PLACE + place
        removed = self._rows.removed
        ids = NONE if removed is None else removed.ids.array[found[REMOVED]]
        chunk = self.arrays(found[ROWS], found[WAITING], changed_since_save, ids, materialized)
        return _contiguous(chunk), after

    def rows(
        self, slots: Array, changed_since_save: bool = False, materialized: bool = False
    ) -> dict[str, Array]:
        """The chunk of the rows in these slots."""
        return _contiguous(self.arrays(slots, NONE, changed_since_save, NONE, materialized))

    def arrays(
        self,
        rows: Array = NONE,
        waiting: Array = NONE,
        changed_since_save: bool = False,
        removed: Array = NONE,
        materialized: bool = False,
    ) -> dict[str, Array]:
        """A chunk; values and states may be parts of one array.

        Args:
            rows: the slots of its rows.
            waiting: the slots of its ids that wait.
            changed_since_save: whether it is one of changes only.
            removed: the removed ids of such a chunk.
            materialized: see ``SparseTable.scan``.
        """
        chunk = self._row_arrays(rows, materialized)
        if self._lifecycle.admission.delays:
            chunk.update(self._waiting_arrays(waiting))
        return chunk | {"removed": removed} if changed_since_save else chunk

    @property
    def indexes(self) -> tuple[Index, Index]:
        """Of the rows, and of the ids that wait."""
        return self._rows.index, self._lifecycle.admission.index

    @property
    def epoch(self) -> int:
        """How many saves there were."""
        return self._rows.epoch

    def _index(self, part: int) -> Index | None:
        rows, waiting = self._rows, self._lifecycle.admission
        return {ROWS: rows.index, WAITING: waiting.index, REMOVED: rows.removed}[part]

    def _row_arrays(self, slots: Array, materialized: bool) -> dict[str, Array]:
        rows = self._rows
        ids = rows.index.ids.array[slots]
        records = np.empty((len(slots), rows.layout.columns), rows.dtype)
        if materialized:
            self._updater.read(slots, ids, records)
        else:
            rows.gather(slots, ids, records)
        chunk = {"ids": ids, "values": records[:, : rows.layout.dim]}
        for name, (begin, width) in rows.layout.states.items():
            chunk[f"state.{name}"] = records[:, begin : begin + width]
        for name, at in rows.layout.words.items():
            if at >= 0:
                chunk[name] = rows.word(name)[slots]
        if materialized and "step" in chunk:
            chunk["step"] = np.full(len(slots), self._updater.step)
        return chunk

    def _waiting_arrays(self, slots: Array) -> dict[str, Array]:
        waiting = self._lifecycle.admission
        columns = {
            f"waiting.{name}": waiting.records[slots, at] for at, name in enumerate(waiting.names)
        }
        return {"waiting.ids": waiting.index.ids.array[slots], **columns}

    # ---- load ----

    def load(self, chunk: Mapping[str, Array], server: int, servers: int) -> None:
        """Loads the rows and ids of a chunk that belong to this server, in place of what it has of
        them.

        Args:
            chunk: one that :meth:`check` took.
            server: this server's index.
            servers: how many servers share the table.
        """
        rows, waiting = self._rows, self._lifecycle.admission
        if "removed" in chunk:
            ids = self._own(chunk["removed"], server, servers)[0]
            rows.remove(ids)
            waiting.index.remove(ids)
        if "waiting.ids" in chunk and waiting.delays:
            ids, own = self._own(chunk["waiting.ids"], server, servers)
            rows.index.remove(ids)
            rows.note_known(ids)
            waiting.index.remove(ids)
            slots = waiting.add(ids, rows.epoch)
            for at, name in enumerate(waiting.names):
                waiting.records[slots, at] = chunk.get(f"waiting.{name}", np.zeros(len(own)))[own]
        ids, own = self._own(chunk["ids"], server, servers)
        waiting.index.remove(ids)
        if "step" in chunk:
            self._updater.track_steps()
        slots, _, _ = rows.mark(ids)
        slots[slots < 0] = self._updater.make(ids[slots < 0], current=True)
        rows.set_values(slots, chunk["values"][own])
        for name in rows.layout.states:
            rows.state(name)[slots] = chunk[f"state.{name}"][own]
        self._load_words(chunk, slots, own)

    def _own(self, ids: Array, server: int, servers: int) -> tuple[Array, Array]:
        """Those of the ids that belong to this server, and their places."""
        own = np.flatnonzero(owners(ids, servers) == server)
        return np.ascontiguousarray(ids[own]), own

    def _load_words(self, chunk: Mapping[str, Array], slots: Array, own: Array) -> None:
        rows, lifecycle = self._rows, self._lifecycle
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

        Args:
            chunk: from anywhere.

        Raises:
            ValueError: an array is missing, of another shape or dtype, or of a state that rows do
                not have here.
        """
        rows = self._rows
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


def _contiguous(chunk: Mapping[str, Array]) -> dict[str, Array]:
    return {name: np.ascontiguousarray(column) for name, column in chunk.items()}
