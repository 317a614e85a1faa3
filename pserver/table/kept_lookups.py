"""The lookups that a trainer makes ahead of its steps, kept with what it was sent.

[Note: look-ahead]  A trainer that knows the ids of a coming step asks for their rows while it
computes, and keeps what it gets.  When that step begins it asks again, by the lookup's number
alone, and gets those rows that are not the same any more::

    step t          lookup 8 of the ids of step t + 1: all rows
                    gradients; all trainers' gradients are applied
    step t + 1      refresh of lookup 8: the rows among them that step t has changed

So a step waits for the rows that the steps before it have touched, and for no other.  What it reads
is what a lookup would read now, to the bit: the server reads all rows again, and compares them with
what it has sent.  Nothing needs to say what has changed a row: a gradient, a decay of all rows, a
load, an eviction, the end of a time to live.

The lookups that are kept end with their stream.  A trainer whose lookup is not known, because its
stream broke or the server is another one, looks up again.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pserver.table.kernels import Array

MOST_KEPT = 8  # lookups of a trainer
KEPT_BYTES = 2**28  # of their ids and rows


class SentRows:
    """The rows of one table that a lookup has sent.

    Args:
        ids: int64[n].
        rows: [n, dim], as sent; nobody changes them.

    Example:
        >>> sent = SentRows(np.array([3, 5]), np.array([[1.0], [2.0]]))
        >>> sent.refresh(np.array([[1.0], [4.0]]))
        (array([1]), array([[4.]]))
        >>> sent.refresh(np.array([[1.0], [4.0]]))[0]
        array([], dtype=int64)
    """

    def __init__(self, ids: Array, rows: Array) -> None:
        self.ids, self._rows = ids, rows

    def refresh(self, rows: Array) -> tuple[Array, Array]:
        """The rows that differ from those that were sent, in any bit; they count as sent now.

        Args:
            rows: [n, dim], as they are now; nobody changes them.

        Returns:
            Their places among the ids, int64[c], ascending; and themselves, [c, dim].
        """
        differs = (_words(rows) != _words(self._rows)).any(axis=1)
        places = np.flatnonzero(differs)
        self._rows = rows
        return places, rows[places]

    @property
    def bytes_held(self) -> int:
        """Memory of the ids and the rows."""
        return int(self.ids.nbytes + self._rows.nbytes)


def _words(rows: Array) -> Array:
    """The same memory as whole numbers, as wide as fit into a row."""
    size = rows.shape[1] * rows.itemsize
    width = next(width for width in (8, 4, 2, 1) if size % width == 0)
    words: Array = rows.view(f"u{width}")
    return words


class KeptLookups:
    """The last lookups of one trainer that are kept, by number.  One thread uses it.

    Args:
        most: lookups.
        most_bytes: of their ids and rows.
    """

    def __init__(self, most: int = MOST_KEPT, most_bytes: int = KEPT_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._lookups: dict[int, Mapping[str, SentRows]] = {}
        self.bytes_held = 0

    def keep(self, number: int, sent: Mapping[str, SentRows]) -> None:
        """Keeps a lookup, by table; the oldest ones go where there are too many, and this one where
        it is too large itself.
        """
        self._drop(number)
        self._lookups[number] = sent
        self.bytes_held += _bytes(sent)
        while len(self._lookups) > self._most or self.bytes_held > self._most_bytes:
            self._drop(next(iter(self._lookups)))

    def find(self, number: int) -> Mapping[str, SentRows]:
        """A lookup's rows, by table; empty where it is not kept."""
        return self._lookups.get(number, {})

    def _drop(self, number: int) -> None:
        self.bytes_held -= _bytes(self._lookups.pop(number, {}))


def _bytes(sent: Mapping[str, SentRows]) -> int:
    return sum(each.bytes_held for each in sent.values())
