"""The one interface that carries an exchange's frames, whatever runs below it.

A transport is a module in ``transports/`` with two functions::

    listen(handle, host, port)                  -> Listener   calls handle(stream) in a thread for each stream that a client opens
    connect(host, port, *, timeout_seconds)    -> Stream

Both ends see the same :class:`Stream`.  A frame is a header (a ``wire_pb2.Frame`` without its
payload) and a payload: a list of buffers to send, one contiguous buffer received.

[Note: who owns a payload]  ``send`` may keep references to the buffers until the peer has received
them; the caller leaves them unchanged until the peer has answered the step that they belong to.
What ``receive`` returns is valid until the next ``receive``.

[Note: how a stream ends]  The connecting end closes its side and goes on receiving until ``None``;
then, or after ``cancel``, its connection is released.  The accepting end's stream ends, both ways,
when its handler returns, after everything sent has left.  A handler that raises breaks it.  A peer
that vanished is ``Unreachable`` where a transport can tell, otherwise ``None``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from pserver.wire_pb2 import Frame

Buffer = memoryview | bytes | bytearray


class Stream(Protocol):
    """One ordered two-way sequence of frames.

    Any thread may send, a frame at a time; one thread receives.
    """

    transport: str  # "inprocess", "grpc", "flight"
    peer: str  # for messages: "127.0.0.1:6174"

    def send(self, header: Frame, payload: Sequence[Buffer] = ()) -> None:
        """Sends one frame: ``header`` has a kind and an empty payload field, ``payload``'s buffers
        follow it, one behind another.

        Raises:
            Unreachable: the peer is gone.
        """

    def receive(self) -> tuple[Frame, memoryview] | None:
        """The next frame, or None after the peer has closed its side.

        Raises:
            Unreachable: the connection broke, or ``cancel`` was called.
            CorruptFrame: what came is not a frame.
        """

    def close(self) -> None:
        """Ends this side after everything sent has left; harmless when called twice.

        See [Note: how a stream ends].
        """

    def cancel(self) -> None:
        """Breaks the stream from any thread: a blocked ``send`` or ``receive`` raises
        ``Unreachable``.
        """


class Listener(Protocol):
    """The accepting end of a transport."""

    port: int

    def close(self, grace_seconds: float) -> None:
        """Stops accepting, gives open streams this long to end, then cancels them."""


Handler = Callable[[Stream], None]
