"""The slots of one index as they were at one moment, read in pieces while the index changes.

[Note: copy before change]  A cut costs nothing when it begins.  The index tells it of slots whose
records are about to change or to go, and of slots that get another id: the cut copies the records
that it still needs, and passes over the slots that came later.  What was copied is read first, so
that copies do not pile up while the reader is faster than the changes.

[Note: slots that are read in a row]  Looking up each id, to see whether its slot holds a row, costs
more than to copy the row.  So a cut of all rows notes the free slots when it begins; of every other
slot it is told.  Where more than ``FREE_SLOTS`` are free, that would keep the steps waiting, and
ids are looked up.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pserver.table.index import Index
from pserver.table.index_kernels import EPOCHS, claim
from pserver.table.kernels import Array

FREE_SLOTS = 2**16

Chunk = dict[str, Array]


class SlotCut:
    """What an index and its records hold at the moment in which this is made.

    One caller at a time, who is also the only one to change the index.

    Args:
        index: which tells of changes from here on, until :meth:`close`.
        epoch: only rows that were last changed in it; -1: all.
        after: the epoch of all changes from here on, which no row has before; -1: there is none.
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
        """These slots, int64[n], which were free, get an id."""
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
        """The index tells of no more changes, and what was copied is dropped."""
        if self._index.watcher is self:
            self._index.watcher = None
        self._kept, self.bytes_kept = [], 0
        self._place, self._done = 0, self._done[:0].copy()
