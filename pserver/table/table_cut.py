"""A table as it was at one moment, read in pieces while the table is used.

See [Note: copy before change] in slot_cut.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pserver.table.chunks import NONE, TableChunks
from pserver.table.index import Index
from pserver.table.kernels import Array
from pserver.table.slot_cut import Chunk, SlotCut
from pserver.undone import or_undone

BLOCK = 65536  # removed ids of a chunk


class TableCut:
    """What a table holds at the moment in which this is made, as chunks: see chunks.py.

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
        """The cut is not read any more; the table forgets it."""
        self._rows.close()
        self._waiting.close()
        self._others = iter(())
