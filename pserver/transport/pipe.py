"""A bounded queue between two threads, which any thread can break."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from threading import Condition

from pserver.errors import Unreachable

LIMIT_BYTES = 2**23
LIMIT_ITEMS = 256


class Pipe:
    """One direction of a stream: messages of bytes in order, then an end (``close``) or a break
    (``break_``).

    ``put`` blocks while ``LIMIT_BYTES`` or ``LIMIT_ITEMS`` are waiting, ``get`` while nothing is.
    Neither has a timeout: the owner of the stream breaks it when the peer is lost.
    """

    def __init__(self) -> None:
        self._condition = Condition()  # guards everything below; nothing blocks under it
        self._items: deque[tuple[bytes, ...]] = deque()
        self._bytes = 0
        self._closed = False
        self._broken = ""  # why; "" while whole

    def put(self, *item: bytes) -> None:
        """Adds one message, given as one or more buffers.

        Raises:
            Unreachable: the pipe is broken, or closed.
        """
        with self._condition:
            self._condition.wait_for(self._may_put)
            if self._broken or self._closed:
                raise Unreachable(self._broken or "this side of the stream is closed")
            self._items.append(item)
            self._bytes += sum(map(len, item))
            self._condition.notify_all()

    def get(self) -> tuple[bytes, ...] | None:
        """The next message, or None after the last.

        Raises:
            Unreachable: the pipe is broken.  The messages in it are lost.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._items or self._closed or self._broken)
            if self._broken:
                raise Unreachable(self._broken)
            if not self._items:
                return None
            item = self._items.popleft()
            self._bytes -= sum(map(len, item))
            self._condition.notify_all()
            return item

    def drain(self) -> Iterator[bytes]:
        """All messages until the end or the break, each as one run of bytes."""
        while True:
            try:
                item = self.get()
            except Unreachable:
                return
            if item is None:
                return
            yield item[0] if len(item) == 1 else b"".join(item)

    def close(self) -> None:
        """Ends the pipe; the messages in it still arrive."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def break_(self, reason: str) -> None:
        """Makes every blocked or later ``put`` and ``get`` raise ``Unreachable(reason)``; the first
        reason stays.
        """
        with self._condition:
            self._broken = self._broken or reason
            self._condition.notify_all()

    def _may_put(self) -> bool:
        room = self._bytes < LIMIT_BYTES and len(self._items) < LIMIT_ITEMS
        return room or self._closed or bool(self._broken)
