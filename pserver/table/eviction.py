"""Eviction: which rows go when a table is full.

[Note: samples]  Keeping all rows in the order of their last push would cost each push more than the
push itself.  In a table of up to ``EXACT`` rows a search of all finds those that had no push for
the longest time ("lru"), or the fewest pushes ("lfu"; of equals the one without a push for
longest).  In larger tables the search is among ``EACH`` rows for each that has to go, spread evenly
over the table.  Where the even spread begins follows from the number of rows evicted so far: a run
repeats.
"""

from __future__ import annotations

import numpy as np

from pserver.table.initializers import chance
from pserver.table.kernels import Array
from pserver.table.rows import Rows

EXACT = 16384  # rows of a table that are all searched
EACH = 16  # rows that are searched for each that has to go, in larger tables


def victims(rows: Rows, count: int, before: int) -> Array:
    """Chooses rows to evict.  See [Note: samples].

    Args:
        rows: the table's rows, whose records have the word "order" (and "pushes" for "lfu").
        count: how many to choose.
        before: how many were evicted so far.

    Returns:
        int64[count]: their slots.
    """
    slots = _sample(rows, count, before) if len(rows) > max(EXACT, EACH * count) else None
    if slots is None or len(slots) < count:
        slots, _ = rows.index.listed(0, rows.index.used)
    order = rows.word("order")[slots]
    if rows.has("pushes"):
        return slots[np.lexsort((order, rows.word("pushes")[slots]))[:count]]
    if len(order) == count:
        return slots
    return slots[np.argpartition(order, count)[:count]]


def _sample(rows: Rows, count: int, before: int) -> Array:
    """Slots of rows, spread evenly over the table."""
    used = rows.index.used
    stride = max(used // (EACH * count), 1)
    begin = int(chance(rows.seed, before) * stride)
    slots: Array = np.arange(begin, used, stride)
    held: Array = slots[rows.index.locate(rows.index.ids.array[slots])[0] == slots]
    return held
