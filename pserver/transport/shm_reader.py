"""Reads what comes over a unix socket: bytes, and descriptors beside them."""

from __future__ import annotations

import array
import os
import socket
from collections import deque

from pserver.errors import CorruptFrame

BUFFER_BYTES = 2**16  # read at once
DESCRIPTORS = 1  # that come with one message


class SocketReader:
    """A buffered reader.  One thread at a time uses it.

    Args:
        connection: whose owner stays the caller.
        takes_descriptors: otherwise the kernel drops those that come.
    """

    def __init__(self, connection: socket.socket, takes_descriptors: bool) -> None:
        self._socket = connection
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._begin = self._end = 0  # of what was read and not taken yet
        self._beside = socket.CMSG_SPACE(DESCRIPTORS * 4) if takes_descriptors else 0
        self._descriptors: deque[int] = deque()
        self._closed = False

    def exactly(self, size: int) -> bytes:
        """The next bytes.

        Raises:
            OSError: the peer is gone, or the reader was closed.
        """
        have = bytes(self._buffer[self._begin : min(self._end, self._begin + size)])
        self._begin += len(have)
        if len(have) == size:
            return have
        pieces = [have]
        missing = size - len(have)
        while missing:
            self._begin, self._end = 0, self._read()
            self._begin = min(missing, self._end)
            pieces.append(bytes(self._buffer[: self._begin]))
            missing -= self._begin
        return b"".join(pieces)

    def descriptor(self) -> int:
        """The next descriptor, which is the caller's from now on.

        Raises:
            CorruptFrame: none has come with what was read.
        """
        if not self._descriptors:
            raise CorruptFrame("expected a descriptor, got none")
        return self._descriptors.popleft()

    def close(self) -> None:
        """Closes descriptors that nobody has taken."""
        self._closed = True
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def _read(self) -> int:
        """Reads into the buffer, of which nothing is left."""
        size = 0
        if not self._closed:
            size, beside, _, _ = self._socket.recvmsg_into(
                [self._buffer], self._beside, socket.MSG_CMSG_CLOEXEC
            )
            for level, kind, data in beside:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    self._descriptors.extend(array.array("i", data))
        if not size:
            raise ConnectionError("the peer is gone")
        return size
