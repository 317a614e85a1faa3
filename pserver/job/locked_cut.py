"""A table's cut as a save reads it: beside the steps, some rows at a time under the table's lock.

[Note: a reader that keeps up]  Rows that steps change before they are read are copied, and copies
are read first.  Where steps change more than can be written, the copies would become a second
table.  So a step that finds more than a part of the table copied waits for the reader, for an
instant: the memory that a save takes is bounded by what can be written in these instants.

[Note: a reader that rests]  While rows are read, steps wait.  So where steps come, the reader then
leaves the table to them for ``REST`` times as long; what it writes meanwhile counts.  A save of a
table that is always busy takes longer, and costs its steps a tenth at most.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np

from pserver.table.table_cut import TableCut

READ_ROWS = 32768  # rows that are read at a time: what a step may have to wait for
FILE_BYTES = 2**25  # of a chunk that is written at once
KEPT_PART = 20  # this part of a table may be copied
KEPT_BYTES = 2**26  # and so much of a small one
REST = 12  # times as long as a read took
LONGEST_REST_SECONDS = 0.2
WAIT_SECONDS = 0.02  # for which a step waits where more is

Chunk = dict[str, np.ndarray]


class LockedCut:
    """A table of one moment; safe to use from one thread beside those that use the table.

    Args:
        cut: the pure one.
        metadata: the table's at that moment, as JSON.
        read: the condition of the table's lock, on which steps wait for the reader.
        most: bytes of copies from which on they do.

    Attributes:
        metadata: as given.
    """

    def __init__(self, cut: TableCut, metadata: str, read: threading.Condition, most: int) -> None:
        self._cut, self._read, self._most = cut, read, most
        self.metadata = metadata
        self._stepped = False  # since the last read
        self._rests_until = 0.0

    def make_room(self) -> None:
        """A step comes: waits for an instant where too much is copied.  The caller holds the
        table's lock.
        """
        self._stepped = True
        if self._cut.bytes_kept > self._most:
            self._read.wait_for(lambda: self._cut.bytes_kept <= self._most, WAIT_SECONDS)

    def chunks(self) -> Iterator[Chunk]:
        """All rows, waiting and removed ids, each once, as chunks of about ``FILE_BYTES``."""
        some: list[Chunk] = []
        size = 0
        while (chunk := self._next()) is not None:
            some.append(chunk)
            size += sum(column.nbytes for column in chunk.values())
            if size >= FILE_BYTES:
                yield _joined(some)
                some, size = [], 0
        if some:
            yield _joined(some)

    def _next(self) -> Chunk | None:
        self._rest()
        with self._read:
            began = time.monotonic()
            chunk = self._cut.read(READ_ROWS)
            ended, busy = time.monotonic(), self._stepped
            self._stepped = False
            self._read.notify_all()
        rest = REST * (ended - began) if busy else 0.0
        self._rests_until = max(self._rests_until, ended) + rest
        return chunk

    def _rest(self) -> None:
        """See [Note: a reader that rests]; steps that wait for the reader end it."""
        left = self._rests_until - time.monotonic()
        if left > 0 and self._cut.bytes_kept <= self._most:
            time.sleep(min(left, LONGEST_REST_SECONDS))

    def close(self) -> None:
        """It is not read any more."""
        with self._read:
            self._cut.close()
            self._read.notify_all()


def _joined(chunks: list[Chunk]) -> Chunk:
    if len(chunks) == 1:
        return chunks[0]
    return {name: np.concatenate([each[name] for each in chunks]) for name in chunks[0]}
