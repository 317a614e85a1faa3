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
a slot to pay travels behind its header.  Where the accepting end has offered a segment, large
payloads are copied once, to where they belong: see zones.py.

[Note: finding each other]  The listener's "port" is a random number, which is part of the name of
its socket in the abstract namespace: it is no file, and ends with the process.  That namespace is
as wide as the network namespace, so a trainer on another host, or in a container with a network of
its own, finds no listener there and takes the next transport.
"""

from __future__ import annotations

import array
import logging
import os
import secrets
import socket
import stat
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial

from pserver.errors import CorruptFrame, Unreachable
from pserver.limits import ANY_FIRST_FRAME, Limits
from pserver.security.keys import Keys
from pserver.transport import memory as memory_file
from pserver.transport.endpoint import spell
from pserver.transport.frames import HEADER_BYTES, copy_bytes, parse_header
from pserver.transport.memory import PeerSegment, ZoneMemory
from pserver.transport.stream import (
    FRAME_BYTES,
    AcceptLoop,
    Buffer,
    Handler,
    Land,
    OpenStreams,
    SocketStream,
    check_size,
)
from pserver.transport.zones import FilledZones, OfferedZones, ReadZones, UnmappedZones, Zones
from pserver.wire_pb2 import Frame, Kind

# ---- shm reader ----
#
# Reads what comes over a unix socket: bytes, and descriptors beside them.


BUFFER_BYTES = 2**16  # read at once
DESCRIPTORS = 1  # that come with one message


class SocketReader:
    """A buffered reader.  One thread at a time uses it.

    Args:
        connection: which the caller keeps.
        takes_descriptors: otherwise the kernel drops arriving ones.
    """

    def __init__(self, connection: socket.socket, takes_descriptors: bool) -> None:
        self._socket = connection
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._begin = self._end = 0  # of what was read and not taken yet
        self._beside = socket.CMSG_SPACE(DESCRIPTORS * 4) if takes_descriptors else 0
        self._descriptors: deque[int] = deque()
        self._closed = False

    def exactly(self, size: int) -> bytes:
        """The next bytes.

        Raises:
            OSError: the peer is gone, or the reader was closed.
        """
        have = bytes(self._buffer[self._begin : min(self._end, self._begin + size)])
        self._begin += len(have)
        if len(have) == size:
            return have
        pieces = [have]
        missing = size - len(have)
        while missing:
            self._begin, self._end = 0, self._read()
            self._begin = min(missing, self._end)
            pieces.append(bytes(self._buffer[: self._begin]))
            missing -= self._begin
        return b"".join(pieces)

    def descriptor(self) -> int:
        """The next descriptor, which is the caller's from now on.

        Raises:
            CorruptFrame: none has come with what was read.
        """
        if not self._descriptors:
            raise CorruptFrame("expected a descriptor, got none")
        return self._descriptors.popleft()

    def close(self) -> None:
        """Closes unclaimed descriptors."""
        self._closed = True
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def _read(self) -> int:
        """Reads into the buffer, of which nothing is left."""
        size = 0
        if not self._closed:
            size, beside, _, _ = self._socket.recvmsg_into(
                [self._buffer], self._beside, socket.MSG_CMSG_CLOEXEC
            )
            for level, kind, data in beside:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    self._descriptors.extend(array.array("i", data))
        if not size:
            raise ConnectionError("the peer is gone")
        return size


# ---- shm ring ----
#
# A segment of memory that two processes of one host share, and the slots in it that hold payloads.
#
# ::
#
#   one memfd:   | slot | slot | slot ...  from the connecting end | slot | slot ...  to it |
#
# A slot is as long as the payload in it.  It stands behind the slot before it, or at the
# direction's begin where the rest is too short.  Both ends compute the same places, so they only
# tell each other how many slots were filled, how long they are, and how many were read.
#
# Initial values come in slots; the steps of a lane whose tensors have zones may need none.  So a
# direction in which many frames have gone past the slots gives their pages back.  The end that
# fills them does so: it knows that no slot is in use, and none will be before it allocates them
# again, all at once.


SLOT_BYTES = 2**21  # of the longest slot: a frame of frames.CHUNK_BYTES
# slots of that length in each direction: one is filled while the other is read.  More were measured
# no faster, and take memory of both ends
SLOTS = 2
DIRECTION_BYTES = SLOTS * SLOT_BYTES
SEGMENT_BYTES = 2 * DIRECTION_BYTES
ALIGNMENT = 64  # of a slot's begin: a cache line of the processor
# frames past the slots, after which their pages are given back.  Twice as many after each time: to
# give them back and get them again takes up to 3 ms
UNUSED_FRAMES = 64


def make() -> int:
    """A new segment's descriptor.

    Raises:
        OSError: this system has no memfd, or no room for a segment.
    """
    return memory_file.make(SEGMENT_BYTES)


def attach(descriptor: int) -> tuple[memoryview, memoryview]:
    """Maps a segment.  See [Note: memory may come from a stranger] in memory.py.

    Returns:
        The half that the connecting end writes, and the half that it reads.  They stay mapped as
        long as a view of them lives.

    Raises:
        OSError: it is no sealed segment of our size, or cannot be mapped.
    """
    memory = memory_file.attach(descriptor, SEGMENT_BYTES)
    return memory[:DIRECTION_BYTES], memory[DIRECTION_BYTES:]


class SlotRing:
    """The slots of one direction, as one end sees them: the place of the next, and those in use.

    The stream's lock of that direction guards it.

    Args:
        memory: that direction's half of the segment.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._next = 0
        # bytes of each slot in use, with those that had to be skipped before it
        self._taken: deque[int] = deque()
        self._left = DIRECTION_BYTES
        self._unused, self._patience = 0, UNUSED_FRAMES  # frames past the slots
        self._there = True  # the pages

    @property
    def used(self) -> int:
        """The number of slots that are filled and not yet freed."""
        return len(self._taken)

    def has_room(self, size: int) -> bool:
        """Whether the next slot can have this size; otherwise the writer has to wait."""
        return self._place(size)[1] <= self._left

    def _place(self, size: int) -> tuple[int, int]:
        """The offset of the next slot of this size, and the bytes that it takes."""
        taken = size + -size % ALIGNMENT
        if self._next + taken <= DIRECTION_BYTES:
            return self._next, taken
        return 0, DIRECTION_BYTES - self._next + taken

    def next_slot(self, size: int) -> memoryview:
        """The next slot, to fill or to read; ``size`` is at most ``SLOT_BYTES``."""
        begin, taken = self._place(size)
        self._next = begin + size + -size % ALIGNMENT
        self._taken.append(taken)
        self._left -= taken
        return self._memory[begin : begin + size]

    def free(self, slots: int) -> None:
        """Frees the slots that were taken first."""
        for _ in range(slots):
            self._left += self._taken.popleft()

    def passed(self) -> bool:
        """Notes a frame past the slots; whether their pages are due to be given back."""
        self._unused += 1
        return self._there and self._unused >= self._patience

    def give_back(self) -> None:
        """Gives the pages back, none of which is in use; at the end that fills the slots."""
        self._unused, self._patience = 0, 2 * self._patience
        with suppress(OSError):  # of a system that cannot do both
            memory_file.allocate_pages(self._memory)  # which are there
            memory_file.free_pages(self._memory)
            self._there = False

    def allocate(self) -> None:
        """Makes the pages be there, before a slot is filled.

        Raises:
            OSError: there is no room for them.
        """
        self._unused = 0
        if not self._there:
            memory_file.allocate_pages(self._memory)
            self._there = True

    def release(self) -> None:
        """Drops the memory; it stays mapped while views of it live."""
        self._memory = memoryview(b"")


