"""The ids whose rows the messages of trainers have changed lately, so that a server can tell a
trainer which of its copies are stale.

[Note: changes by others]  In geo mode a trainer has copies of the rows that it steps, and knows of
its own changes.  A position counts the messages that a server has added to a table.  A trainer says
with each message up to which position it has been told; the answer has the ids that other
trainers have changed since, and the next position.  So the server keeps nothing for a trainer, and
a message that comes again is answered again.  Where the ids are not kept any more, or are more than
are worth sending, the answer says that all may have changed.  So it does after a load, and in a
server that has come back: positions begin at a random number.

A position of 0 asks for all changes since the table was empty.  As long as they are kept, a row
that is not among them has its initial value: nobody needs to ask for it.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Hashable
from typing import NamedTuple

import numpy as np

from pserver.table.ids import unique
from pserver.table.kernels import Array
from transpiler.ir.tables import Table
from transpiler.plan.plan import Lane

KEPT = 2**20  # ids that are kept for each table
MESSAGES = 2**14  # and messages: one of few ids takes more than these
OVERHEAD = 256  # bytes of a message besides its ids
MOST = 2**17  # ids of a table that one answer has


def tells_changes(table: Table, lane: Lane) -> bool:
    """Whether servers tell which rows of a table others have changed.

    They do where a row changes by messages alone, and a message's change is added as it was sent.
    """
    plain = table.dtype == table.computes_in and not table.compression
    stays = (table.entry, table.ttl, table.capacity) == (None, None, None)
    return lane.kind.servers_add and lane.row_invalidation and plain and stays


class TableChanges(NamedTuple):
    """The changes of one table's rows by others.

    Attributes:
        position: up to which they are told.
        ids: int64[u], each once; None: any row may have changed.
    """

    position: int
    ids: Array | None


class RowChanges:
    """The messages that have changed a table lately, in the order in which they were added.

    One caller at a time.

    Args:
        kept: ids that are kept.
        most: ids that are told at once.

    Example:
        >>> changes = RowChanges()
        >>> changes.note("trainer 0", np.array([3, 5]))
        >>> changes.note("trainer 1", np.array([5, 7]))
        >>> changes.since("trainer 0", 0).ids.tolist()
        [5, 7]
    """

    def __init__(self, kept: int = KEPT, most: int = MOST) -> None:
        self._kept, self._most = kept, most
        self._messages: deque[tuple[Hashable, Array]] = deque()
        self._size = 0  # ids in all messages
        self._whole = True  # every message since the table was empty is kept
        self._position = _origin()

    def note(self, process: Hashable, ids: Array) -> None:
        """Notes a message that was added, of a trainer's process: int64[u], which are copied."""
        if not len(ids):
            return
        self._messages.append((process, ids.copy()))
        self._size += len(ids)
        self._position += 1
        while self._size > self._kept or len(self._messages) > MESSAGES:
            self._size -= len(self._messages.popleft()[1])
            self._whole = False

    def forget(self) -> None:
        """Forgets all messages: any row may have changed."""
        self._messages.clear()
        self._size, self._whole, self._position = 0, False, _origin()

    def since(self, process: Hashable, position: int) -> TableChanges:
        """The changes that other processes have made since a position.

        Args:
            process: of the trainer that asks.
            position: that an earlier answer gave; 0: since the table was empty.
        """
        count = self._position - position if position else len(self._messages)
        if not 0 <= count <= len(self._messages) or not (position or self._whole):
            return TableChanges(self._position, None)
        others, size = list[Array](), 0
        for changed_by, ids in reversed(self._messages):
            if not count:
                break
            count -= 1
            if changed_by != process:
                others.append(ids)
                size += len(ids)
        found, _ = unique(np.concatenate([np.empty(0, np.int64), *others]))
        return TableChanges(self._position, found if len(found) <= self._most else None)

    @property
    def bytes_held(self) -> int:
        """Memory of the kept messages."""
        return self._size * 8 + len(self._messages) * OVERHEAD


def _origin() -> int:
    """A position that no other run of a server, and no time before a load, comes to."""
    return 1 + secrets.randbits(61)
