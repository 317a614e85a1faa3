"""TLS over a connected socket, many records to a call of the system.

[Note: records]  TLS travels in records of 16 KB.  Python's own ``SSLSocket`` takes one call of the
system to send a record and two to receive one.  Here OpenSSL works in memory, and the socket is
read and written in larger pieces, with the same checks of the same context.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import cast

FIRST_BYTES = 2**14  # read at once from a peer of whom nothing is known yet
MOST_BYTES = 2**17  # read at once from one that sends so much
SENT_BYTES = 2**16  # sent at once: of larger pieces the processor's cache holds less


class TlsConnection:
    """A TLS connection, which the socket below belongs to.  One thread at a time uses it.

    The handshake is over when it is made.

    Args:
        connection: a connected socket, whose timeout counts for the whole handshake, and then for
            each call.  It stays open where the handshake fails.
        context: of the keys.
        host: that the server's certificate must name; None: this is the accepting end.

    Attributes:
        below: the socket.
        tls: of which version, with which certificate.

    Raises:
        ConnectionResetError: the peer ended the connection.
        SSLError: it is not to be trusted, or does not speak TLS.
        OSError: the connection broke.
    """

    def __init__(
        self, connection: socket.socket, context: ssl.SSLContext, host: str | None
    ) -> None:
        self.below = connection
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(
            self._arrived, self._leaving, server_side=host is None, server_hostname=host
        )
        self._room = memoryview(bytearray(FIRST_BYTES))
        timeout = connection.gettimeout()
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._has_shaken():
            if deadline is not None:
                connection.settimeout(max(deadline - time.monotonic(), 0.001))
            if not self._arrive():
                raise ConnectionResetError("the peer ended the connection in the handshake")
        connection.settimeout(timeout)

    def _has_shaken(self) -> bool:
        """Continues the handshake as far as what has arrived allows; whether it is over."""
        try:
            self.tls.do_handshake()
        except ssl.SSLWantReadError:
            self._leave()
            return False
        except ssl.SSLError:
            self._leave_if_possible()
            raise
        self._leave()
        return True

    # ---- as a socket ----

    def send_all(self, buffers: Sequence[memoryview]) -> None:
        """Sends buffers of bytes, one behind another.

        Raises:
            OSError: the connection broke.
        """
        write, leaving = self.tls.write, self._leaving
        for buffer in buffers:
            done, size = 0, buffer.nbytes
            while done < size:
                done += write(buffer[done:])  # a record
                if leaving.pending >= SENT_BYTES:
                    self._leave()
        self._leave()

    def sendall(self, data: bytes) -> None:
        """The same for one."""
        self.send_all([memoryview(data)])

    def recv_into(self, room: memoryview) -> int:
        """Receives up to a record into ``room``; how many bytes, 0: the peer has ended.

        Raises:
            OSError: the connection broke, or what came was changed on the way.
        """
        while True:
            try:
                # into a buffer it gives their number, which typeshed does not know
                return cast(int, self.tls.read(room.nbytes, room))
            except ssl.SSLZeroReturnError:
                return 0
            except ssl.SSLWantReadError:
                self._leave()  # where the peer has asked for an answer
                if not self._arrive():
                    return 0
            except ssl.SSLError:
                self._leave_if_possible()
                raise

    def fill(self, room: memoryview) -> None:
        """Receives as many bytes as ``room`` has.

        Raises:
            ConnectionError: the peer has ended.
            OSError: as :meth:`recv_into`.
        """
        read, done, size = self.tls.read, 0, room.nbytes
        while done < size:
            try:  # what has arrived already, with as little as possible for each record
                while done < size and (got := cast(int, read(size - done, room[done:]))):
                    done += got
            except ssl.SSLWantReadError:
                pass
            if done < size:
                got = self.recv_into(room[done:])
                if not got:
                    raise ConnectionError("the peer is gone")
                done += got

    def recv(self, size: int) -> bytes:
        """Receives up to a record of at most ``size`` bytes; b"": the peer has ended."""
        room = bytearray(size)
        return bytes(room[: self.recv_into(memoryview(room))])

    def settimeout(self, seconds: float | None) -> None:
        """Bounds each call from now on."""
        self.below.settimeout(seconds)

    def close(self) -> None:
        """Closes the socket."""
        self.below.close()

    # ---- what travels ----

    def _arrive(self) -> bool:
        """Waits for some bytes; False: there are no more."""
        count = self.below.recv_into(self._room)
        self._arrived.write(self._room[:count])
        if count == self._room.nbytes < MOST_BYTES:
            self._room = memoryview(bytearray(2 * count))
        return count > 0

    def _leave(self) -> None:
        """Sends what OpenSSL has for the peer."""
        if self._leaving.pending:
            self.below.sendall(self._leaving.read())

    def _leave_if_possible(self) -> None:
        """The same after a failure, of which it tells the peer."""
        with suppress(OSError):
            self._leave()