def slots_of(size: int) -> Iterator[int]:
    """The bytes in each of the slots that a payload of ``size`` bytes takes."""
    for start in range(0, size, SLOT_BYTES):
        yield min(SLOT_BYTES, size - start)


class BufferReader:
    """Reads a payload's buffers, one behind another.

    Args:
        buffers: of the payload.
    """

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._left = list(reversed(buffers))

    def fill(self, target: memoryview) -> None:
        """Copies the next ``target.nbytes`` bytes into ``target``."""
        position = 0
        while position < target.nbytes:
            buffer = self._left.pop()
            size = min(buffer.nbytes, target.nbytes - position)
            copy_bytes(target[position : position + size], buffer[:size])
            position += size
            if size < buffer.nbytes:
                self._left.append(buffer[size:])


# ---- shm stream ----
#
# A stream over shared memory: its frames, slots and zones.
#
# ::
#
#   frame     prelude | header        the payload is in slots, or in a zone
#             prelude | header | payload, where it is small
#   offer     prelude, with a descriptor | the table of a segment
#   end       a prelude: nothing more comes in this direction
#
# See :mod:`pserver.transport.shm`.


log = logging.getLogger(__name__)

# before a frame: how its payload travels, bytes of header, bytes of payload
PRELUDE = struct.Struct("<BIQ")
END, INLINE, IN_SLOTS, IN_ZONE = 0, 1, 2, 3
OFFER = 4  # the header is a segment's table, the size its own; its descriptor comes with this
# what a connecting end makes of an offer, by the kind of frame
TAKEN: dict[int, type[FilledZones] | type[ReadZones]] = {
    Kind.GRADIENT: FilledZones,
    Kind.VALUE: ReadZones,
}
FILLED = b"+"  # one more slot of the same payload
FREE = b"-"  # one for each slot that has been read
MAX_FREED = 2**10  # free slots read from the socket at once: a direction has fewer
INLINE_BYTES = 2**14  # up to here two copies by the kernel cost less than a slot

