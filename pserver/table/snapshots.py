"""A table as arrays: whole, in chunks, or as it was at one moment while steps change it.

[Note: copy before change]  A cut costs nothing when it begins.  The index notifies it of slots
whose records are about to change or to go, and of slots that get another id: the cut copies the
records that it still needs, and passes over the slots that came later.  What was copied is read
first, so that copies do not pile up while the reader is faster than the changes.

[Note: slots that are read in a row]  Looking up each id, to see whether its slot holds a row, costs
more than to copy the row.  So a cut of all rows notes the free slots when it begins; the index
notifies it of every other slot.  Where more than ``FREE_SLOTS`` are free, that would keep the steps
waiting, and ids are looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from pserver.table.ids import owners
from pserver.table.index import EPOCHS, Index, claim
from pserver.table.kernels import Array
from pserver.table.lifecycle import RowLifecycle
from pserver.table.rows import Rows
from pserver.table.updater import RowUpdater
from pserver.undone import or_undone

# ---- chunks ----
#
# A table as chunks of arrays: whole records out, and in again, on any number of servers.
#
# A chunk has these arrays, as far as the table has them.  Every chunk of a table has the same
# arrays; some may be empty.
#
# ====================================  ===========  ====================================
# "ids"                                 int64[m]     of the chunk's rows
# "values"                              [m, dim]     in the dtype that the table computes in
# "state.NAME"                          [m, width]   likewise
# "step"                                int64[m]     the last step that the row has taken
# "order", "pushes"                     int64[m]     what the record knows of pushes: see
# "pushed", "show", "click", "unseen"   float64[m]   ``Layout``
# "waiting.ids"                         int64[w]     ids that wait for admission
# "waiting.NAME"                        float64[w]   what is known of them: see ``AdmissionFilter``
# "removed"                             int64[r]     ids that have no row and do not wait any more;
#                                                    in a scan of changes only
# ====================================  ===========  ====================================


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
        lifecycle: has the waiting ids.
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
        """The indexes of the rows, and of the waiting ids."""
        return self._rows.index, self._lifecycle.admission.index

    @property
    def epoch(self) -> int:
        """The number of saves."""
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
        """The ids that belong to this server, and their places."""
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


# ---- slot cut ----
#
# The slots of one index as they were at one moment, read in pieces while the index changes.


FREE_SLOTS = 2**16

Chunk = dict[str, Array]


class SlotCut:
    """The contents of an index and its records at the moment of the call.

    One caller at a time, who is also the only one to change the index.

    Args:
        index: which notifies of changes from now on, until :meth:`close`.
        epoch: only rows that were last changed in it; -1: all.
        after: the epoch of all later changes, which no row has before; -1: there is none.
        copied: gives the chunk of the rows in some slots.

    Attributes:
        bytes_kept: of the copies that were not read yet.
    """

    def __init__(
        self, index: Index, epoch: int, after: int, copied: Callable[[Array], Chunk]
    ) -> None:
        assert index.watcher is None, "one cut of a table at a time"
        self._index, self._epoch, self._copied = index, epoch, copied
        # once epochs begin anew, rows may have any of them
        self._after = after if after < EPOCHS else -1
        self._place = 0  # the reader has passed the slots before this
        self._done = np.zeros(index.used, np.bool_)  # what was copied, or was not there
        # whether each slot that is not done holds a row of the cut
        self._known = epoch < 0 and index.note_free(self._done, FREE_SLOTS)
        self._kept: list[Chunk] = []
        self.bytes_kept = 0
        index.watcher = self

    def changing(self, slots: Array, words: Array) -> None:
        """See :class:`pserver.table.index.Watcher`."""
        claimed = np.empty(len(slots), np.int64)
        epochs = self._epoch % EPOCHS if self._epoch >= 0 else -1, self._after
        claimed = claimed[: claim(slots, words, epochs, self._place, self._done, claimed)]
        if len(claimed):
            self._kept.append(self._copied(claimed))
            self.bytes_kept += sum(column.nbytes for column in self._kept[-1].values())

    def coming(self, slots: Array) -> None:
        """Notes free slots, int64[n], that get an id."""
        self._done[slots[slots < len(self._done)]] = True

    def read(self, limit: int) -> Chunk | None:
        """Some of the rows that were not read yet, or none; None: there are no more.

        Args:
            limit: slots of the index that are looked at, at most; copies come as they are.
        """
        if self._kept:
            chunk = self._kept.pop()
            self.bytes_kept -= sum(column.nbytes for column in chunk.values())
            return chunk
        begin, end = self._place, min(self._place + limit, len(self._done))
        if begin == end:
            return None
        self._place = end
        if self._known:
            return self._copied(begin + np.flatnonzero(~self._done[begin:end]))
        here, _ = self._index.listed(begin, limit, self._epoch, end)
        return self._copied(here[~self._done[here]])

    def close(self) -> None:
        """Ends the notifications of the index, and drops the copies."""
        if self._index.watcher is self:
            self._index.watcher = None
        self._kept, self.bytes_kept = [], 0
        self._place, self._done = 0, self._done[:0].copy()


# ---- table cut ----
#
# A table as it was at one moment, read in pieces while the table is used.
#
# See [Note: copy before change] in snapshots.py.


BLOCK = 65536  # removed ids of a chunk


class TableCut:
    """The contents of a table at the moment of the call, as chunks: see snapshots.py.

    One caller at a time, who is also the only one to change the table.  Memory holds copies of the
    rows that have changed since and were not read yet.

    Args:
        chunks: reads the table.
        metadata: the table's, at that moment.
        changed_since_save: only what changed since the last save.
        marks: the table's next epoch begins with it.
        removed: the ids that were removed since; it does not change any more.
        cold: the rows that are not in memory, a chunk at a time, as at that moment.

    Attributes:
        metadata: as given.
    """

    def __init__(
        self,
        chunks: TableChunks,
        metadata: Mapping[str, Any],
        changed_since_save: bool = False,
        marks: bool = False,
        removed: Index | None = None,
        cold: Iterable[Chunk] = (),
    ) -> None:
        self.metadata = metadata
        self._chunks, self._changed = chunks, changed_since_save
        self._empty = chunks.arrays(changed_since_save=changed_since_save)
        epoch = chunks.epoch if changed_since_save else -1
        after = chunks.epoch + 1 if marks else -1
        rows, waiting = chunks.indexes
        self._rows = SlotCut(rows, epoch, after, self._row_chunk)
        with or_undone(self._rows.close):
            self._waiting = SlotCut(waiting, epoch, after, self._waiting_chunk)
        self._others = self._other_chunks(cold, removed)

    def _row_chunk(self, slots: Array) -> Chunk:
        return self._known(self._chunks.arrays(slots, changed_since_save=self._changed))

    def _waiting_chunk(self, slots: Array) -> Chunk:
        return self._known(self._chunks.arrays(NONE, slots, self._changed))

    def _known(self, chunk: Chunk) -> Chunk:
        """The arrays that the table had at the cut's moment; those that it has got since are left
        out.
        """
        return {name: chunk.get(name, column) for name, column in self._empty.items()}

    def _other_chunks(self, cold: Iterable[Chunk], removed: Index | None) -> Iterator[Chunk]:
        for chunk in cold:
            yield self._known(chunk)
        place = -1 if removed is None else 0
        while removed is not None and place >= 0:
            slots, place = removed.listed(place, BLOCK)
            if len(slots):
                yield {**self._empty, "removed": removed.ids.array[slots]}

    @property
    def bytes_kept(self) -> int:
        """Memory of the copies that were not read yet, in bytes."""
        return self._rows.bytes_kept + self._waiting.bytes_kept

    def read(self, limit: int) -> Chunk | None:
        """A chunk of what was not read yet, in any order, which may be empty; None: that was all.

        Args:
            limit: slots of the table that are looked at, at most; a copy that an update has made
                comes as it is.
        """
        first, second = self._rows, self._waiting
        if second.bytes_kept > first.bytes_kept:
            first, second = second, first
        chunk = first.read(limit)
        if chunk is None:
            chunk = second.read(limit)
        return next(self._others, None) if chunk is None else chunk

    def close(self) -> None:
        """Ends the cut; the table forgets it."""
        self._rows.close()
        self._waiting.close()
        self._others = iter(())
