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

from pserver.errors import CorruptFrame
from pserver.transport import shm_ring
from pserver.transport.codec import HEADER_BYTES, copy_bytes, parse_header
from pserver.transport.segment import PeerSegment, Segment
from pserver.transport.shm_reader import SocketReader
from pserver.transport.shm_ring import SLOT_BYTES, BufferReader, Ring
from pserver.transport.socket_stream import FRAME_BYTES, SocketStream, check_size
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

Direction = tuple[socket.socket, Ring]


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
            return
        check_size(head, size)
        if size <= INLINE_BYTES:
            self._out.sendall(b"".join((PRELUDE.pack(INLINE, len(head), size), head, *buffers)))
        else:
            self._send_in_slots(PRELUDE.pack(IN_SLOTS, len(head), size) + head, buffers, size)

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
            return self._reading.take(size).toreadonly()
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
        for filled in shm_ring.slots_of(size):
            if position and self._exactly(len(FILLED)) != FILLED:
                raise CorruptFrame(f"expected the next slot of a payload of {size} bytes")
            copy_bytes(whole[position : position + filled], self._reading.take(filled))
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
        """A socket of this host keeps what was sent last."""

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
