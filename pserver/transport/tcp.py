"""Plain TCP on a port of its own: the default between hosts.

A stream has one or more connections.  Its frames are dealt to them in turn, in both directions, so
that the receiving end knows where the next one comes: their order stays.  More than one pays where
a link is faster than what one connection gets of it.

::

    connecting end                                 accepting end
    MAGIC, index 0          ---------------------> the first connection of a stream
                            <--------------------- WELCOME, how many, checked or not, a key
    MAGIC, index, key       ---------------------> each further one
    frames                  <--------------------> frames: see frame_socket.py

[Note: one way under TLS]  Python's ssl can't send on a connection while another thread receives on
it.  So there, frames to the server take the connections of even indices, and frames to the trainer
the others: each stream has at least two.

[Note: what was said last arrives]  A server that refuses says why, and ends the stream, while the
trainer still sends.  The kernel resets a connection that is closed with unread bytes, and drops
what was sent last.  So the accepting end ends its own direction first, and reads on, for a short
time.
"""

from __future__ import annotations

import itertools
import socket
import ssl
import time
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock, RLock

from pserver.errors import CorruptFrame, Unreachable, Untrusted
from pserver.limits import ANY_FIRST_FRAME, Limits
from pserver.security import tls
from pserver.security.certificates import Bearer
from pserver.security.keys import Keys
from pserver.transport.endpoint import reason_of, spell
from pserver.transport.frame_socket import FRAME_BYTES, FrameSocket
from pserver.transport.stream import Buffer, Handler, Land
from pserver.transport.tcp_greeting import Greeting, Welcome
from pserver.transport.tcp_listener import TcpListener
from pserver.wire_pb2 import Frame

LINGER_SECONDS = 1.0  # for a peer that is told why, and still sends


class TcpStream:
    """One end of a stream over TCP.

    The accepting end's ``close`` ends both directions, as the end of an RPC does.

    Args:
        peer: the other end, for messages.
        sockets: in the order of their indices.
        accepting: this is the accepting end.
        bearer: who the other end is, under TLS; see [Note: one way under TLS].
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
        self.peer = peer
        self.bearer = bearer
        self._sockets = list(sockets)
        ways = [self._sockets] * 2 if bearer is None else [self._sockets[0::2], self._sockets[1::2]]
        self._in, self._out = map(itertools.cycle, ways if accepting else reversed(ways))
        self._accepting = accepting
        self._most = first_bytes  # of the next frame's header, and of its payload
        # held while a frame is sent.  A broken stream releases it at once
        self._sending = RLock()
        # held while a frame is received.  Taken before _sending, never after
        self._receiving = RLock()
        self._state = Lock()  # guards the two below; nothing blocks under it
        self._cancelled = False
        self._closed = False  # nothing is sent any more
        self._ended = False  # the peer has closed its side

    def send(self, header: Frame, payload: Sequence[Buffer] = ()) -> None:
        """See :class:`pserver.transport.stream.Stream`.

        Raises:
            ValueError: the frame has more than 64 MB.
        """
        assert header.kind and not header.payload, (
            "a frame has a kind, and its payload travels beside its header"
        )
        head = header.SerializeToString()
        size = sum(memoryview(buffer).nbytes for buffer in payload)
        if max(len(head), size) > FRAME_BYTES:
            raise ValueError(
                f"expected a frame of at most {FRAME_BYTES} bytes, got {len(head)} of header, "
                f"{size} of payload"
            )
        with self._sending:
            if self._closed or self._cancelled:
                raise Unreachable(
                    f"{self.peer}: the stream {'was cancelled' if self._cancelled else 'is closed'}"
                )
            try:
                next(self._out).send(head, payload, size)
            except OSError as error:
                raise self._broken(error) from error

    def receive(self, land: Land | None = None) -> tuple[Frame, memoryview] | None:
        """See :class:`pserver.transport.stream.Stream`."""
        with self._receiving:
            if self._ended and not self._cancelled:
                return None
            try:
                received = next(self._in).receive(land, self._most)
            except OSError as error:
                self._hang_up()
                raise self._broken(error) from error
            except CorruptFrame as error:  # where the next frame begins is not known any more
                self._ended = True
                raise CorruptFrame(f"{self.peer}: {error}") from error
            if received is None:
                self._ended = True
                if not self._accepting:
                    self._hang_up()
            return received

    def admit(self) -> None:
        """See :class:`pserver.transport.stream.Stream`."""
        self._most = FRAME_BYTES

    def close(self) -> None:
        """See :class:`pserver.transport.stream.Stream`."""
        with self._state:
            if self._closed:
                return
            self._closed = True
        with self._sending, suppress(OSError):  # the peer has ended the stream first
            next(self._out).send_end()
        if self._accepting:
            self._linger()
            self._hang_up()

    def _linger(self) -> None:
        """See [Note: what was said last arrives]."""
        deadline = time.monotonic() + LINGER_SECONDS
        with self._receiving:
            for each in self._sockets:
                each.drain(deadline)

    def cancel(self) -> None:
        """See :class:`pserver.transport.stream.Stream`."""
        self._cancelled = True
        self._hang_up()

    def _hang_up(self) -> None:
        """Breaks the connections, and closes them when no thread waits for them any more."""
        with self._state:
            self._closed = True
        for each in self._sockets:
            each.shut_down()
        with self._receiving, self._sending:
            for each in self._sockets:
                each.close()

    def _broken(self, error: Exception) -> Unreachable:
        return Unreachable(
            f"{self.peer}: the stream {'was cancelled' if self._cancelled else f'broke: {error}'}"
        )


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
        Untrusted: what listens there is no server of ours; or only one end has keys.
    """
    deadline = time.monotonic() + timeout_seconds
    opened: list[socket.socket] = []

    def dial(greeting: Greeting) -> socket.socket:
        left = max(deadline - time.monotonic(), 0.001)
        opened.append(socket.create_connection((host, port), left))
        if keys is not None:
            opened[-1] = tls.dial(opened[-1], keys, host)
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
    bearer = None if keys is None else tls.bearer_of(opened[0])
    return TcpStream(spell(host, port), sockets, False, bearer)


def _close(connections: Sequence[socket.socket]) -> None:
    for each in connections:
        each.close()
