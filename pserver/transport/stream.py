"""The interface of a tensor stream, which every transport implements.

A transport is a module of this room with two functions::

    listen(handle, host, port)                 -> Listener
    connect(host, port, *, timeout_seconds, keys)    -> Stream

``listen`` calls ``handle(stream)`` in a thread of its own for each stream that a client opens.
Both ends see the same :class:`Stream`.  A frame is a header (a ``wire_pb2.Frame`` without its
payload) and a payload: the sender gives a list of buffers, the receiver gets one buffer.

[Note: who owns a payload]  ``send`` may keep references to the buffers until the peer has received
them; the caller leaves them unchanged until the peer has answered the step that they belong to.
The buffer that ``receive`` returns is valid until the next ``receive``.

[Note: landing]  A transport that reads from the kernel asks ``land`` where a payload goes before
it reads it, and returns ``LANDED`` in its place.  What has landed is not whole if the stream breaks
meanwhile: it is sent again.  A transport that has the payload in memory already does not ask.

[Note: offered memory]  A transport between processes of one host may have an ``offer``: the
accepting end shows the connecting end a segment in which the tensors of one kind of frame lie.
Payloads of such frames are then copied once.  Gradients: the connecting end copies them there, and
``receive`` returns them where they are already, so that :func:`pserver.transport.codec.scatter`
checks them and copies nothing.  Values: the connecting end copies them from there, to where they
land, or has ``MISSED`` them.

[Note: how a stream ends]  ::

    connecting end   OPEN --close--> receives until None --> released
                       `----cancel, or the connection breaks--> released; receive raises
    accepting end    OPEN --its handler returns, everything sent has left--> both sides ended
                       `----its handler raises, or cancel--> broken

A peer that vanished is ``Unreachable`` where a transport can tell, otherwise ``None``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from pserver.security.certificates import Bearer
from pserver.wire_pb2 import Frame, Kind

if TYPE_CHECKING:
    from pserver.transport.segment import Segment

Buffer = memoryview | bytes | bytearray

LANDED: Final = memoryview(b"")
"""In place of a payload that was read to where it belongs."""

MISSED: Final = memoryview(b"")
"""In place of a payload that changed while it was read where it is: it is to be asked for again."""

Land = Callable[[Frame, int], list[memoryview] | None]
"""``land(header, size)`` says where a frame's payload of ``size`` bytes goes: writable buffers,
one behind another, of that size together; None: nowhere in particular.  It raises nothing."""

Offer = Callable[[Kind, "Segment"], None]
"""``offer(kind, segment)``, at the accepting end; raises ``Unreachable``."""


class Stream(Protocol):
    """One end of an ordered two-way sequence of frames.

    Any thread may send, one frame at a time; one thread receives.

    Attributes:
        transport: its name: "tcp", "grpc", "shm", "inprocess".
        peer: the other end, for messages: "127.0.0.1:6174".
        bearer: who the other end has proved to be, by its certificate; None without TLS.
    """

    transport: str
    peer: str
    bearer: Bearer | None

    @property
    def offer(self) -> Offer | None:
        """Offers memory; None: this transport has no such thing.  See [Note: offered memory]."""

    def send(self, header: Frame, payload: Sequence[Buffer] = ()) -> None:
        """Sends one frame.  See [Note: who owns a payload].

        Args:
            header: with a kind and an empty payload field.
            payload: buffers that follow the header, one behind another.

        Raises:
            Unreachable: the peer is gone.
        """

    def receive(self, land: Land | None = None) -> tuple[Frame, memoryview] | None:
        """The next frame, or None after the peer has closed its side.

        Args:
            land: where its payload may go; see [Note: landing].

        Raises:
            Unreachable: the connection broke, or ``cancel`` was called.
            CorruptFrame: the bytes that came are not a frame.
        """

    def admit(self) -> None:
        """The peer has said who it is: from here on its frames may be as large as frames are.

        The accepting end calls it, once.
        """

    def close(self) -> None:
        """Ends this side after everything sent has left.  Harmless when called twice.

        See [Note: how a stream ends].
        """

    def cancel(self) -> None:
        """Breaks the stream from any thread: a blocked ``send`` or ``receive`` raises
        ``Unreachable``.
        """


class Listener(Protocol):
    """The accepting end of a transport.

    Attributes:
        port: the one that it is bound to.
    """

    port: int

    def close(self, grace_seconds: float) -> None:
        """Stops accepting, gives open streams ``grace_seconds`` to end, then cancels them."""


Handler = Callable[[Stream], None]
