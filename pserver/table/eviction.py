"""Which rows go when a table is full.

[Note: samples]  Keeping all rows in the order of their last push would cost each push more than the
push itself.  Up to ``EXACT`` rows those that have waited longest ("lru"), or were pushed to least
often ("lfu"; of equals the one that waited longest), are found by looking at all.  Larger tables
look at ``EACH`` rows for each that has to go, spread evenly over the table, and take the first in
that order among these.  Where the even spread begins follows from the number of rows evicted so
far: a run repeats.
"""

from __future__ import annotations

import numpy as np

from pserver.table.initializers import chance
from pserver.table.kernels import Array
from pserver.table.rows import Rows

EXACT = 16384
EACH = 16


def victims(rows: Rows, count: int, before: int) -> Array:
    """Slots of ``count`` rows to evict, int64[count].

    ``before``: how many were evicted so far.  See [Note: samples].
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
    """Slots that hold a row, spread evenly."""
    used = rows.index.used
    stride = max(used // (EACH * count), 1)
    begin = int(chance(rows.seed, before) * stride)
    slots: Array = np.arange(begin, used, stride)
    held: Array = slots[rows.index.locate(rows.index.ids.array[slots])[0] == slots]
    return held
