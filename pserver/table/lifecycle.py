"""The life of rows: ids are admitted, rows expire, score too low, or are evicted for others.

::

    no row --push--> waits --admitted--> row --expire, shrink or evict--> no row
      |                                   ^
      +------admitted at once, assign-----+

Every such event is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from pserver.table.admission import AdmissionFilter, score
from pserver.table.eviction import victims
from pserver.table.kernels import Array
from pserver.table.rows import BLOCK, Rows
from pserver.table.updater import RowUpdater
from transpiler.ir.tables import ShowClickEntry, Table

COUNTED = ("pushes", "admitted", "refused", "evicted", "expired", "shrunk")


def words_of(table: Table) -> list[str]:
    """The words that records need for a table's lifecycle; see ``Layout``."""
    wanted = {
        "pushed": table.ttl is not None,
        "order": table.capacity is not None or table.memory_bytes is not None,
        "pushes": table.capacity is not None and table.eviction == "lfu",
        **dict.fromkeys(("show", "click", "unseen"), isinstance(table.entry, ShowClickEntry)),
    }
    return [name for name, needed in wanted.items() if needed]


class RowLifecycle:
    """Makes and removes the rows of one table.

    One caller at a time.

    Args:
        table: the table's description in the plan.
        rows: the table's.
        updater: by whose rules new rows begin.
        share: how many rows may be here; None: any number.

    Attributes:
        admission: decides which ids get a row.
        entry: the table's ShowClickEntry; None: it has another entry or none.
        counts: event -> how often it happened, by the names of ``COUNTED``.
        order: pushes to single ids so far.
        now: seconds, the latest time of a push.
    """

    def __init__(self, table: Table, rows: Rows, updater: RowUpdater, share: int | None) -> None:
        self.table, self._rows, self._updater, self._share = table, rows, updater, share
        self.admission = AdmissionFilter(table)
        self.entry = table.entry if isinstance(table.entry, ShowClickEntry) else None
        self.counts = dict.fromkeys(COUNTED, 0)
        self.order, self.now = 0, 0.0
        self._notes = bool(words_of(table))

    def outlived(self, slots: Array, now: float) -> Array:
        """bool[n]: which of these rows (-1: none) were last pushed to longer ago than their time to
        live.
        """
        if self.table.ttl is None:
            return np.zeros(len(slots), np.bool_)
        return (slots >= 0) & (now - self._rows.word("pushed")[slots] > self.table.ttl)

    def push(self, ids: Array, slots: Array, statistics: Array | None, now: float) -> None:
        """Counts a push to each of these ids, and makes the rows that are due.

        Args:
            ids: int64[u], each once.
            slots: of their rows, -1 for those that have none; written where rows come or go.
            statistics: float32[u, 2], where the table has statistics.
            now: seconds.
        """
        rows, self.now = self._rows, max(self.now, now)
        outlived = self.outlived(slots, now)
        if outlived.any():
            rows.remove(ids[outlived])
            self.counts["expired"] += int(outlived.sum())
            slots[outlived] = -1
        before = np.flatnonzero(slots < 0)
        if self._notes:
            self._note(slots, np.flatnonzero(slots >= 0), statistics, now)
        if len(before):
            shown = None if statistics is None else statistics[before]
            admitted, earlier = self.admission.admit(ids[before], shown, now, rows.epoch)
            due = before[admitted]
            rows.note_known(ids[before[~admitted]])
            self.counts["admitted"] += len(due)
            self.counts["refused"] += len(before) - len(due)
            due = self._room_for(due, slots)
            slots[due] = self._updater.make(ids[due])
            if self._notes:
                total = (
                    None if statistics is None else statistics + _spread(earlier, before, len(ids))
                )
                self._note(slots, due, total, now)
        self.order += len(ids)
        self.counts["pushes"] += len(ids)

    def ensure_rows(self, ids: Array, slots: Array, current: bool = True) -> None:
        """Makes a row for each of these ids that has none, without asking the admission rule; the
        other rows catch up.

        Args:
            current: as of :meth:`RowUpdater.make`.
        """
        missing = slots < 0
        self._updater.catch_up(slots)
        if missing.any():
            fresh = np.ascontiguousarray(ids[missing])
            self.admission.index.remove(fresh)
            slots[missing] = self._updater.make(fresh, current)
            self._note(slots, np.flatnonzero(missing), None, self.now)
            self.order += len(ids)

    def _note(self, slots: Array, places: Array, statistics: Array | None, now: float) -> None:
        """Writes a push into the records of the rows in ``slots[places]``; ``statistics`` are those
        of all slots.
        """
        rows, there = self._rows, slots[places]
        if rows.has("pushed"):
            rows.word("pushed")[there] = now
        if rows.has("order"):
            rows.word("order")[there] = self.order + places
        if rows.has("pushes"):
            rows.word("pushes")[there] += 1
        if statistics is not None:
            rows.word("show")[there] += statistics[places, 0]
            rows.word("click")[there] += statistics[places, 1]
            rows.word("unseen")[there] = 0.0

    def _room_for(self, due: Array, slots: Array) -> Array:
        """Evicts rows until those of the call's ids at the places ``due`` fit; returns the places
        for which there is room.

        Where a call alone has more ids than there is room for, its last ids get rows.
        """
        rows = self._rows
        excess = 0 if self._share is None else len(rows) + len(due) - self._share
        if self._share is None or excess <= 0:
            return due
        self.counts["evicted"] += excess
        here = np.flatnonzero(slots >= 0)
        if excess <= len(rows) - len(here):
            gone = victims(rows, excess, self.counts["evicted"])
        else:
            stays = np.sort(np.concatenate([here, due]))[-self._share :]
            due = np.intersect1d(due, stays)
            everything, _ = rows.index.listed(0, rows.index.used)
            gone = np.setdiff1d(everything, slots[np.intersect1d(here, stays)])
        slots[np.isin(slots, gone)] = -1
        rows.remove(rows.index.ids.array[gone])
        return due

    # ---- removal ----

    def _blocks(self) -> Iterator[Array]:
        """The slots of all rows, some at a time; rows of a block may be removed meanwhile."""
        cursor = 0
        while cursor >= 0:
            slots, cursor = self._rows.index.listed(cursor, BLOCK)
            yield slots

    def _drop(
        self, row_goes: Callable[[Array], Array], waiter_goes: Callable[[Array], Array]
    ) -> int:
        """Removes rows and waiting ids; returns how many rows.

        ``row_goes`` and ``waiter_goes``: slots -> bool[n], which of them to remove.
        """
        rows, removed = self._rows, 0
        for slots in self._blocks():
            gone = slots[row_goes(slots)]
            rows.remove(rows.index.ids.array[gone])
            removed += len(gone)
        index = self.admission.index
        slots, _ = index.listed(0, index.used)
        ids = index.ids.array[slots[waiter_goes(slots)]]
        index.remove(ids)
        rows.note_removed(ids)
        return removed

    def clear(self) -> None:
        """Forgets all rows and all ids that wait."""
        rows, index = self._rows, self.admission.index
        rows.clear()
        rows.note_removed(index.ids.array[index.listed(0, index.used)[0]])
        self.admission.clear()

    def expire(self, now: float) -> int:
        """Removes rows and waiting ids that have outlived their time; returns how many rows."""
        ttl = self.table.ttl
        if ttl is None:
            return 0
        removed = self._drop(
            lambda slots: self.outlived(slots, now),
            lambda slots: now - self.admission.records[slots, -1] > ttl,
        )
        self.counts["expired"] += removed
        return removed

    def shrink(self, days: float, threshold: float | None) -> int:
        """Applies the time decay of some days, then removes rows and waiting ids that score too low
        or had no push for too long.

        Args:
            days: that have passed.
            threshold: the least score that stays; None: the entry's.

        Returns:
            How many rows were removed.
        """
        entry = self.entry
        if entry is None:
            return 0
        least = entry.delete_threshold if threshold is None else threshold

        def decayed(statistics: Array) -> Array:
            """Decays show, click and unseen (the first 3 columns) in place; returns
            bool[n]: which have to go.
            """
            statistics[:, :2] *= entry.decay**days
            statistics[:, 2] += days
            unseen = statistics[:, 2] > entry.delete_after_unseen_days
            gone: Array = (score(entry, statistics) < least) | unseen
            return gone

        def row_goes(slots: Array) -> Array:
            rows = self._rows
            columns = [rows.word(name) for name in ("show", "click", "unseen")]
            statistics = np.stack([column[slots] for column in columns], axis=1)
            gone = decayed(statistics)
            rows.index.mark(rows.index.ids.array[slots], rows.epoch, rows.calls)
            for column, values in zip(columns, statistics.T, strict=True):
                column[slots] = values
            return gone

        def waiter_goes(slots: Array) -> Array:
            waiting = self.admission
            records = waiting.records[slots]
            gone = decayed(records)
            waiting.index.mark(waiting.index.ids.array[slots], self._rows.epoch, 0)
            waiting.records[slots] = records
            return gone

        removed = self._drop(row_goes, waiter_goes)
        self.counts["shrunk"] += removed
        return removed


def _spread(statistics: Array, places: Array, count: int) -> Array:
    """The statistics of the ids at some places of a call, as float32[count, 2] of all its ids."""
    spread = np.zeros((count, 2), np.float32)
    spread[places] = statistics
    return spread
