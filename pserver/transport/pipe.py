"""A bounded queue between two threads that either of them, or a third, can break."""

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

    ``put`` waits while ``LIMIT_BYTES`` or ``LIMIT_ITEMS`` are waiting, ``get`` while nothing is;
    there is no deadline, because whoever owns the stream breaks it when a peer has been silent for
    too long.
    """

    def __init__(self) -> None:
        self._changed = Condition()  # guards everything below; nothing blocks under it
        self._items: deque[tuple[bytes, ...]] = deque()
        self._bytes = 0
        self._closed = False
        self._broken = ""  # why; "" while whole

    def put(self, *item: bytes) -> None:
        """Adds one message, in pieces.

        Raises:
            Unreachable: the pipe is broken, or closed.
        """
        with self._changed:
            self._changed.wait_for(self._may_put)
            if self._broken or self._closed:
                raise Unreachable(self._broken or "this side of the stream is closed")
            self._items.append(item)
            self._bytes += sum(map(len, item))
            self._changed.notify_all()

    def get(self) -> tuple[bytes, ...] | None:
        """The next message, or None after the last.

        Raises:
            Unreachable: the pipe is broken.  What waited in it is lost.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._closed or self._broken)
            if self._broken:
                raise Unreachable(self._broken)
            if not self._items:
                return None
            item = self._items.popleft()
            self._bytes -= sum(map(len, item))
            self._changed.notify_all()
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
        """No more messages; those that wait still arrive."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def break_(self, reason: str) -> None:
        """Everyone who waits, or comes later, gets ``Unreachable(reason)``; the first reason
        stays.
        """
        with self._changed:
            self._broken = self._broken or reason
            self._changed.notify_all()

    def _may_put(self) -> bool:
        room = self._bytes < LIMIT_BYTES and len(self._items) < LIMIT_ITEMS
        return room or self._closed or bool(self._broken)
