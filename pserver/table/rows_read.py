"""The rows that each trainer has last looked up, where delays are compensated.

[Note: rows as they were read]  Delay compensation needs each row as its gradient's trainer had it.
A copy of the table for each trainer would be too large, and is not needed: a gradient comes soon
after the lookup that it was computed at, or never.  So a trainer's reads are kept in two
generations.  A lookup writes to the young one.  When ``kept`` messages of the trainer have come,
the young generation becomes the old one, and the old one is forgotten.  A row is so kept for
``kept`` further messages at least, and for twice as many at most.
"""

from __future__ import annotations

import numpy as np

from pserver.table import ids as id_arithmetic
from pserver.table.index import Index
from pserver.table.kernels import Array
from pserver.table.memory import Memory


class _Generation:
    """Rows by id."""

    def __init__(self, dim: int, dtype: type[np.generic]) -> None:
        self.index = Index()
        self.rows = Memory(dim, dtype)

    def put(self, ids: Array, rows: Array) -> None:
        slots, missing = self.index.locate(ids)
        if missing:
            fresh = slots < 0
            slots[fresh] = self.index.insert(ids[fresh], 0, 0)
            self.rows.need(self.index.used)
        self.rows.array[slots] = rows

    def fill_in(self, ids: Array, out: Array) -> Array:
        slots, _ = self.index.locate(ids)
        here: Array = slots >= 0
        out[here] = self.rows.array[slots[here]]
        return here

    def clear(self) -> None:
        self.rows.clear(self.index.used)
        self.index.clear()


class RowsRead:
    """What trainers have read of one table.  See [Note: rows as they were read].

    One caller at a time.

    Args:
        dim, dtype: of a row.
        kept: messages of a trainer for which a row is kept at least, 1 or more.
    """

    def __init__(self, dim: int, dtype: type[np.generic], kept: int) -> None:
        self._dim, self._dtype, self._kept = dim, dtype, kept
        # by trainer: the young generation and the old one
        self._read: dict[int, tuple[_Generation, _Generation]] = {}
        self._messages: dict[int, int] = {}  # since the young generation began

    def note(self, trainer: int, ids: Array, rows: Array) -> None:
        """A trainer has looked these rows up.

        Args:
            ids: int64[n]; they may repeat.
            rows: [n, dim].
        """
        if trainer not in self._read:
            young, old = (_Generation(self._dim, self._dtype) for _ in range(2))
            self._read[trainer] = young, old
            self._messages[trainer] = 0
        found, inverse = id_arithmetic.unique(ids)
        if len(found) < len(ids):
            first = np.empty(len(found), np.int64)
            first[inverse] = np.arange(len(ids))  # rows of one id are equal
            ids, rows = found, rows[first]
        self._read[trainer][0].put(ids, rows)

    def take_message(self, trainer: int, ids: Array) -> tuple[Array, Array]:
        """Rows as a trainer had them when it computed a gradient that has come.

        Args:
            ids: int64[u], of the gradient.

        Returns:
            [u, dim], and bool[u]: which of them are known.
        """
        then, known = np.zeros((len(ids), self._dim), self._dtype), np.zeros(len(ids), np.bool_)
        if trainer in self._read:
            young, old = self._read[trainer]
            known |= old.fill_in(ids, then)
            known |= young.fill_in(ids, then)
            self._messages[trainer] += 1
            if self._messages[trainer] >= self._kept:
                old.clear()
                self._read[trainer], self._messages[trainer] = (old, young), 0
        return then, known

    def clear(self) -> None:
        """Forgets everything, because rows have been loaded."""
        self._read.clear()
        self._messages.clear()

    @property
    def bytes_held(self) -> int:
        """Memory of the rows and of their indices."""
        return sum(
            each.index.bytes_held + each.index.used * each.rows.row_bytes
            for generations in list(self._read.values())  # others may read meanwhile
            for each in generations
        )
