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
``receive`` returns them where they are already, so that :func:`pserver.transport.frames.scatter`
checks them and copies nothing.  Values: the connecting end copies them from there, to where they
land, or has ``MISSED`` them.

[Note: how a stream ends]  ::

    connecting end   OPEN --close--> receives until None --> released
                       `----cancel, or the connection breaks--> released; receive raises
    accepting end    OPEN --its handler returns, everything sent has left--> both sides ended
                       `----its handler raises, or cancel--> broken

A peer that vanished is ``Unreachable`` where a transport can detect it, otherwise ``None``.

[Note: a loss shows]  A transport delivers frames in order, or breaks; this layer does not trust
that.  Both ends number the frames that they send.  The receiving end ignores a number that it has
seen.  A gap in the numbers breaks the stream, and the connecting end sends its request again
(:mod:`pserver.client.stream`).  A lost last frame leaves no gap.  A waiting trainer therefore
sends PROBE, which the server answers with PROBE; the next frame that arrives reveals the gap.  A
frame that is slow arrives before the PROBE behind it, so slowness is never taken for a loss.
"""

from __future__ import annotations

import logging
import select
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Condition, Event, Lock, RLock, Thread
from typing import TYPE_CHECKING, Final, Protocol

from pserver.config import split_endpoint
from pserver.errors import CorruptFrame, PServerError, Unreachable, from_wire
from pserver.half_open import HalfOpen, address_of
from pserver.limits import Limits
from pserver.security.access import Access
from pserver.security.bearer import Bearer
from pserver.security.tokens import ProofRequest
from pserver.telemetry.logs import LimitedLog
from pserver.transport.endpoint import spell
from pserver.transport.memory import ByteCounters
from pserver.wire_pb2 import Frame, Hello, Kind

if TYPE_CHECKING:
    from pserver.transport.memory import ZoneMemory


# ---- stream ----


Buffer = memoryview | bytes | bytearray


def bytes_of(payload: Sequence[Buffer]) -> int:
    """The bytes of a payload that is sent."""
    return sum([memoryview(buffer).nbytes for buffer in payload])  # a generator takes twice as long


LANDED: Final = memoryview(b"")
"""In place of a payload that was read to where it belongs."""

MISSED: Final = memoryview(b"")
"""In place of a payload that changed while it was read where it is: it is to be asked for again."""

Land = Callable[[Frame, int], list[memoryview] | None]
"""``land(header, size)`` says where a frame's payload of ``size`` bytes goes: writable buffers,
one behind another, of that size together; None: nowhere in particular.  It raises nothing."""

Offer = Callable[[Kind, "ZoneMemory"], None]
"""``offer(kind, segment)``, at the accepting end; raises ``Unreachable``."""


class Stream(Protocol):
    """One end of an ordered two-way sequence of frames.

    Any thread may send, one frame at a time; one thread receives.

    Attributes:
        transport: its name: "tcp", "grpc", "shm", "inprocess".
        peer: the other end, for messages: "127.0.0.1:6174".
        bearer: of the other end's certificate; None without TLS.
    """

    transport: str
    peer: str
    bearer: Bearer | None

    @property
    def offer(self) -> Offer | None:
        """Offers memory; None: this transport cannot.  See [Note: offered memory]."""

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
        """Admits the peer, which has identified itself: its frames may have the full size from now
        on.

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


# ---- open streams ----
#
# The open streams of an accepting end, so that it can end them all.


_log = logging.getLogger(__name__)
CANCEL_SECONDS = 2.0  # for a handler to notice that its stream is cancelled


