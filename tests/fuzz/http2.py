"""As much of HTTP/2 as an attacker needs: a call whose message never ends."""

from __future__ import annotations

import select
import socket
import struct
import time

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, WINDOW_UPDATE = 0, 1, 4, 8
END_HEADERS, ACK = 4, 1
WINDOW = 65535  # that a stream and a connection begin with
MOST = 2**14  # bytes of a frame
INITIAL_WINDOW_SIZE = 4  # a setting


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """A frame's bytes."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def greeting() -> bytes:
    """What a client says first."""
    return PREFACE + frame(SETTINGS, 0, 0, b"")


def headers(path: str) -> bytes:
    """The headers of a gRPC call, none of them compressed."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "x",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    texts = [text.encode() for pair in fields.items() for text in pair]
    sized = [bytes([len(text)]) + text for text in texts]
    return b"".join(b"\0" * (index % 2 == 0) + text for index, text in enumerate(sized))


class UnfinishedCall:
    """A call that says how long its message is, and sends a part of it.

    Args:
        address: of the server.
        path: ``/SERVICE/METHOD``.
        size: of the message, in bytes.
        timeout_seconds: of each of its steps.
    """

    def __init__(
        self, address: tuple[str, int], path: str, size: int, timeout_seconds: float
    ) -> None:
        self._seconds = timeout_seconds
        self.connection = socket.create_connection(address, timeout_seconds)
        self._windows = {0: WINDOW, 1: WINDOW}  # by stream; 0 is the connection
        self._received = b""
        self.connection.sendall(greeting() + frame(HEADERS, END_HEADERS, 1, headers(path)))
        self._sent = self._send(struct.pack(">BI", 0, size))

    def send(self, size: int) -> int:
        """Sends so many bytes of it, or as many as the server takes in time.

        Returns:
            How many it has taken.
        """
        deadline, sent = time.monotonic() + self._seconds, 0
        while sent < size and time.monotonic() < deadline:
            room = min(size - sent, MOST, *self._windows.values())
            sent += self._send(bytes(room)) if room > 0 else 0
            self._read(0.0 if room > 0 else 0.05)
        return sent

    def _send(self, data: bytes) -> int:
        self.connection.sendall(frame(DATA, 0, 1, data))
        for stream in self._windows:
            self._windows[stream] -= len(data)
        return len(data)

    def _read(self, seconds: float) -> None:
        """Takes what the server has said so far.

        Raises:
            OSError: it has ended the connection.
        """
        if not select.select([self.connection], [], [], seconds)[0]:
            return
        data = self.connection.recv(2**16)
        if not data:
            raise ConnectionResetError("the server has ended it")
        self._received += data
        while len(self._received) >= 9:
            size = int.from_bytes(self._received[:3], "big")
            if len(self._received) < 9 + size:
                return
            kind, flags, stream = struct.unpack(">BBI", self._received[3:9])
            self._heed(kind, flags, stream, self._received[9 : 9 + size])
            self._received = self._received[9 + size :]

    def _heed(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == WINDOW_UPDATE and stream in self._windows:
            self._windows[stream] += struct.unpack(">I", payload)[0]
        if kind == SETTINGS and not flags & ACK:
            for at in range(0, len(payload), 6):
                name, value = struct.unpack(">HI", payload[at : at + 6])
                if name == INITIAL_WINDOW_SIZE:
                    self._windows[1] += value - WINDOW
            self.connection.sendall(frame(SETTINGS, ACK, 0, b""))

    def close(self) -> None:
        """Ends it."""
        self.connection.close()
