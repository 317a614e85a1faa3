"""The life of rows: ids are admitted, rows expire, score too low, or are evicted for others.

::

    no row --push--> waits --admitted--> row --expire, shrink or evict--> no row
      |                                   ^
      +------admitted at once, assign-----+

Every such event is counted.

[Note: samples]  Keeping all rows in the order of their last push would cost each push more than the
push itself.  In a table of up to ``EXACT`` rows a search of all finds those that had no push for
the longest time ("lru"), or the fewest pushes ("lfu"; of equals the one without a push for
longest).  In larger tables the search is among about ``EACH`` rows for each that has to go: those
whose ids have a hash in one range.  Where that range begins follows from the number of rows evicted
so far.  So the evicted rows depend on the rows, and not on their places in memory: a run repeats,
and continues as it would have from its checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from pserver.table.ids import plain
from pserver.table.index import KEYS, GrowingArray, Index
from pserver.table.kernels import Array, kernel
from pserver.table.rows import BLOCK, Rows, chance, seed_word
from pserver.table.updater import RowUpdater
from transpiler.ir.tables import CountFilterEntry, ProbabilityEntry, ShowClickEntry, Table

# ---- admission ----
#
# The admission filter of a table: which ids get a row.
#
# A table's entry is its admission rule.  An id that is pushed to and not admitted waits: the filter
# keeps its counts until a later push admits it.


@kernel
def _chosen(ids: Array, seed: np.uint64, probability: float, chosen: Array) -> None:
    """Writes for each id whether a ProbabilityEntry admits it."""
    for i in range(len(ids)):
        chosen[i] = chance(seed, ids[i]) < probability


def score(entry: ShowClickEntry, statistics: Array) -> Array:
    """The scores of ids, float64[n].

    Args:
        entry: the admission rule.
        statistics: [n, 2 or more], the shows and clicks of each id.
    """
    show, click = statistics[:, 0], statistics[:, 1]
    return (show - click) * entry.nonclk_coeff + click * entry.click_coeff


class AdmissionFilter:
    """Decides about rows for new ids, and keeps the ids that wait for one.

    One caller at a time.

    Args:
        table: the table's description in the plan.

    Attributes:
        entry: the admission rule; None admits every id.
        index: of the ids that wait.
        names: the columns of ``records``: "count", or "show", "click" and "unseen"; and "pushed"
            where rows have a time to live.
    """

    def __init__(self, table: Table) -> None:
        self.entry, self._ttl, self._seed = table.entry, table.ttl, seed_word(table.seed)
        self.index = Index()
        names = (
            ("show", "click", "unseen") if isinstance(self.entry, ShowClickEntry) else ("count",)
        )
        self.names = (*names, *(("pushed",) if table.ttl is not None else ()))
        self._memory = GrowingArray(len(self.names), np.float64)

    @property
    def delays(self) -> bool:
        """Whether ids of this table may have to wait."""
        entry = self.entry
        return (isinstance(entry, CountFilterEntry) and entry.count > 1) or (
            isinstance(entry, ShowClickEntry) and entry.threshold > 0
        )

    @property
    def records(self) -> Array:
        """float64[slots, names]: the record of each waiting id; the memory itself."""
        return self._memory.array

    @property
    def bytes_held(self) -> int:
        """Memory of records and index, in bytes."""
        return self.index.used * self._memory.row_bytes + self.index.bytes_held

    def admit(
        self, ids: Array, statistics: Array | None, now: float, epoch: int
    ) -> tuple[Array, Array]:
        """Counts a push to ids without a row, and admits those that are due.

        Args:
            ids: int64[m], which differ.
            statistics: float32[m, 2] of this push, where the table has statistics.
            now: seconds.
            epoch: of the table's saves.

        Returns:
            bool[m]: whether they get a row now; float64[m, 2]: their statistics of earlier pushes.
        """
        earlier = np.zeros((len(ids), 2))
        if isinstance(self.entry, ProbabilityEntry):
            chosen = np.zeros(len(ids), np.bool_)
            _chosen(plain(ids, "admit"), self._seed, self.entry.probability, chosen)
            return chosen, earlier
        if not self.delays:
            return np.ones(len(ids), np.bool_), earlier
        slots = self._known(ids, now, epoch)
        held = self.records[slots]
        if isinstance(self.entry, ShowClickEntry):
            assert statistics is not None, "a table with this entry has statistics"
            earlier = held[:, :2].copy()
            held[:, :2] += statistics
            held[:, 2] = 0.0
            admitted = score(self.entry, held) >= self.entry.threshold
        else:
            assert isinstance(self.entry, CountFilterEntry)
            held[:, 0] += 1
            admitted = held[:, 0] >= self.entry.count
        if self._ttl is not None:
            held[:, -1] = now
        self.records[slots] = held
        self.index.remove(np.ascontiguousarray(ids[admitted]))
        return admitted, earlier

    def _known(self, ids: Array, now: float, epoch: int) -> Array:
        """The slots of these ids, with empty records for those that are new or had outlived their
        time.
        """
        slots, missing, _ = self.index.mark(ids, epoch, 0)
        if missing:
            slots[slots < 0] = self.add(ids[slots < 0], epoch)
        if self._ttl is not None:
            self.records[slots[now - self.records[slots, -1] > self._ttl]] = 0.0
        return slots

    def add(self, ids: Array, epoch: int) -> Array:
        """Makes ids wait that did not: their slots, with empty records."""
        slots = self.index.insert(ids, epoch, 0)
        self._memory.need(self.index.used)
        self.records[slots] = 0.0
        return slots

    def clear(self) -> None:
        """Forgets all ids."""
        used = self.index.used
        self.index.clear()
        self._memory.clear(used)


# ---- eviction ----
#
# Eviction: which rows go when a table is full.


EXACT = 16384  # rows of a table that are all searched
EACH = 16  # rows that are searched for each that has to go, in larger tables


def victims(rows: Rows, count: int, before: int) -> Array:
    """Chooses rows to evict.  See [Note: samples].

    Args:
        rows: the table's rows, whose records have the word "order" (and "pushes" for "lfu").
        count: how many to choose; at least one.
        before: how many were evicted so far.

    Returns:
        int64[count]: their slots.
    """
    sampled = len(rows) > max(EXACT, EACH * count)
    slots = _sample(rows, count, before) if sampled else rows.index.listed(0, rows.index.used)[0]
    ids, order = rows.index.ids.array[slots], rows.word("order")[slots]
    if rows.has("pushes"):
        return slots[np.lexsort((ids, order, rows.word("pushes")[slots]))[:count]]
    return slots[_least(order, ids, count)]


def _least(order: Array, ids: Array, count: int) -> Array:
    """The places of the ``count`` least; of equals, which rows of several servers may be, those of
    the least ids.
    """
    bound = np.partition(order, count - 1)[count - 1]
    sure, equal = np.flatnonzero(order < bound), np.flatnonzero(order == bound)
    return np.concatenate([sure, equal[np.argsort(ids[equal])][: count - len(sure)]])


def _sample(rows: Rows, count: int, before: int) -> Array:
    """The slots of rows in one range of hashes: at least ``count``."""
    width = KEYS * EACH * count // len(rows)
    begin = int(chance(rows.seed, before) * KEYS)
    while True:
        end = begin + width
        slots = rows.index.within(begin, min(end, KEYS))
        if end > KEYS:  # it continues at the beginning
            slots = np.concatenate([slots, rows.index.within(0, min(end - KEYS, begin))])
        if len(slots) >= count:
            return slots
        width *= 2


# ---- lifecycle ----


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
        updater: its rules give the states with which new rows begin.
        share: the largest number of rows here; None: any number.

    Attributes:
        admission: decides which ids get a row.
        entry: the table's ShowClickEntry; None: it has another entry or none.
        counts: event -> its count, by the names of ``COUNTED``.
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
        """bool[n]: whether the last push to each row (-1: none) is longer ago than its time to
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
        if self.table.ttl is not None and (outlived := self.outlived(slots, now)).any():
            rows.remove(ids[outlived])
            self.counts["expired"] += int(outlived.sum())
            slots[outlived] = -1
        before = (slots < 0).nonzero()[0]
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

        ``row_goes`` and ``waiter_goes``: slots -> bool[n], whether to remove each.
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
            """Decays show, click and unseen (the first 3 columns) in place; returns bool[n]:
            whether each has to go.
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
