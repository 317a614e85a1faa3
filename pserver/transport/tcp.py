"""Plain TCP on a port of its own: the default between hosts.

A stream has one or more connections.  Its frames are dealt to them in turn, in both directions, so
that the receiving end knows where the next one comes: their order stays.  More than one pays where
a link is faster than what one connection gets of it.

::

    connecting end                                 accepting end
    MAGIC, index 0          ---------------------> the first connection of a stream
                            <--------------------- WELCOME, how many, checked or not, a key
    MAGIC, index, key       ---------------------> each further one
    frames                  <--------------------> frames: see "frame socket" below

[Note: one way under TLS]  Python's ssl can't send on a connection while another thread receives on
it.  So there, frames to the server take the connections of even indices, and frames to the trainer
the others: each stream has at least two.

[Note: what was said last arrives]  A server that refuses sends the reason, and ends the stream,
while the trainer still sends.  The kernel resets a connection that is closed with unread bytes, and
drops what was sent last.  So the accepting end ends its own direction first, and reads on, for a
short time.

[Note: bytes land once]  A payload leaves from the tensors' memory (``sendmsg``) and is read into
the memory where it belongs (``recv_into``): the kernel's copy is the only one at either end.
Lengths are checked before memory is taken, and with checksums the header is checked before anything
lands at the place that it names.
"""

from __future__ import annotations

import ipaddress
import itertools
import secrets
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Condition

from crc32c import crc32c

from pserver.config import MOST_CONNECTIONS
from pserver.errors import CorruptFrame, Unreachable, Untrusted
from pserver.limits import ANY_FIRST_FRAME, Limits
from pserver.security import keys as tls
from pserver.security.bearer import ROLES, Bearer
from pserver.security.keys import Keys
from pserver.security.tls_connection import TlsConnection
from pserver.transport.checksums import FRAME_CHECKSUM, checksum, compare
from pserver.transport.endpoint import listening_socket, reason_of, spell
from pserver.transport.frames import HEADER_BYTES, parse_header, spread
from pserver.transport.stream import (
    FRAME_BYTES,
    LANDED,
    AcceptLoop,
    Buffer,
    Handler,
    Land,
    OpenStreams,
    SocketStream,
    Stream,
    bytes_of,
    check_size,
)
from pserver.wire_pb2 import Frame

# ---- frame socket ----
#
# One TCP connection on which frames travel, in both directions.
#
# ::
#
#   frame     prefix | header | payload
#   checked   prefix | of the prefix | of the header | header | payload | of the payload
#   prefix    bytes of the header: uint32, bytes of the payload: uint64
#   end       a prefix of zeros: nothing more comes in this direction
#
# With checksums each is an XXH3 as uint64: see checksums.py.  All numbers are little-endian.


PREFIX = struct.Struct("<IQ")
CHECKED_PREFIX = struct.Struct("<IQQQ")
BUFFER_BYTES = 2**15  # read at once, where it is not known yet what comes
GATHERED_BYTES = 2**14  # up to here joining the buffers costs less than listing them
LANDING_BYTES = 2**15  # from this size on a payload is read to its destination
FEW = 8  # places under TLS; to more than that a copy is faster than as many reads
MOST_BUFFERS = 512  # of one call; the kernel takes 1,024


Connection = socket.socket | TlsConnection


def below(connection: Connection) -> socket.socket:
    """The socket itself."""
    return connection.below if isinstance(connection, TlsConnection) else connection


