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

from pserver.errors import Unreachable, Untrusted
from pserver.limits import ANY_FIRST_FRAME, Limits
from pserver.security import tls
from pserver.security.certificates import Bearer
from pserver.security.keys import Keys
from pserver.transport.endpoint import reason_of, spell
from pserver.transport.frame_socket import FrameSocket
from pserver.transport.socket_stream import FRAME_BYTES, SocketStream, check_size
from pserver.transport.stream import Buffer, Handler, Land
from pserver.transport.tcp_greeting import Greeting, Welcome
from pserver.transport.tcp_listener import TcpListener
from pserver.wire_pb2 import Frame

LINGER_SECONDS = 1.0  # for a peer that is told why, and still sends


class TcpStream(SocketStream):
    """One end of a stream over TCP.

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
        super().__init__(peer, accepting, bearer, first_bytes)
        self._sockets = list(sockets)
        ways = [self._sockets] * 2 if bearer is None else [self._sockets[0::2], self._sockets[1::2]]
        self._in, self._out = map(itertools.cycle, ways if accepting else reversed(ways))

    def _write(self, header: Frame, head: bytes, payload: Sequence[Buffer]) -> None:
        size = sum(memoryview(buffer).nbytes for buffer in payload)
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
