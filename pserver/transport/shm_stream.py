"""A stream over shared memory: its frames, slots and zones.

::

    frame     prelude | header        the payload is in slots, or in a zone
              prelude | header | payload, where it is small
    offer     prelude, with a descriptor | the table of a segment
    end       a prelude: nothing more comes in this direction

See :mod:`pserver.transport.shm`.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock, RLock

from pserver.errors import CorruptFrame, Unreachable
from pserver.security.certificates import Bearer
from pserver.transport import shm_ring
from pserver.transport.codec import HEADER_BYTES, copy_bytes, parse_header
from pserver.transport.segment import PeerSegment, Segment
from pserver.transport.shm_reader import SocketReader
from pserver.transport.shm_ring import SLOT_BYTES, BufferReader, Ring
from pserver.transport.stream import Buffer, Land
from pserver.transport.zones import FilledZones, OfferedZones, ReadZones, UnmappedZones, Zones
from pserver.wire_pb2 import Frame, Kind

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
FRAME_BYTES = 2**26  # the largest payload that is accepted

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
        self._reader = SocketReader(self._in, takes_descriptors=not accepting)
        self._accepting = accepting
        self._most = first_bytes  # of the next frame's header, and of its payload
        # by kind of frame; set by the thread that offers, or that takes an offer
        self._zones: dict[int, Zones] = {}
        # held while a frame is sent; guards _out.  A broken stream releases it at once
        self._sending = RLock()
        # held while a frame is received; guards _in and _reader.  Taken before _sending, never
        # after
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
        with self._sending:
            if self._closed or self._cancelled:
                raise Unreachable(
                    f"{self.peer}: the stream {'was cancelled' if self._cancelled else 'is closed'}"
                )
            try:
                if size and self._takes_zone(header, buffers, size):
                    self._out.sendall(PRELUDE.pack(IN_ZONE, len(head), size) + head)
                elif max(len(head), size) > FRAME_BYTES:
                    raise ValueError(
                        f"expected a frame of at most {FRAME_BYTES} bytes, got {len(head)} of "
                        f"header, {size} of payload"
                    )
                elif size <= INLINE_BYTES:
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

    def _takes_zone(self, header: Frame, buffers: Sequence[memoryview], size: int) -> bool:
        zones = self._zones.get(header.kind)
        return zones is not None and zones.take(header, buffers, size)

    def offer(self, kind: Kind, segment: Segment) -> None:
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
                raise CorruptFrame(f"{self.peer}: offers memory for frames of kind {table.kind}")
            try:
                segment = PeerSegment.attach(descriptor, size, table)
                self._zones[table.kind] = TAKEN[table.kind](segment)
            except OSError as error:
                log.warning("%s offers memory that cannot be mapped: %s", self.peer, error)
                self._zones[table.kind] = UnmappedZones()
        finally:
            os.close(descriptor)

    def receive(self, land: Land | None = None) -> tuple[Frame, memoryview] | None:
        """See :class:`pserver.transport.stream.Stream`."""
        with self._receiving:
            if self._ended and not self._cancelled:
                return None
            try:
                self._free_slots()
                return self._frame(land)
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

    def _frame(self, land: Land | None) -> tuple[Frame, memoryview] | None:
        kind, head_size, size = PRELUDE.unpack(self._exactly(PRELUDE.size))
        while kind == OFFER and not self._accepting and head_size <= FRAME_BYTES:
            self._take_offer(head_size, size)
            kind, head_size, size = PRELUDE.unpack(self._exactly(PRELUDE.size))
        if kind == END:
            self._ended = True
            if not self._accepting:
                self._hang_up()
            return None
        most = self._most
        if (
            kind not in (INLINE, IN_SLOTS, IN_ZONE)
            or head_size > min(most, HEADER_BYTES)
            or (size > most and kind != IN_ZONE)
        ):
            raise CorruptFrame(
                f"{self.peer}: expected a frame, got kind {kind} of {head_size} and {size} bytes"
            )
        head = parse_header(self._exactly(head_size))
        if kind == INLINE:
            return head, memoryview(self._exactly(size))
        if kind == IN_ZONE:
            if (zones := self._zones.get(head.kind)) is None:
                raise CorruptFrame(f"{self.peer}: expected no frame in a zone, got {head.kind}")
            return head, zones.receive(head, size, land)
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
        got = self._reader.exactly(size)
        if self._cancelled:
            raise ConnectionError("the stream was cancelled")
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
            self._reader.close()
            self._in.close()
            self._reading.release()
        with self._sending:
            self._out.close()
            self._filling.release()
            self._zones.clear()

    def _broken(self, error: Exception) -> Unreachable:
        return Unreachable(
            f"{self.peer}: the stream {'was cancelled' if self._cancelled else f'broke: {error}'}"
        )
