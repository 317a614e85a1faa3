"""Shared memory between processes of one host: payloads in a segment that both ends map, everything
else over unix sockets.

::

    sender      copies a payload into the next slot, then sends the header over the socket
    receiver    reads the header, returns a view of the slot; frees the slot when it is asked for
                the next frame

A stream has two sockets, one for each direction: frames go down a socket and free slots come back
on it, so that a thread that sends and a thread that receives never read each other's messages.
Every wait is a wait for a socket in the kernel: the sender's for a free slot, the receiver's for a
frame.  A peer that dies closes its sockets, which ends every wait at once.  A payload too small for
a slot to pay travels behind its header.

[Note: finding each other]  The listener's "port" is a random number, which is part of the name of
its socket in the abstract namespace: it is no file, and ends with the process.  That namespace is
as wide as the network namespace, so a trainer on another host, or in a container with a network of
its own, finds no listener there and takes the next transport.
"""

from __future__ import annotations

import os
import secrets
import socket
import stat
import struct
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from threading import Lock, RLock

from pserver.errors import CorruptFrame, Unreachable
from pserver.limits import ANY_FIRST_FRAME, Limits
from pserver.security.certificates import Bearer
from pserver.security.keys import Keys
from pserver.transport import shm_ring
from pserver.transport.accept_loop import AcceptLoop
from pserver.transport.codec import HEADER_BYTES, copy_bytes, parse_header
from pserver.transport.endpoint import spell
from pserver.transport.open_streams import OpenStreams
from pserver.transport.shm_ring import SLOT_BYTES, BufferReader, Ring
from pserver.transport.stream import Buffer, Handler, Land
from pserver.wire_pb2 import Frame

GREETING = b"pserver shm 1"  # sent with the segment and the socket of the other direction
WELCOME = b"ok"
GREETING_SECONDS = 5.0
# before a frame: how its payload travels, bytes of header, bytes of payload
PRELUDE = struct.Struct("<BIQ")
END, INLINE, IN_SLOTS = 0, 1, 2
FILLED = b"+"  # one more slot of the same payload
FREE = b"-"  # one for each slot that has been read
MAX_FREED = 2**10  # free slots read from the socket at once: a direction has fewer
INLINE_BYTES = 2**14  # up to here two copies by the kernel cost less than a slot
FRAME_BYTES = 2**26  # the largest payload that is accepted
_PEER = struct.Struct("3i")  # struct ucred: process, user, group
MAX_PORT = 2**32 - 1  # of JoinReply.data_port


Direction = tuple[socket.socket, Ring]


