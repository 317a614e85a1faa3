"""One connection that a proxy passes on: bytes both ways, without waiting for either end."""

from __future__ import annotations

import selectors
import socket

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class OneWay:
    """Bytes on their way from one socket to another; neither blocks.

    Attributes:
        ended: the source sends no more.
    """

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.ended = False
        self._source, self._sink = source, sink
        self._left = b""  # read, and not taken by the sink yet

    @property
    def waits(self) -> bool:
        """Whether the sink has yet to take something; nothing is read until it has."""
        return bool(self._left)

    def move(self, room: memoryview) -> int:
        """Passes on what there is, up to the size of ``room``, which is overwritten.

        Returns:
            How many bytes were read.

        Raises:
            OSError: one of the two is broken.
        """
        if self._left:
            self._left = self._left[self._send(memoryview(self._left)) :]
        if self._left or self.ended:
            return 0
        try:
            count = self._source.recv_into(room)
        except BlockingIOError:
            return 0
        if not count:
            self.ended = True
            return 0
        sent = self._send(room[:count])
        self._left = bytes(room[sent:count])
        return count

    def _send(self, data: memoryview) -> int:
        try:
            return self._sink.send(data)
        except BlockingIOError:
            return 0


class ProxiedConnection:
    """A client's connection, and the one behind it, which leads to the server.

    Args:
        front: the client's.
        back: the server's.

    Attributes:
        received: bytes that the client has sent.
    """

    def __init__(self, front: socket.socket, back: socket.socket) -> None:
        self.front, self.back = front, back
        self.received = 0
        self._up, self._down = OneWay(front, back), OneWay(back, front)

    @property
    def over(self) -> bool:
        """Whether nothing is left to do.  Neither end closes one direction alone: HTTP/2 does not.
        What the server has said before its end is passed on.
        """
        return self._up.ended or (self._down.ended and not self._down.waits)

    def move(self, room: memoryview) -> int:
        """Passes on what there is, both ways.

        Returns:
            How many bytes the client has sent.

        Raises:
            OSError: one of the two ends is broken.
        """
        count = self._up.move(room)
        self.received += count
        self._down.move(room)
        return count

    def awaited(self) -> tuple[tuple[socket.socket, int], tuple[socket.socket, int]]:
        """Each socket, and what it is waited for: ``READ``, ``WRITE``, both, or 0."""
        return (
            (self.front, _events(self._up, self._down)),
            (self.back, _events(self._down, self._up)),
        )


def _events(reads: OneWay, writes: OneWay) -> int:
    return (0 if reads.waits or reads.ended else READ) | (WRITE if writes.waits else 0)