class FrameSocket:
    """Reads and writes frames.  One thread at a time sends, and one receives.

    Args:
        connection: a connected TCP socket, or TLS over one, whose owner this becomes.
        checked: frames have checksums.
    """

    def __init__(self, connection: Connection, checked: bool) -> None:
        self._below = below(connection)
        self._below.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # TLS hands out at most a record at once, and to one place
        self._tls = connection if isinstance(connection, TlsConnection) else None
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
            sums = checksum([prefix]), checksum([header])
            head = CHECKED_PREFIX.pack(len(header), size, *sums) + header
            if size:
                buffers.append(memoryview(FRAME_CHECKSUM.pack(checksum(buffers))))
        else:
            head = PREFIX.pack(len(header), size) + header
        if size <= GATHERED_BYTES:
            buffers = [memoryview(b"".join((head, *buffers)))]
        else:
            buffers = [memoryview(head), *[each for each in buffers if each.nbytes]]
        if self._tls is not None:
            self._tls.send_all(buffers)
        elif len(buffers) == 1:
            self._below.sendall(buffers[0])
        else:
            self._send_all(buffers)

    def send_end(self) -> None:
        """Ends this direction."""
        self.send(b"", (), 0)

    def _send_all(self, buffers: list[memoryview]) -> None:
        first = 0
        while first < len(buffers):
            sent = self._below.sendmsg(buffers[first : first + MOST_BUFFERS])
            first = _behind(buffers, first, sent)

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
            compare("a header", checksum([head]), header_sum)
        header = parse_header(head)
        if size == 0:
            return header, memoryview(b"")
        targets = land(header, size) if land is not None and size >= LANDING_BYTES else None
        direct = targets is not None and (self._tls is None or len(targets) <= FEW)
        places = targets if direct and targets is not None else [self._blank(size)]
        self._read(places)
        if self._checked:
            (expected,) = FRAME_CHECKSUM.unpack(self._take(FRAME_CHECKSUM.size))
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
            compare("a prefix", checksum([taken[: PREFIX.size]]), prefix_sum)
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
                room = self._buffer[self._end :]
                self._end += self._got((self._tls or self._below).recv_into(room))
        taken = self._buffer[self._begin : self._begin + size]
        self._begin += size
        return taken

    def _read(self, targets: Sequence[memoryview]) -> None:
        """Fills the targets with the next bytes."""
        left, first = list(targets), 0
        while first < len(left) and self._begin < self._end:
            have = min(self._end - self._begin, left[first].nbytes)
            left[first][:have] = self._buffer[self._begin : self._begin + have]
            self._begin += have
            first = _behind(left, first, have)
        if self._tls is not None:
            for each in left[first:]:
                self._tls.fill(each)
            return
        while first < len(left):
            if first + 1 < len(left):
                some = left[first : first + MOST_BUFFERS]
                got = self._below.recvmsg_into(some, 0, socket.MSG_WAITALL)[0]
            else:
                got = self._below.recv_into(left[first], flags=socket.MSG_WAITALL)
            first = _behind(left, first, self._got(got))

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
        """Ends this direction, and drops what the peer still sends, until it has ended too: a
        connection that is closed with bytes unread takes back what was sent last.

        Args:
            deadline: of time.monotonic().
        """
        with suppress(OSError):
            self._below.shutdown(socket.SHUT_WR)
            while (left := deadline - time.monotonic()) > 0:
                self._below.settimeout(left)
                if not self._below.recv_into(self._buffer):
                    return

    def shut_down(self) -> None:
        """Breaks the connection: a blocked ``send`` or ``receive`` ends at once."""
        with suppress(OSError):  # closed, or the peer was faster
            self._below.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connection; no thread uses it any more."""
        self._below.close()


def _behind(buffers: list[memoryview], first: int, size: int) -> int:
    """The first buffer behind so many bytes; what is left of one takes its place in the list."""
    while first < len(buffers) and size >= buffers[first].nbytes:
        size -= buffers[first].nbytes
        first += 1
    if size:
        buffers[first] = buffers[first][size:]
    return first


# ---- tcp greeting ----
#
# What the two ends of a TCP stream say before its first frame: always with a checksum, as here the
# further ones are agreed on.


KEY_BYTES = 16
GREETING_MAGIC, WELCOME_MAGIC = b"pstcp\0\0\2", b"psyes\0\0\2"  # the last byte is the version
_GREETING = struct.Struct(f"<8sI{KEY_BYTES}s")
_WELCOME = struct.Struct(f"<8sI?{KEY_BYTES}s")
_CHECKSUM = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Greeting:
    """The connecting end's greeting on each connection.

    Attributes:
        index: of the connection in its stream.
        key: of the stream, from the Welcome on its first connection, where it has none.
    """

    index: int = 0
    key: bytes = bytes(KEY_BYTES)

    def send(self, connection: Connection) -> None:
        """Raises OSError if the connection is broken."""
        _send(connection, _GREETING.pack(GREETING_MAGIC, self.index, self.key))

    @classmethod
    def receive(cls, connection: Connection) -> Greeting:
        """Raises OSError if the peer is not a trainer, or sends nothing within the socket's
        timeout.
        """
        said = _receive(connection, _GREETING.size)
        magic, index, key = _GREETING.unpack(said or bytes(_GREETING.size))
        if magic != GREETING_MAGIC or index >= 2 * MOST_CONNECTIONS:
            raise OSError("expected a trainer's greeting, got other bytes")
        return cls(index, key)


@dataclass(frozen=True, slots=True)
class Welcome:
    """The accepting end's answer on a stream's first connection.

    Attributes:
        connections: of the stream, this one included.
        checked: frames have checksums.
        key: with which further ones show that they belong to it.
    """

    connections: int
    checked: bool
    key: bytes

    def send(self, connection: Connection) -> None:
        """Raises OSError if the connection is broken."""
        _send(connection, _WELCOME.pack(WELCOME_MAGIC, self.connections, self.checked, self.key))

    @classmethod
    def receive(cls, connection: Connection) -> Welcome:
        """Raises OSError if the peer is not a server, or sends nothing within the socket's
        timeout.
        """
        said = _receive(connection, _WELCOME.size)
        magic, count, checked, key = _WELCOME.unpack(said or bytes(_WELCOME.size))
        if magic != WELCOME_MAGIC or not 1 <= count <= 2 * MOST_CONNECTIONS:
            raise OSError("what listens there is no parameter server's port for tensors")
        return cls(count, checked, key)


def _send(connection: Connection, said: bytes) -> None:
    connection.sendall(said + _CHECKSUM.pack(crc32c(said)))


def _receive(connection: Connection, size: int) -> bytes:
    """The message; b"" where its checksum is another."""
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


# ---- tcp listener ----
#
# The accepting end of TCP streams: it gathers the connections of each.


GREETING_SECONDS = 5.0  # for a peer to say what it is, and to open its further connections
KEEPALIVE_SECONDS = 60  # until the kernel asks a silent peer whether it is still there

MakeStream = Callable[[str, list[FrameSocket], Bearer | None], Stream]


class TcpListener:
    """A listening socket.

    Args:
        handle: called with each stream, in a thread of its own.
        make: makes a stream of its peer's name, its connections, and the opener's bearer, under
            TLS.
        host, port: where; port 0 is any free one.
        connections: of each stream.
        checksum: "on", "off", or "auto": on but for peers of this host, and under TLS.
        keys: the server's; None: without TLS.
        limits: how many connections there may be.

    Attributes:
        port: the one that it is bound to.

    Raises:
        OSError: it cannot listen there; one sentence.
    """

    def __init__(
        self,
        handle: Handler,
        make: MakeStream,
        host: str,
        port: int,
        connections: int,
        checksum: str,
        limits: Limits,
        keys: Keys | None = None,
    ) -> None:
        self._make, self._checksum, self._keys = make, checksum, keys
        self._connections = connections if keys is None else 2 * connections
        self._streams = OpenStreams(handle)
        self._gathering = Condition()  # guards the one below
        # by a stream's key: its further connections, by index
        self._further: dict[bytes, dict[int, Connection]] = {}
        listening = listening_socket(host, port)
        self.port: int = listening.getsockname()[1]
        self._accepting = AcceptLoop(
            listening, self._greet, self._streams, f"tcp {self.port}", limits
        )

    def _greet(self, connection: socket.socket) -> Stream | None:
        """The stream of a first connection; None for a further one.

        Raises:
            OSError: the peer is not a trainer.
        """
        peer = spell(*connection.getpeername()[:2])
        connection.settimeout(GREETING_SECONDS)
        secured: Connection = connection
        bearer = None
        try:
            if self._keys is not None:
                secured, bearer = tls.accept(connection, self._keys, *ROLES)
            greeting = Greeting.receive(secured)
            if greeting.index:
                self._add(greeting, secured)
                return None
            return self._welcomed(secured, peer, bearer)
        except Untrusted as error:
            raise OSError(str(error)) from error

    def _add(self, greeting: Greeting, connection: Connection) -> None:
        """Adds a further connection; the thread of the first one waits for it."""
        with self._gathering:
            if greeting.key not in self._further:
                raise OSError("a further connection of no stream")
            self._further[greeting.key].setdefault(greeting.index, connection)
            self._gathering.notify_all()

    def _welcomed(self, connection: Connection, peer: str, bearer: Bearer | None) -> Stream:
        """Makes a stream, when all of its connections are open.

        Raises:
            OSError: they are not opened in time.
        """
        plain = bearer is None and not _is_local(peer)
        checked = self._checksum == "on" or (self._checksum == "auto" and plain)
        key, further = secrets.token_bytes(KEY_BYTES), dict[int, Connection]()
        with self._gathering:
            self._further[key] = further
        try:
            Welcome(self._connections, checked, key).send(connection)
            deadline = time.monotonic() + GREETING_SECONDS
            with self._gathering:
                self._gathering.wait_for(
                    lambda: len(further) == self._connections - 1, deadline - time.monotonic()
                )
        finally:
            with self._gathering:
                del self._further[key]
        if sorted(further) != list(range(1, self._connections)):
            for each in further.values():
                each.close()
            count = 1 + len(further)
            raise OSError(f"{peer} has opened {count} of {self._connections} connections")
        connections = [connection, *(further[index] for index in sorted(further))]
        for each in connections:
            each.settimeout(None)
            below(each).setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            below(each).setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS)
        return self._make(peer, [FrameSocket(each, checked) for each in connections], bearer)

    def close(self, grace_seconds: float) -> None:
        """See :class:`pserver.transport.stream.Listener`."""
        self._accepting.close()
        self._streams.close(grace_seconds)


def _is_local(peer: str) -> bool:
    return ipaddress.ip_address(peer.rpartition(":")[0].strip("[]").partition("%")[0]).is_loopback


# ---- tcp ----


LINGER_SECONDS = 1.0  # for a peer that receives the reason, and still sends


class TcpStream(SocketStream):
    """One end of a stream over TCP.

    Args:
        peer: the other end, for messages.
        sockets: in the order of their indices.
        accepting: this is the accepting end.
        bearer: of the other end's certificate, under TLS; see [Note: one way under TLS].
        first_bytes: of a frame's header and payload, until the peer is admitted.
    """

    transport = "tcp"
    offer = None

    def __init__(
        self,
        peer: str,
        sockets: Sequence[FrameSocket],
        accepting: bool,
        bearer: Bearer | None = None,
        first_bytes: int = FRAME_BYTES,
    ) -> None:
        super().__init__(peer, accepting, bearer, first_bytes)
        self._sockets = list(sockets)
        ways = [self._sockets] * 2 if bearer is None else [self._sockets[0::2], self._sockets[1::2]]
        self._in, self._out = map(itertools.cycle, ways if accepting else reversed(ways))

    def _write(self, header: Frame, head: bytes, payload: Sequence[Buffer]) -> None:
        size = bytes_of(payload)
        check_size(head, size)
        next(self._out).send(head, payload, size)

    def _read(self, land: Land | None) -> tuple[Frame, memoryview] | None:
        return next(self._in).receive(land, self._most)

    def _write_end(self) -> None:
        next(self._out).send_end()

    def _linger(self) -> None:
        """See [Note: what was said last arrives]."""
        deadline = time.monotonic() + LINGER_SECONDS
        for each in self._sockets:
            each.drain(deadline)

    def _shut_down(self) -> None:
        for each in self._sockets:
            each.shut_down()

    def _release(self) -> None:
        for each in self._sockets:
            each.close()


def listen(
    handle: Handler,
    host: str = "127.0.0.1",
    port: int = 0,
    connections: int = 1,
    checksum: str = "auto",
    keys: Keys | None = None,
    limits: Limits = ANY_FIRST_FRAME,
) -> TcpListener:
    """Accepts streams.

    Args:
        connections: of each stream.
        checksum: "on", "off", or "auto": on but for peers of this host, and under TLS.
        keys: the server's; None: without TLS.
        limits: how many connections there may be.

    Raises:
        OSError: it cannot listen there; one sentence.
    """

    def accepted(peer: str, sockets: list[FrameSocket], bearer: Bearer | None) -> TcpStream:
        return TcpStream(peer, sockets, True, bearer, limits.hello_bytes)

    return TcpListener(handle, accepted, host, port, connections, checksum, limits, keys)


def connect(host: str, port: int, *, timeout_seconds: float, keys: Keys | None = None) -> TcpStream:
    """Opens a stream, on connections of its own.

    Args:
        keys: this process's; None: without TLS.

    Raises:
        Unreachable: no server answered within ``timeout_seconds``.
        Untrusted: the process there is not a server of ours; or only one end has keys.
    """
    deadline = time.monotonic() + timeout_seconds
    opened: list[Connection] = []

    def dial(greeting: Greeting) -> Connection:
        left = max(deadline - time.monotonic(), 0.001)
        connection = socket.create_connection((host, port), left)
        opened.append(connection)
        if keys is not None:
            opened[-1] = tls.dial(connection, keys, host)
        greeting.send(opened[-1])
        return opened[-1]

    try:
        welcome = Welcome.receive(dial(Greeting()))
        for index in range(1, welcome.connections):
            dial(Greeting(index, welcome.key))
    except Untrusted as error:
        _close(opened)
        raise Untrusted(f"{spell(host, port)}: {error}") from error
    except ssl.SSLError as error:  # its word on our certificate comes after the handshake
        _close(opened)
        raise Untrusted(f"{spell(host, port)}: {tls.reason_of(error)}") from error
    except OSError as error:
        _close(opened)
        if opened:
            tls.check_plain(host, port, keys)
        reason = reason_of(error, timeout_seconds)
        raise Unreachable(
            f"no answer at {spell(host, port)} within {timeout_seconds:g} s: {reason}"
        ) from error
    for each in opened:
        each.settimeout(None)
    sockets = [FrameSocket(each, welcome.checked) for each in opened]
    first = opened[0]
    bearer = tls.bearer_of(first.tls) if isinstance(first, TlsConnection) else None
    return TcpStream(spell(host, port), sockets, False, bearer)


def _close(connections: Sequence[Connection]) -> None:
    for each in connections:
        each.close()