class ShmStream:
    """One end of a stream over shared memory.

    The accepting end's ``close`` ends both directions, as the end of an RPC does.

    Args:
        first_bytes: of a frame's header and payload, until the peer is admitted.
    """

    transport = "shm"
    bearer: Bearer | None = None  # nothing leaves the host

    def __init__(
        self,
        peer: str,
        outgoing: Direction,
        incoming: Direction,
        accepting: bool,
        first_bytes: int = FRAME_BYTES,
    ) -> None:
        self.peer = peer
        self._out, self._filling = outgoing
        self._in, self._reading = incoming
        self._file = self._in.makefile("rb", 2**16)
        self._accepting = accepting
        self._most = first_bytes  # of the next frame's header, and of its payload
        # held while a frame is sent; guards _out.  A broken stream releases it at once
        self._sending = RLock()
        # held while a frame is received; guards _in and _file.  Taken before _sending, never after
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
        buffers = [memoryview(buffer).cast("B") for buffer in payload]
        size = sum(buffer.nbytes for buffer in buffers)
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
                if size <= INLINE_BYTES:
                    self._out.sendall(
                        b"".join((PRELUDE.pack(INLINE, len(head), size), head, *buffers))
                    )
                else:
                    self._send_in_slots(
                        PRELUDE.pack(IN_SLOTS, len(head), size) + head, buffers, size
                    )
            except OSError as error:
                raise self._broken(error) from error

    def _send_in_slots(self, message: bytes, buffers: Sequence[memoryview], size: int) -> None:
        """Copies a payload into slots; ``message`` announces the first of them."""
        source = BufferReader(buffers)
        for filled in shm_ring.slots_of(size):
            while not self._filling.has_room(filled):
                freed = self._out.recv(MAX_FREED)
                if not freed or len(freed) > self._filling.used:
                    raise ConnectionError("the peer is gone")
                self._filling.free(len(freed))
            source.fill(self._filling.take(filled))
            self._out.sendall(message)
            message = FILLED

    def receive(self, land: Land | None = None) -> tuple[Frame, memoryview] | None:
        """See :class:`pserver.transport.stream.Stream`."""
        with self._receiving:
            if self._ended and not self._cancelled:
                return None
            try:
                self._free_slots()
                return self._frame()
            except OSError as error:
                self._hang_up()
                # raised without a local name: a reference cycle would keep the segment alive
                raise self._broken(error) from error

    def _free_slots(self) -> None:
        """Frees the slots that the last frame was read from."""
        if self._reading.used:
            # the peer has ended; what it sent can still be read
            with suppress(BrokenPipeError, ConnectionResetError):
                self._in.sendall(FREE * self._reading.used)
            self._reading.free(self._reading.used)

    def _frame(self) -> tuple[Frame, memoryview] | None:
        kind, head_size, size = PRELUDE.unpack(self._exactly(PRELUDE.size))
        if kind == END:
            self._ended = True
            if not self._accepting:
                self._hang_up()
            return None
        most = self._most
        if kind not in (INLINE, IN_SLOTS) or head_size > min(most, HEADER_BYTES) or size > most:
            raise CorruptFrame(
                f"{self.peer}: expected a frame, got kind {kind} of {head_size} and {size} bytes"
            )
        head = parse_header(self._exactly(head_size))
        if kind == INLINE:
            return head, memoryview(self._exactly(size))
        if size <= SLOT_BYTES:
            return head, self._reading.take(size).toreadonly()
        return head, self._joined(size)

    def _joined(self, size: int) -> memoryview:
        """A payload of several slots.  Each slot is freed as soon as it is read, so that a payload
        may be larger than all slots.
        """
        whole, position = memoryview(bytearray(size)), 0
        for filled in shm_ring.slots_of(size):
            if position and self._exactly(len(FILLED)) != FILLED:
                raise CorruptFrame(
                    f"{self.peer}: expected the next slot of a payload of {size} bytes"
                )
            copy_bytes(whole[position : position + filled], self._reading.take(filled))
            self._free_slots()
            position += filled
        return whole

    def _exactly(self, size: int) -> bytes:
        got = b"" if self._file.closed else self._file.read(size)
        if len(got) < size or self._cancelled:
            raise ConnectionError("the peer is gone")
        return got

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
            self._out.sendall(PRELUDE.pack(END, 0, 0))
        if self._accepting:
            self._hang_up()

    def cancel(self) -> None:
        """See :class:`pserver.transport.stream.Stream`."""
        self._cancelled = True
        self._hang_up()

    def _hang_up(self) -> None:
        """Shuts both sockets down, and closes each when no thread waits for it any more.

        The peer can still read what was sent.
        """
        with self._state:
            self._closed = True
        for end in (self._out, self._in):
            with suppress(OSError):  # closed, or the peer was faster
                end.shutdown(socket.SHUT_RDWR)
        with self._receiving:
            self._file.close()
            self._in.close()
            self._reading.release()
        with self._sending:
            self._out.close()
            self._filling.release()

    def _broken(self, error: Exception) -> Unreachable:
        return Unreachable(
            f"{self.peer}: the stream {'was cancelled' if self._cancelled else f'broke: {error}'}"
        )


