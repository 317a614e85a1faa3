"""Streams between threads of one process, for tests.  Their semantics are those of the transports
that cross a network.

A "port" is a number in a table of this module.  ``send`` copies payloads, as a network does.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from threading import Lock, Thread

from pserver.errors import Unreachable
from pserver.security.bearer import Bearer
from pserver.security.keys import Keys
from pserver.transport.endpoint import spell
from pserver.transport.frames import parse_header
from pserver.transport.stream import Buffer, Handler, Land, OpenStreams, Pipe
from pserver.wire_pb2 import Frame

_lock = Lock()  # guards the two below
_listeners: dict[int, InprocessListener] = {}
_ports = itertools.count(1_000_000)  # no TCP port, so that a mix-up shows


class InprocessStream:
    """One end of a pair of pipes.

    The accepting end's ``close`` ends both directions, as the end of an RPC does.
    """

    transport = "inprocess"
    bearer: Bearer | None = None  # nothing leaves the host
    offer = None

    def __init__(self, peer: str, incoming: Pipe, outgoing: Pipe, accepting: bool) -> None:
        self.peer = peer
        self._in, self._out, self._accepting = incoming, outgoing, accepting

    def send(self, header: Frame, payload: Sequence[Buffer] = ()) -> None:
        """See :class:`pserver.transport.stream.Stream`."""
        assert not header.payload, "a frame's payload travels beside its header"
        self._out.put(header.SerializeToString(), b"".join(payload))

    def receive(self, land: Land | None = None) -> tuple[Frame, memoryview] | None:
        """See :class:`pserver.transport.stream.Stream`."""
        item = self._in.get()
        if item is None:
            return None
        head, payload = item
        return parse_header(head), memoryview(payload)

    def admit(self) -> None:
        """See :class:`pserver.transport.stream.Stream`."""

    def close(self) -> None:
        """See :class:`pserver.transport.stream.Stream`."""
        self._out.close()
        if self._accepting:
            self._in.break_(f"{self.peer}: the peer has ended the stream")

    def cancel(self) -> None:
        """See :class:`pserver.transport.stream.Stream`."""
        for pipe in (self._in, self._out):
            pipe.break_(f"{self.peer}: the stream was cancelled")


class InprocessListener:
    """The accepting end.  Any thread may call it.

    Attributes:
        port: its number in the table of this module.
    """

    def __init__(self, handle: Handler, host: str) -> None:
        self.host = host
        self._streams = OpenStreams(handle)
        with _lock:
            self.port = next(_ports)
            _listeners[self.port] = self

    def accept(self) -> InprocessStream:
        """A new stream's client end; the other end goes to the handler, in a thread of its own."""
        here = spell(self.host, self.port)
        up, down = Pipe(), Pipe()
        stream = InprocessStream(here, up, down, accepting=True)
        Thread(
            target=self._streams.run, args=(stream,), name=f"exchange {here}", daemon=True
        ).start()
        return InprocessStream(here, down, up, accepting=False)

    def close(self, grace_seconds: float) -> None:
        """See :class:`pserver.transport.stream.Listener`."""
        with _lock:
            _listeners.pop(self.port, None)
        self._streams.close(grace_seconds)


def listen(handle: Handler, host: str = "127.0.0.1", port: int = 0) -> InprocessListener:
    """Accepts streams; the port is always a new one.

    Raises:
        ValueError: the caller asks for a certain port.
    """
    if port:
        raise ValueError(
            f"port: expected 0, because ports in one process are numbers of its own, got {port}"
        )
    return InprocessListener(handle, host)


def connect(
    host: str, port: int, *, timeout_seconds: float, keys: Keys | None = None
) -> InprocessStream:
    """Opens a stream.

    Args:
        keys: ignored: nothing leaves the process.

    Raises:
        Unreachable: nothing listens there.
    """
    with _lock:
        listener = _listeners.get(port)
    if listener is None:
        raise Unreachable(
            f"no answer at {spell(host, port)} within {timeout_seconds:g} s: nothing in this "
            "process listens there"
        )
    return listener.accept()
