"""The servers' values of rows that a trainer steps by itself, as far as the trainer knows them.

A copy has the slot of its row in the trainer's own table.  So the search for a row finds both.

[Note: stale copies]  A copy is stale when the servers' value may be another one: its row is asked
for when it is next looked up.  Time is a count: of windows, and of events that make all copies
stale.  Each copy has the time at which its row was last asked for; a negative one is stale, and so
is one before :attr:`ServedCopies.fresh_after`; 0 stands for a row without a copy.
"""

from __future__ import annotations

import numpy as np

from pserver.table.index import GrowingArray
from pserver.table.kernels import Array, kernel


@kernel
def _stale(slots: Array, asked_at: Array, after: int, places: Array) -> int:
    """Writes the places of the slots whose copies are stale or missing; returns how many."""
    count = 0
    for i in range(len(slots)):
        if slots[i] < 0 or asked_at[slots[i]] <= after:
            places[count] = i
            count += 1
    return count


@kernel
def _move(
    slots: Array,
    rows: Array,
    served: Array,
    values: Array,
    asked_at: Array,
    restarted: int,
    now: int,
) -> None:
    """Moves rows by what the servers' values have changed by since the copies; a number that would
    not be finite becomes the servers'.
    """
    for i in range(len(slots)):
        slot = slots[i]
        anew = abs(asked_at[slot]) <= restarted
        for j in range(rows.shape[1]):
            moved = rows[i, j] + (served[i, j] - values[slot, j])
            rows[i, j] = served[i, j] if anew or not np.isfinite(moved) else moved
            values[slot, j] = served[i, j]
        asked_at[slot] = now


@kernel
def _take_changes(slots: Array, rows: Array, values: Array, divisor: float) -> None:
    """Writes the divided changes of rows in their place, by which the copies move."""
    for i in range(len(slots)):
        slot = slots[i]
        for j in range(rows.shape[1]):
            change = (rows[i, j] - values[slot, j]) / divisor
            rows[i, j] = change
            values[slot, j] += change


@kernel
def _first(slots: Array, trained_in: Array, window: int, first: Array) -> int:
    """Writes the slots that are not trained in this window yet, each once; returns how many."""
    count = 0
    for i in range(len(slots)):
        if trained_in[slots[i]] != window:
            trained_in[slots[i]] = window
            first[count] = slots[i]
            count += 1
    return count


class ServedCopies:
    """The servers' values of rows, by slot.  One caller at a time.

    Args:
        dim, dtype: of a row.

    Attributes:
        now: the time; see [Note: stale copies].
        fresh_after: copies of rows that were last asked for until then are stale.
        window: the number of the window in which rows are trained, from 1.
    """

    def __init__(self, dim: int, dtype: type[np.generic]) -> None:
        self._values = GrowingArray(dim, dtype)
        self._asked_at = GrowingArray(0, np.int64)
        self._trained_in = GrowingArray(0, np.int64)
        self._arrays = self._values, self._asked_at, self._trained_in
        self.now, self.fresh_after, self._restarted = 1, 0, 0
        self.window = 1

    def need(self, slots: int) -> None:
        """Makes room for so many slots."""
        for each in self._arrays:
            each.need(slots)

    def clear(self, slots: int) -> None:
        """Forgets all copies, of the first ``slots`` slots."""
        for each in self._arrays:
            each.clear(slots)

    # ---- which are known ----

    def known(self, slots: Array) -> Array:
        """bool[n]: whether there is a copy; slots of -1 have none."""
        found: Array = (slots >= 0) & (self._asked_at.array[slots] != 0)
        return found

    def stale(self, slots: Array) -> Array:
        """The places among these slots, int64[m], of copies that are stale or missing."""
        places = np.empty(len(slots), np.int64)
        return places[: _stale(slots, self._asked_at.array, self.fresh_after, places)]

    def mark_stale(self, slots: Array) -> None:
        """Makes some copies stale."""
        self._asked_at.array[slots] = -np.abs(self._asked_at.array[slots])

    def mark_all_stale(self) -> None:
        """Makes all copies stale."""
        self.fresh_after = self.now
        self.now += 1

    def restart(self) -> None:
        """Makes all copies stale; their rows become the servers' when they are next asked for."""
        self.mark_all_stale()
        self._restarted = self.fresh_after

    # ---- values ----

    def values(self, slots: Array) -> Array:
        """The copies, [n, dim]."""
        found: Array = self._values.array[slots]
        return found

    def put(self, slots: Array, values: Array, fresh: bool = True) -> None:
        """Sets copies, [n, dim].

        Args:
            fresh: the servers have sent them now; otherwise they are stale.
        """
        self._values.array[slots] = values
        self._asked_at.array[slots] = self.now if fresh else -self.now

    def move(self, slots: Array, rows: Array, served: Array) -> None:
        """Moves rows, [n, dim], in place, by as much as the servers' values, [n, dim], differ from
        their copies, which become those.  See [Note: geo, row by row].
        """
        arrays = self._values.array, self._asked_at.array
        _move(slots, rows, served, *arrays, self._restarted, self.now)

    # ---- windows ----

    def train(self, slots: Array) -> Array:
        """Notes rows that are trained in this window, int64[n].

        Returns:
            Those that were not before.
        """
        first = np.empty(len(slots), np.int64)
        return first[: _first(slots, self._trained_in.array, self.window, first)]

    def untrained(self, slots: Array) -> Array:
        """Those of some slots whose rows are not trained in this window."""
        found: Array = slots[self._trained_in.array[slots] != self.window]
        return found

    def end_window(self, slots: Array, rows: Array, divisor: int) -> None:
        """Ends a window.

        Args:
            slots: of the rows that were trained in it.
            rows: [n, dim], which become their changes, divided by the divisor.
        """
        _take_changes(slots, rows, self._values.array, rows.dtype.type(divisor))
        self.window += 1