class ShmListener:
    """A listening unix socket in the abstract namespace.

    Attributes:
        port: the number in the socket's name.
    """

    def __init__(self, handle: Handler, port: int, limits: Limits) -> None:
        os.close(shm_ring.make())  # raises where segments do not work, so that shm is not offered
        self.port = port or 1 + secrets.randbelow(MAX_PORT)
        self._streams = OpenStreams(handle)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.bind(_name(self.port))
            listening.listen()
        except OSError as error:
            listening.close()
            raise OSError(
                f"cannot listen on shared memory's number {self.port}: {error.strerror or error}"
            ) from error
        self._accepting = AcceptLoop(
            listening, partial(_greeted, limits), self._streams, f"shm {self.port}", limits
        )

    def close(self, grace_seconds: float) -> None:
        """See :class:`pserver.transport.stream.Listener`."""
        self._accepting.close()
        self._streams.close(grace_seconds)


def listen(
    handle: Handler,
    host: str = "127.0.0.1",
    port: int = 0,
    limits: Limits = ANY_FIRST_FRAME,
) -> ShmListener:
    """Accepts streams from this host.

    Args:
        host: ignored.
        port: the number in the socket's name; 0 is a random one.
        limits: how many connections there may be.

    Raises:
        OSError: this system has no such memory, or no room for it; one sentence.
    """
    return ShmListener(handle, port, limits)


def connect(host: str, port: int, *, timeout_seconds: float, keys: Keys | None = None) -> ShmStream:
    """Opens a stream.

    Args:
        keys: ignored: nothing leaves the host.

    Raises:
        Unreachable: no listener of that number is on this host, or one of the ends has no room for
            a segment.
    """
    here = spell(host, port)
    near, far = socket.socketpair()
    outgoing, segment = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), -1
    try:
        segment = shm_ring.make()
        ours, theirs = shm_ring.attach(segment)
        outgoing.settimeout(timeout_seconds)
        outgoing.connect(_name(port))
        _check_peer(outgoing)
        socket.send_fds(outgoing, [GREETING], [segment, far.fileno()])
        if outgoing.recv(len(WELCOME)) != WELCOME:
            raise OSError("the server could not take the segment")
        outgoing.settimeout(None)
    except OSError as error:
        for end in (near, outgoing):
            end.close()
        reason = error.strerror or error
        raise Unreachable(
            f"no shared memory with {here} within {timeout_seconds:g} s: {reason}"
        ) from error
    finally:
        far.close()
        if segment >= 0:
            os.close(segment)
    return ShmStream(here, (outgoing, Ring(ours)), (near, Ring(theirs)), accepting=False)


def _greeted(limits: Limits, connection: socket.socket) -> ShmStream:
    """The accepting end of a new connection.

    Raises:
        OSError: the peer is no client of ours, or its segment cannot be used.
    """
    connection.settimeout(GREETING_SECONDS)
    pid = _check_peer(connection)
    greeting, descriptors, _, _ = socket.recv_fds(
        connection, len(GREETING), 2, socket.MSG_CMSG_CLOEXEC
    )
    try:
        if (
            greeting != GREETING
            or len(descriptors) != 2
            or not stat.S_ISSOCK(os.fstat(descriptors[1]).st_mode)
        ):
            raise OSError(
                f"expected {GREETING!r} with a segment and a socket, got {greeting!r} with "
                f"{len(descriptors)}"
            )
        theirs, ours = shm_ring.attach(descriptors[0])
        back = socket.socket(fileno=os.dup(descriptors[1]))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    try:
        connection.sendall(WELCOME)
    except OSError:
        back.close()
        raise
    connection.settimeout(None)
    back.settimeout(None)
    return ShmStream(
        f"process {pid} of this host",
        (back, Ring(ours)),
        (connection, Ring(theirs)),
        True,
        limits.hello_bytes,
    )


def _check_peer(connection: socket.socket) -> int:
    """The process at the other end, which is this user's or root's: any process of the host can
    take the name of a socket, or connect to it.

    Raises:
        OSError: it is another user's.
    """
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    pid, user, _ = _PEER.unpack(credentials)
    if user not in (os.geteuid(), 0):
        raise OSError(f"expected a process of user {os.geteuid()}, got one of user {user}")
    return int(pid)


def _name(port: int) -> str:
    return f"\0pserver-{port}"
