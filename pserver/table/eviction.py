"""Eviction: which rows go when a table is full.

[Note: samples]  Keeping all rows in the order of their last push would cost each push more than the
push itself.  In a table of up to ``EXACT`` rows a search of all finds those that had no push for
the longest time ("lru"), or the fewest pushes ("lfu"; of equals the one without a push for
longest).  In larger tables the search is among about ``EACH`` rows for each that has to go: those
whose ids have a hash in one range.  Where that range begins follows from the number of rows evicted
so far.  So what goes follows from the rows, and not from where they lie in memory: a run repeats,
and goes on as it would have from its checkpoint.
"""

from __future__ import annotations

import numpy as np

from pserver.table.index import KEYS
from pserver.table.initializers import chance
from pserver.table.kernels import Array
from pserver.table.rows import Rows

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
        if end > KEYS:  # it goes on at the beginning
            slots = np.concatenate([slots, rows.index.within(0, min(end - KEYS, begin))])
        if len(slots) >= count:
            return slots
        width *= 2
