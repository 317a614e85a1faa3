"""The ids of a table whose rows other trainers have changed, as the servers tell them.

See [Note: changes by others] in pserver/table/changes.py.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping

import numpy as np

from pserver.client.replies import ChangedRows


class ChangeFeed:
    """The changes of one table's rows by others, as answers to a lane's messages tell them.

    The lane's thread sends positions and puts answers; the script's thread takes them.

    Args:
        servers: how many.

    Attributes:
        whole: all changes by others since the table was empty have been told; the script's thread
            reads it.
    """

    def __init__(self, servers: int) -> None:
        self.whole = False
        self._positions = [0] * servers
        self._whole = [False] * servers
        self._answers: queue.SimpleQueue[tuple[int, bool, ChangedRows | None]] = queue.SimpleQueue()

    def position(self, server: int) -> int:
        """The position up to which a server has told its changes; 0: it has told nothing."""
        return self._positions[server]

    def put(self, server: int, changed: ChangedRows | None, refused: bool) -> None:
        """Takes an answer of a server.

        Args:
            changed: what it tells; None: nothing, so any row may have changed.
            refused: the message was not applied, so what this trainer takes for the servers'
                values is wrong.
        """
        begins = not self._positions[server]
        self._positions[server] = 0 if changed is None else changed.position
        self._answers.put((server, begins, None if refused else changed))

    def take(self) -> Iterator[np.ndarray | None]:
        """The ids, int64[u], of each answer since the last call; None: any row may have changed."""
        while True:
            try:
                server, begins, changed = self._answers.get_nowait()
            except queue.Empty:
                return
            told = changed is not None and changed.ids is not None
            self._whole[server] = told and (begins or self._whole[server])
            self.whole = all(self._whole)
            yield changed.ids if changed is not None else None


def put_all(
    feeds: Mapping[str, ChangeFeed], server: int, told: Mapping[str, ChangedRows], refused: bool
) -> None:
    """Gives each table's feed its part of a server's answer."""
    for name, feed in feeds.items():
        feed.put(server, told.get(name), refused)