Direction = tuple[socket.socket, SlotRing]


class ShmStream(SocketStream):
    """One end of a stream over shared memory.  Nothing leaves the host.

    Args:
        peer: the other end, for messages.
        outgoing, incoming: the socket and the slots of each direction.
        accepting: this is the accepting end.
        first_bytes: of a frame's header and payload, until the peer is admitted.
    """

    transport = "shm"

    def __init__(
        self,
        peer: str,
        outgoing: Direction,
        incoming: Direction,
        accepting: bool,
        first_bytes: int = FRAME_BYTES,
    ) -> None:
        super().__init__(peer, accepting, None, first_bytes)
        self._out, self._filling = outgoing
        self._in, self._reading = incoming
        self._reader = SocketReader(self._in, takes_descriptors=not accepting)
        # by kind of frame; set by the thread that offers, or that takes an offer
        self._zones: dict[int, Zones] = {}

    # ---- sending ----

    def _write(self, header: Frame, head: bytes, payload: Sequence[Buffer]) -> None:
        buffers = [memoryview(buffer).cast("B") for buffer in payload]
        size = sum(buffer.nbytes for buffer in buffers)
        if size and self._takes_zone(header, buffers, size):
            self._out.sendall(PRELUDE.pack(IN_ZONE, len(head), size) + head)
            self._pass_slots()
            return
        check_size(head, size)
        if size <= INLINE_BYTES:
            self._out.sendall(b"".join((PRELUDE.pack(INLINE, len(head), size), head, *buffers)))
            self._pass_slots()
        else:
            self._send_in_slots(PRELUDE.pack(IN_SLOTS, len(head), size) + head, buffers, size)

    def _send_in_slots(self, message: bytes, buffers: Sequence[memoryview], size: int) -> None:
        """Copies a payload into slots; ``message`` announces the first of them."""
        source = BufferReader(buffers)
        self._filling.allocate()
        for filled in slots_of(size):
            while not self._filling.has_room(filled):
                self._take_freed()
            source.fill(self._filling.next_slot(filled))
            self._out.sendall(message)
            message = FILLED

    def _pass_slots(self) -> None:
        """Notes that a frame did not need slots: see "shm ring" above."""
        if not self._filling.passed():
            return
        while self._filling.used:
            try:
                self._take_freed(socket.MSG_DONTWAIT)
            except BlockingIOError:  # the peer still reads
                return
        self._filling.give_back()

    def _take_freed(self, flags: int = 0) -> None:
        """Takes slots back that the peer has read.

        Raises:
            OSError: the peer is gone.
        """
        freed = self._out.recv(MAX_FREED, flags)
        if not freed or len(freed) > self._filling.used:
            raise ConnectionError("the peer is gone")
        self._filling.free(len(freed))

    def _takes_zone(self, header: Frame, buffers: Sequence[memoryview], size: int) -> bool:
        zones = self._zones.get(header.kind)
        return zones is not None and zones.claim(header, buffers, size)

    def offer(self, kind: Kind, segment: ZoneMemory) -> None:
        """See :class:`pserver.transport.stream.Stream`."""
        head = segment.table(kind).SerializeToString()
        prelude = PRELUDE.pack(OFFER, len(head), segment.memory.nbytes)
        with self._sending:
            try:
                socket.send_fds(self._out, [prelude], [segment.descriptor])
                self._out.sendall(head)
            except OSError as error:
                raise self._broken(error) from error
            self._zones[kind] = OfferedZones(segment)

    def _take_offer(self, head_size: int, size: int) -> None:
        """Maps what the accepting end offers."""
        descriptor = self._reader.descriptor()
        try:
            table = parse_header(self._exactly(head_size))
            if table.kind not in TAKEN:
                raise CorruptFrame(f"offers memory for frames of kind {table.kind}")
            try:
                segment = PeerSegment.attach(descriptor, size, table)
                self._zones[table.kind] = TAKEN[table.kind](segment)
            except OSError as error:
                log.warning("%s offers memory that cannot be mapped: %s", self.peer, error)
                self._zones[table.kind] = UnmappedZones()
        finally:
            os.close(descriptor)

    def _write_end(self) -> None:
        self._out.sendall(PRELUDE.pack(END, 0, 0))

    # ---- receiving ----

    def _read(self, land: Land | None) -> tuple[Frame, memoryview] | None:
        self._free_slots()
        kind, head_size, size = PRELUDE.unpack(self._exactly(PRELUDE.size))
        while kind == OFFER and not self._accepting and head_size <= FRAME_BYTES:
            self._take_offer(head_size, size)
            kind, head_size, size = PRELUDE.unpack(self._exactly(PRELUDE.size))
        if kind == END:
            return None
        most = self._most
        if (
            kind not in (INLINE, IN_SLOTS, IN_ZONE)
            or head_size > min(most, HEADER_BYTES)
            or (size > most and kind != IN_ZONE)
        ):
            raise CorruptFrame(f"expected a frame, got kind {kind} of {head_size} and {size} bytes")
        head = parse_header(self._exactly(head_size))
        return head, self._payload(kind, head, size, land)

    def _payload(self, kind: int, head: Frame, size: int, land: Land | None) -> memoryview:
        if kind == INLINE:
            return memoryview(self._exactly(size))
        if kind == IN_ZONE:
            if (zones := self._zones.get(head.kind)) is None:
                raise CorruptFrame(f"expected no frame in a zone, got {head.kind}")
            return zones.receive(head, size, land)
        if size <= SLOT_BYTES:
            return self._reading.next_slot(size).toreadonly()
        return self._joined(size)

    def _free_slots(self) -> None:
        """Frees the slots that the last frame was read from."""
        if self._reading.used:
            # the peer has ended; what it sent can still be read
            with suppress(BrokenPipeError, ConnectionResetError):
                self._in.sendall(FREE * self._reading.used)
            self._reading.free(self._reading.used)

    def _joined(self, size: int) -> memoryview:
        """A payload of several slots.  Each slot is freed as soon as it is read, so that a payload
        may be larger than all slots.
        """
        whole, position = memoryview(bytearray(size)), 0
        for filled in slots_of(size):
            if position and self._exactly(len(FILLED)) != FILLED:
                raise CorruptFrame(f"expected the next slot of a payload of {size} bytes")
            copy_bytes(whole[position : position + filled], self._reading.next_slot(filled))
            self._free_slots()
            position += filled
        return whole

    def _exactly(self, size: int) -> bytes:
        got = self._reader.exactly(size)
        if self._cancelled:
            raise ConnectionError("the stream was cancelled")
        return got

    # ---- the end ----

    def _linger(self) -> None:
        """Does nothing: a local socket keeps what was sent last."""

    def _shut_down(self) -> None:
        for end in (self._out, self._in):
            with suppress(OSError):  # closed, or the peer was faster
                end.shutdown(socket.SHUT_RDWR)

    def _release(self) -> None:
        self._reader.close()
        self._in.close()
        self._reading.release()
        self._out.close()
        self._filling.release()
        self._zones.clear()


# ---- shm ----


GREETING = b"pserver shm 2"  # sent with the segment and the socket of the other direction
WELCOME = b"ok"
GREETING_SECONDS = 5.0
_PEER = struct.Struct("3i")  # struct ucred: process, user, group
MAX_PORT = 2**32 - 1  # of JoinReply.data_port


class ShmListener:
    """A listening unix socket in the abstract namespace.

    Attributes:
        port: the number in the socket's name.
    """

    def __init__(self, handle: Handler, port: int, limits: Limits) -> None:
        os.close(make())  # raises where segments do not work, so that shm is not offered
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
        segment = make()
        ours, theirs = attach(segment)
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
    return ShmStream(here, (outgoing, SlotRing(ours)), (near, SlotRing(theirs)), accepting=False)


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
        theirs, ours = attach(descriptors[0])
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
        (back, SlotRing(ours)),
        (connection, SlotRing(theirs)),
        True,
        limits.hello_bytes,
    )


def _check_peer(connection: socket.socket) -> int:
    """Checks that the process at the other end is this user's or root's: any process of the host
    can take the name of a socket, or connect to it.

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
