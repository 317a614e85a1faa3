"""What the two ends of a TCP stream say before its first frame: always with a checksum, as here the
further ones are agreed on.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

from crc32c import crc32c

from pserver.config import MOST_CONNECTIONS
from pserver.errors import Untrusted
from pserver.security import tls

KEY_BYTES = 16
GREETING_MAGIC, WELCOME_MAGIC = b"pstcp\0\0\1", b"psyes\0\0\1"  # the last byte is the version
_GREETING = struct.Struct(f"<8sI{KEY_BYTES}s")
_WELCOME = struct.Struct(f"<8sI?{KEY_BYTES}s")
_CHECKSUM = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Greeting:
    """What the connecting end says on each connection.

    Attributes:
        index: of the connection in its stream.
        key: of the stream, from the Welcome on its first connection, where it has none.
    """

    index: int = 0
    key: bytes = bytes(KEY_BYTES)

    def send(self, connection: socket.socket) -> None:
        """Raises OSError if the connection is broken."""
        _send(connection, _GREETING.pack(GREETING_MAGIC, self.index, self.key))

    @classmethod
    def receive(cls, connection: socket.socket) -> Greeting:
        """Raises OSError if the peer is no trainer, or says nothing within the socket's timeout."""
        said = _receive(connection, _GREETING.size)
        magic, index, key = _GREETING.unpack(said or bytes(_GREETING.size))
        if magic != GREETING_MAGIC or index >= 2 * MOST_CONNECTIONS:
            raise OSError("expected a trainer's greeting, got other bytes")
        return cls(index, key)


@dataclass(frozen=True, slots=True)
class Welcome:
    """What the accepting end answers on a stream's first connection.

    Attributes:
        connections: of the stream, this one included.
        checked: frames have checksums.
        key: with which the further ones say that they belong to it.
    """

    connections: int
    checked: bool
    key: bytes

    def send(self, connection: socket.socket) -> None:
        """Raises OSError if the connection is broken."""
        _send(connection, _WELCOME.pack(WELCOME_MAGIC, self.connections, self.checked, self.key))

    @classmethod
    def receive(cls, connection: socket.socket) -> Welcome:
        """Raises OSError if the peer is no server, or says nothing within the socket's timeout."""
        said = _receive(connection, _WELCOME.size)
        magic, count, checked, key = _WELCOME.unpack(said or bytes(_WELCOME.size))
        if magic != WELCOME_MAGIC or not 1 <= count <= 2 * MOST_CONNECTIONS:
            raise OSError("what listens there is no parameter server's port for tensors")
        return cls(count, checked, key)


def _send(connection: socket.socket, said: bytes) -> None:
    connection.sendall(said + _CHECKSUM.pack(crc32c(said)))


def _receive(connection: socket.socket, size: int) -> bytes:
    """What was said; b"" where its checksum is another."""
    got = b""
    while len(got) < size + _CHECKSUM.size:
        more = connection.recv(size + _CHECKSUM.size - len(got))
        if not more:
            raise OSError("the peer has closed the connection")
        got += more
        if got.startswith((tls.ALERT, tls.HELLO)):
            raise Untrusted(tls.ONE_SIDED)
    said, checksum = got[:size], got[size:]
    return said if checksum == _CHECKSUM.pack(crc32c(said)) else b""