class OpenStreams:
    """Runs a handler for each stream and keeps a list of running ones.  Any thread may call it.

    Args:
        handle: called with each stream, in the thread that calls :meth:`run`.
    """

    def __init__(self, handle: Handler) -> None:
        self._handle = handle
        # guards the two below; neither handlers nor cancel run under it
        self._condition = Condition()
        self._open: set[Stream] = set()
        self._closing = False
        self._log = LimitedLog(_log)

    def run(self, stream: Stream) -> None:
        """Runs the handler to its end, in this thread; logs what it raises, and breaks the stream.

        After :meth:`close` it only breaks the stream.
        """
        with self._condition:
            refused = self._closing
            if not refused:
                self._open.add(stream)
        if refused:
            stream.cancel()
            return
        try:
            self._handle(stream)
        except PServerError as error:
            text = f"the stream from {stream.peer} ended: {error}"
            self._log.log(type(error).__name__, text, logging.INFO)
            stream.cancel()
        except Exception as error:
            text = f"the handler of the stream from {stream.peer} failed"
            self._log.log("bug", text, logging.ERROR, error)
            stream.cancel()
        finally:
            stream.close()
            with self._condition:
                self._open.discard(stream)
                self._condition.notify_all()

    def close(self, grace_seconds: float) -> None:
        """Refuses new streams, waits ``grace_seconds`` for the open ones, then cancels them and
        waits ``CANCEL_SECONDS`` more.
        """
        with self._condition:
            self._closing = True
            self._wait_until_empty(grace_seconds)
            late = list(self._open)
        for stream in late:
            stream.cancel()
        with self._condition:
            if not self._wait_until_empty(CANCEL_SECONDS if late else 0):
                _log.error(
                    "handlers still running after cancel: %s",
                    ", ".join(stream.peer for stream in self._open),
                )

    def _wait_until_empty(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        return self._condition.wait_for(lambda: not self._open, deadline - time.monotonic())


# ---- accept loop ----
#
# A listening socket, a thread that accepts on it, and a thread for each connection.


RETRY_SECONDS = 0.1
SWEEP_SECONDS = 0.5  # between two looks for connections whose greeting is late
BACKLOG = 1024  # connections that the kernel keeps until they are accepted


class AcceptLoop:
    """Serves each connection in a thread of its own.

    Args:
        listening: a socket that listens.
        greet: gives the stream of a connection, which it takes over; None where the connection is a
            further one of another stream.  It raises OSError where the peer is not a trainer.
        streams: runs the handler of each stream.
        name: of the port, for threads and messages: "shm 4711".
        limits: how many connections there may be.
    """

    def __init__(
        self,
        listening: socket.socket,
        greet: Callable[[socket.socket], Stream | None],
        streams: OpenStreams,
        name: str,
        limits: Limits,
    ) -> None:
        self._socket, self._greet, self._streams, self._name = listening, greet, streams, name
        self._limits = limits
        self._greeting = HalfOpen(limits.strangers, limits.hello_seconds)
        self._refusals = LimitedLog(_log)
        self._closing = Event()
        self._counting = Lock()  # guards the one below
        self._open = 0  # connections with a thread
        listening.listen(BACKLOG)
        listening.setblocking(False)
        self._thread = Thread(target=self._accept, name=f"accepts {name}", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        waiting = select.poll()  # select itself takes no descriptor above 1024
        waiting.register(self._socket, select.POLLIN)
        while not self._closing.is_set():
            self._greeting.end_late()
            try:
                waiting.poll(1000 * SWEEP_SECONDS)
                connection, _ = self._socket.accept()
            except BlockingIOError:
                continue
            except OSError as error:
                if self._closing.wait(RETRY_SECONDS):
                    return
                # out of descriptors; one may become free
                self._refusals.log("accept", f"{self._name}: cannot accept a stream: {error}")
                continue
            connection.setblocking(True)
            if not self._begin(connection):
                connection.close()

    def _begin(self, connection: socket.socket) -> bool:
        """Serves a connection in a thread, unless there are too many."""
        most = self._limits.connections
        with self._counting:
            full = self._open >= most
            self._open += not full
        if full:
            what = f"expected at most {most} connections (--max-connections)"
            self._refusals.log("full", f"{self._name}: {what}")
            return False
        thread = Thread(
            target=self._serve, args=(connection,), name=f"exchange {self._name}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # the system has no more threads
            with self._counting:
                self._open -= 1
            self._refusals.log("thread", f"{self._name}: no thread for a connection: {error}")
            return False
        return True

    def _serve(self, connection: socket.socket) -> None:
        try:
            stream = self._greeted(connection)
            if stream is not None:
                self._streams.run(stream)
        except OSError as error:
            self._refusals.log("greeting", f"{self._name}: no stream: {error}")
            connection.close()
        finally:
            with self._counting:
                self._open -= 1

    def _greeted(self, connection: socket.socket) -> Stream | None:
        # of its own, as it may be ended when the connection is already a stream's
        with connection.dup() as handle:

            def end() -> None:
                with suppress(OSError):
                    handle.shutdown(socket.SHUT_RDWR)

            number = self._greeting.begin(_address(connection), end)
            try:
                return self._greet(connection)
            finally:
                self._greeting.over(number)

    def close(self) -> None:
        """Accepts nothing from now on."""
        self._closing.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # close alone would leave select waiting
        self._thread.join(CANCEL_SECONDS)
        self._socket.close()


def _address(connection: socket.socket) -> str:
    """The peer's, without its port; on a unix socket its process."""
    with suppress(OSError):
        if connection.family != socket.AF_UNIX:
            return address_of(spell(*connection.getpeername()[:2]))
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return f"process {struct.unpack('3i', peer)[0]}"
    return ""


# ---- greeting ----
#
# The first frames of a stream, at the connecting end: HELLO, and before it the server's proof.


def greet(stream: Stream, hello: Hello, access: Access, endpoint: str, timeout: float) -> None:
    """Says HELLO on a new stream.

    With a key the server proves first that it has it too: until then it receives only a random
    number, and the key's role.

    Args:
        hello: session, lane and number of the stream.
        access: what is proved, and asked of the server.
        endpoint: the server's control endpoint.
        timeout: for the server's answer, in seconds; the stream breaks then.

    Raises:
        NotAllowed: it is not a server of this job, or does not take this key.
        Unreachable: it does not answer.
    """
    try:
        if access.secret is not None:
            _, port = split_endpoint(endpoint)
            question = ProofRequest(access.secret, port, f"the stream to {endpoint}")
            with _broken_after(timeout, stream):
                asked = Hello(nonce=question.nonce, role=question.role)
                stream.send(Frame(kind=Kind.HELLO, hello=asked))
                answer = _answer(stream, endpoint)
            question.answered(answer.nonce, answer.proof)
            hello.proof = question.hello_code(
                hello.session, hello.trainer_id, hello.lane, hello.stream, hello.tables
            )
        stream.send(Frame(kind=Kind.HELLO, hello=hello))
    except PServerError:
        stream.cancel()
        raise


def _answer(stream: Stream, endpoint: str) -> Hello:
    received = stream.receive()
    if received is None:
        raise Unreachable(f"{endpoint}: the stream ended before the server's HELLO")
    header, _ = received
    if header.kind == Kind.FAILURE:
        raise from_wire(header.failure.error, f"{endpoint}: {header.failure.message}")
    return header.hello  # empty in any other frame: no proof


@contextmanager
def _broken_after(timeout: float, stream: Stream) -> Iterator[None]:
    """Breaks the stream where the block takes longer: nothing else ends a wait for a frame."""
    timer = threading.Timer(timeout, stream.cancel)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# ---- pipe ----
#
# A bounded queue between two threads, which any thread can break.


LIMIT_BYTES = 2**23
LIMIT_ITEMS = 256


class Pipe:
    """One direction of a stream: messages of bytes in order, then an end (``close``) or a break
    (``break_``).

    ``put`` blocks while ``LIMIT_BYTES`` or ``LIMIT_ITEMS`` are waiting, ``get`` while nothing is.
    Neither has a timeout: the owner of the stream breaks it when the peer is lost.
    """

    def __init__(self) -> None:
        self._condition = Condition()  # guards everything below; nothing blocks under it
        self._items: deque[tuple[bytes, ...]] = deque()
        self._bytes = 0
        self._closed = False
        self._broken = ""  # why; "" while whole

    def put(self, *item: bytes) -> None:
        """Adds one message, given as one or more buffers.

        Raises:
            Unreachable: the pipe is broken, or closed.
        """
        with self._condition:
            self._condition.wait_for(self._may_put)
            if self._broken or self._closed:
                raise Unreachable(self._broken or "this side of the stream is closed")
            self._items.append(item)
            self._bytes += sum(map(len, item))
            self._condition.notify_all()

    def get(self) -> tuple[bytes, ...] | None:
        """The next message, or None after the last.

        Raises:
            Unreachable: the pipe is broken.  The messages in it are lost.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._items or self._closed or self._broken)
            if self._broken:
                raise Unreachable(self._broken)
            if not self._items:
                return None
            item = self._items.popleft()
            self._bytes -= sum(map(len, item))
            self._condition.notify_all()
            return item

    def drain(self) -> Iterator[bytes]:
        """All messages until the end or the break, each as one run of bytes."""
        while True:
            try:
                item = self.get()
            except Unreachable:
                return
            if item is None:
                return
            yield item[0] if len(item) == 1 else b"".join(item)

    def close(self) -> None:
        """Ends the pipe; the messages in it still arrive."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def break_(self, reason: str) -> None:
        """Makes every blocked or later ``put`` and ``get`` raise ``Unreachable(reason)``; the first
        reason stays.
        """
        with self._condition:
            self._broken = self._broken or reason
            self._condition.notify_all()

    def _may_put(self) -> bool:
        room = self._bytes < LIMIT_BYTES and len(self._items) < LIMIT_ITEMS
        return room or self._closed or bool(self._broken)


# ---- sequenced ----
#
# A stream whose frames are numbered in both directions: the receiving end notices a missing frame
# and a repeated one.


class SequencedStream:
    """A :class:`~pserver.transport.stream.Stream` over another, with numbered frames.

    Any thread may send, one thread receives.  Frames of a peer that does not number them
    (``sequence`` 0) pass unchanged.

    Args:
        stream: the one below.
        traffic: counts the bytes of its frames by name; None: they are not counted.

    Attributes:
        sent, received: the number of the last frame in each direction.
    """

    def __init__(self, stream: Stream, traffic: ByteCounters | None = None) -> None:
        self.transport, self.peer, self.bearer = stream.transport, stream.peer, stream.bearer
        self.offer = stream.offer
        self.sent = 0
        self.received = 0
        self._stream = stream
        self._traffic = traffic or ByteCounters()
        # held while a frame is sent, so that frames leave in the order of their numbers; ``cancel``
        # does not take it
        self._sending = threading.Lock()

    def send(self, header: Frame, payload: Sequence[Buffer] = ()) -> None:
        """See :class:`pserver.transport.stream.Stream`.

        Writes the number into ``header``, which may be sent again elsewhere.
        """
        with self._sending:
            self.sent += 1
            header.sequence = self.sent
            self._stream.send(header, payload)
        self._traffic.sent(header)

    def send_if_free(self, header: Frame) -> bool:
        """Sends a frame without payload, unless another thread is sending one.

        Returns:
            Whether it was sent.

        Raises:
            Unreachable: the peer is gone.
        """
        if not self._sending.acquire(blocking=False):
            return False
        try:
            self.sent += 1
            header.sequence = self.sent
            self._stream.send(header)
            return True
        finally:
            self._sending.release()

    def receive(self, land: Land | None = None) -> tuple[Frame, memoryview] | None:
        """See :class:`pserver.transport.stream.Stream`.

        Raises:
            Unreachable: also where a frame is missing.
        """
        while (received := self._stream.receive(self._landing(land))) is not None:
            number, expected = received[0].sequence, self.received + 1
            if number == 0 or number == expected:
                self.received = number or self.received
                self._traffic.received(received[0])
                return received
            if number > expected:
                raise Unreachable(
                    f"{self.peer}: expected frame {expected} of the stream, got frame {number}"
                )
        return None

    def _landing(self, land: Land | None) -> Land | None:
        """Likewise, for the frame that is expected: a repeated one lands nowhere."""
        if land is None:
            return None
        return lambda header, size: (
            land(header, size) if header.sequence in (0, self.received + 1) else None
        )

    def admit(self) -> None:
        """See :class:`pserver.transport.stream.Stream`."""
        self._stream.admit()

    def close(self) -> None:
        """See :class:`pserver.transport.stream.Stream`."""
        self._stream.close()

    def cancel(self) -> None:
        """See :class:`pserver.transport.stream.Stream`."""
        self._stream.cancel()


# ---- socket stream ----
#
# What streams over sockets share: one frame at a time in each direction, and how they end.
#
# What a frame is on its way is the transport's own.


FRAME_BYTES = 2**26  # the largest header, and the largest payload, that is accepted


class SocketStream(ABC):
    """One end of a stream over sockets; a :class:`pserver.transport.stream.Stream` but for
    ``offer``.

    The accepting end's ``close`` ends both directions, as the end of an RPC does.

    Args:
        peer: the other end, for messages.
        accepting: this is the accepting end.
        bearer: of the other end's certificate, under TLS.
        first_bytes: of a frame's header and payload, until the peer is admitted.
    """

    def __init__(self, peer: str, accepting: bool, bearer: Bearer | None, first_bytes: int) -> None:
        self.peer = peer
        self.bearer = bearer
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

    # ---- the transport's methods; all but _shut_down under the lock of its direction ----

    @abstractmethod
    def _write(self, header: Frame, head: bytes, payload: Sequence[Buffer]) -> None:
        """Sends a frame whose serialised header is ``head``; OSError: the connection broke."""

    @abstractmethod
    def _read(self, land: Land | None) -> tuple[Frame, memoryview] | None:
        """The next frame, None at the peer's end; OSError: the connection broke."""

    @abstractmethod
    def _write_end(self) -> None:
        """Tells the peer that this side has ended."""

    @abstractmethod
    def _linger(self) -> None:
        """Lets the peer read the last frames after the end of the accepting side."""

    @abstractmethod
    def _shut_down(self) -> None:
        """Breaks the connections, so that no thread waits for them any more."""

    @abstractmethod
    def _release(self) -> None:
        """Closes the open connections.  No thread sends or receives."""

    # ---- a stream ----

    def send(self, header: Frame, payload: Sequence[Buffer] = ()) -> None:
        """See :class:`pserver.transport.stream.Stream`.

        Raises:
            ValueError: the frame has more than 64 MB.
        """
        assert header.kind and not header.payload, (
            "a frame has a kind, and its payload travels beside its header"
        )
        head = header.SerializeToString()
        with self._sending:
            if self._closed or self._cancelled:
                raise Unreachable(
                    f"{self.peer}: the stream {'was cancelled' if self._cancelled else 'is closed'}"
                )
            try:
                self._write(header, head, payload)
            except OSError as error:
                raise self._broken(error) from error

    def receive(self, land: Land | None = None) -> tuple[Frame, memoryview] | None:
        """See :class:`pserver.transport.stream.Stream`."""
        with self._receiving:
            if self._ended and not self._cancelled:
                return None
            try:
                received = self._read(land)
            except OSError as error:
                self._hang_up()
                # raised without a local name: a reference cycle would keep shared memory alive
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
            self._write_end()
        if self._accepting:
            with self._receiving:
                self._linger()
            self._hang_up()

    def cancel(self) -> None:
        """See :class:`pserver.transport.stream.Stream`."""
        self._cancelled = True
        self._hang_up()

    def _hang_up(self) -> None:
        """Breaks the connections, and closes them when no thread waits for them any more.

        The peer can still read what was sent.
        """
        with self._state:
            self._closed = True
        self._shut_down()
        with self._receiving, self._sending:
            self._release()

    def _broken(self, error: Exception) -> Unreachable:
        return Unreachable(
            f"{self.peer}: the stream {'was cancelled' if self._cancelled else f'broke: {error}'}"
        )


def check_size(head: bytes, size: int) -> None:
    """Raises ValueError if a frame with ``size`` bytes of payload is too large to be accepted."""
    if max(len(head), size) > FRAME_BYTES:
        raise ValueError(
            f"expected a frame of at most {FRAME_BYTES} bytes, got {len(head)} of header, {size} "
            "of payload"
        )
