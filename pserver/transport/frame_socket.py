"""One TCP connection on which frames travel, in both directions.

::

    frame     prefix | header | payload
    checked   prefix | of the prefix | of the header | header | payload | of the payload
    prefix    bytes of the header: uint32, bytes of the payload: uint64
    end       a prefix of zeros: nothing more comes in this direction

With checksums each is a CRC32C as uint32: see checksums.py.  All numbers are little-endian.

[Note: bytes land once]  A payload leaves from the tensors' memory (``sendmsg``) and is read into
the memory where it belongs (``recv_into``): the kernel's copy is the only one at either end.
Lengths are checked before memory is taken, and with checksums the header is checked before anything
lands where it says.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Sequence
from contextlib import suppress

from crc32c import crc32c

from pserver.errors import CorruptFrame
from pserver.transport.checksums import CHECKSUM, checksum, compare
from pserver.transport.codec import HEADER_BYTES, parse_header, spread
from pserver.transport.socket_stream import FRAME_BYTES
from pserver.transport.stream import LANDED, Buffer, Land
from pserver.wire_pb2 import Frame

PREFIX = struct.Struct("<IQ")
CHECKED_PREFIX = struct.Struct("<IQII")
BUFFER_BYTES = 2**15  # read at once, where it is not known yet what comes
GATHERED_BYTES = 2**14  # up to here joining the buffers costs less than listing them
LANDING_BYTES = 2**15  # from here on a payload is read to where it goes
FEW = 8  # places; to more than that a copy is faster than as many calls of the kernel
MOST_BUFFERS = 512  # of one call; the kernel takes 1,024


class FrameSocket:
    """Reads and writes frames.  One thread at a time sends, and one receives.

    Args:
        connection: a connected TCP socket, whose owner this becomes.
        checked: frames have checksums.
    """

    def __init__(self, connection: socket.socket, checked: bool) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        # TLS has no flags, and hands out at most a record at once
        self._flags = 0 if isinstance(connection, ssl.SSLSocket) else socket.MSG_WAITALL
        self._checked = checked
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._begin = self._end = 0  # of what was read into the buffer and not taken yet
        self._memory = memoryview(b"")  # of payloads that land nowhere

    # ---- sending ----

    def send(self, header: bytes, payload: Sequence[Buffer], size: int) -> None:
        """Sends one frame; ``size`` is the payload's bytes.

        Raises:
            OSError: the connection is broken.
        """
        buffers = [memoryview(buffer).cast("B") for buffer in payload]
        if self._checked:
            prefix = PREFIX.pack(len(header), size)
            head = CHECKED_PREFIX.pack(len(header), size, crc32c(prefix), crc32c(header)) + header
            if size:
                buffers.append(memoryview(CHECKSUM.pack(checksum(buffers))))
        else:
            head = PREFIX.pack(len(header), size) + header
        if size <= GATHERED_BYTES:
            self._socket.sendall(b"".join((head, *buffers)))
        else:
            self._send_all([memoryview(head), *(each for each in buffers if each.nbytes)])

    def send_end(self) -> None:
        """Says that nothing more comes in this direction."""
        self.send(b"", (), 0)

    def _send_all(self, buffers: list[memoryview]) -> None:
        if isinstance(self._socket, ssl.SSLSocket):  # it has no sendmsg
            for buffer in buffers:
                self._socket.sendall(buffer)
            return
        first = 0
        while first < len(buffers):
            sent = self._socket.sendmsg(buffers[first : first + MOST_BUFFERS])
            while first < len(buffers) and sent >= buffers[first].nbytes:
                sent -= buffers[first].nbytes
                first += 1
            if sent:
                buffers[first] = buffers[first][sent:]

    # ---- receiving ----

    def receive(
        self, land: Land | None, most: int = FRAME_BYTES
    ) -> tuple[Frame, memoryview] | None:
        """The next frame, or None at the end.  See :class:`pserver.transport.stream.Stream`.

        Args:
            most: bytes of its header, and of its payload.

        Raises:
            OSError: the connection is broken.
            CorruptFrame: the bytes that came are not a frame.
        """
        header_size, size, header_sum = self._prefix(most)
        if header_size == 0:
            return None
        head = bytes(self._take(header_size))
        if self._checked:
            compare("a header", crc32c(head), header_sum)
        header = parse_header(head)
        if size == 0:
            return header, memoryview(b"")
        targets = land(header, size) if land is not None and size >= LANDING_BYTES else None
        direct = targets is not None and len(targets) <= FEW
        places = targets if direct and targets is not None else [self._blank(size)]
        self._read(places)
        if self._checked:
            (expected,) = CHECKSUM.unpack(self._take(CHECKSUM.size))
            compare("a payload", checksum(places), expected)
        if targets is None:
            return header, places[0]
        if not direct:
            spread(places[0], targets)
        return header, LANDED

    def _prefix(self, most: int) -> tuple[int, int, int]:
        """The bytes of the header and of the payload, and the header's checksum, if any."""
        header_sum = 0
        if self._checked:
            taken = self._take(CHECKED_PREFIX.size)
            header_size, size, prefix_sum, header_sum = CHECKED_PREFIX.unpack(taken)
            compare("a prefix", crc32c(taken[: PREFIX.size]), prefix_sum)
        else:
            header_size, size = PREFIX.unpack(self._take(PREFIX.size))
        largest = min(most, HEADER_BYTES)
        if header_size > largest or size > most or (size and not header_size):
            raise CorruptFrame(
                f"expected a header of 1 to {largest} and a payload of up to {most} bytes, got "
                f"{header_size} and {size}"
            )
        return header_size, size, header_sum

    def _take(self, size: int) -> memoryview:
        """The next bytes, in memory that is theirs until the next call."""
        if size > BUFFER_BYTES:
            whole = memoryview(bytearray(size))
            self._read([whole])
            return whole
        if self._end - self._begin < size:
            left = self._end - self._begin
            self._buffer[:left] = self._buffer[self._begin : self._end]
            self._begin, self._end = 0, left
            while self._end < size:
                self._end += self._got(self._socket.recv_into(self._buffer[self._end :]))
        taken = self._buffer[self._begin : self._begin + size]
        self._begin += size
        return taken

    def _read(self, targets: Sequence[memoryview]) -> None:
        """Fills the targets with the next bytes."""
        for target in targets:
            have = min(self._end - self._begin, target.nbytes)
            if have:
                target[:have] = self._buffer[self._begin : self._begin + have]
                self._begin += have
            while have < target.nbytes:
                have += self._got(self._socket.recv_into(target[have:], flags=self._flags))

    def _blank(self, size: int) -> memoryview:
        """Memory for a payload, until the next one comes."""
        if self._memory.nbytes < size:
            self._memory = memoryview(bytearray(size))
        return self._memory[:size]

    def _got(self, size: int) -> int:
        if not size:
            raise ConnectionError("the peer is gone")
        return size

    # ---- the end ----

    def drain(self, deadline: float) -> None:
        """Says that nothing more is sent, and drops what the peer still sends, until it has ended
        too: a connection that is closed with bytes unread takes back what was sent last.

        Args:
            deadline: of time.monotonic().
        """
        with suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_WR)
            while (left := deadline - time.monotonic()) > 0:
                self._socket.settimeout(left)
                if not self._socket.recv_into(self._buffer):
                    return

    def shut_down(self) -> None:
        """Breaks the connection: a blocked ``send`` or ``receive`` ends at once."""
        with suppress(OSError):  # closed, or the peer was faster
            # the connection's own, not TLS's, which takes its state away from whoever waits there
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Gives the connection back; no thread uses it any more."""
        self._socket.close()
