"""Frames whose payload lies at its destination: in a segment of the accepting end, which has
offered it to the connecting end for one kind of frame.

::

    GRADIENT   the connecting end copies a payload into its zone; the accepting end merges it there
    VALUE      the accepting end only says that there is a value; the connecting end copies it from
               its zone to where it goes

[Note: free zones]  A zone of gradients may be written once, from its begin to its end, for each
time that its owner has counted it free.  So a frame that is sent twice comes another way the second
time, and what the owner has begun to use stays.  The owner counts when it has read the payload for
the last time, and then sends DONE; the next step begins after that.  A peer that writes anyway
spoils its own gradient, which is data: no length, index or address is ever read from a zone.

[Note: values that change]  A reader that reads a value where it is needs to know that it did not
change meanwhile.  Where steps wait for all trainers it cannot: this trainer's next step begins when
it has read all of the last answer, and no step is applied without it.  Elsewhere, and where a value
is loaded or a trainer leaves while others continue, the count of a zone shows it: it is odd while
its owner writes, and another one afterwards.  A reader that finds it odd, or changed, tries again;
after ``TRIES`` the payload is ``MISSED``, and the waiting trainer asks for it once more, by name:
then the server sends a copy.  So no reader waits for a writer that has been killed.  A value of
several frames is of one count.

The counts need no lock where each core sees another core's writes in their order (x86); Python has
no name for the instructions that others need (``memory.IN_ORDER``), so on others, where values
change beside their readers, copies travel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pserver.errors import CorruptFrame
from pserver.transport.frames import copy_bytes, spread
from pserver.transport.memory import PeerSegment, ZoneMemory, address_of
from pserver.transport.stream import LANDED, MISSED, Land
from pserver.wire_pb2 import Frame, Part

TRIES = 3


class OfferedZones:
    """Zones of this end's segment, which the peer fills, or reads.

    Args:
        segment: with the zones.
    """

    def __init__(self, segment: ZoneMemory) -> None:
        self._segment = segment

    def claim(self, header: Frame, payload: Sequence[memoryview], size: int) -> bool:
        """Whether a payload that is to be sent lies in its zone, where the peer reads it."""
        pieces = _pieces(self._segment, header, size)
        return pieces is not None and [address_of(each) for each in pieces] == [
            address_of(each) for each in payload
        ]

    def receive(self, header: Frame, size: int, land: Land | None) -> memoryview:
        """Returns the payload of a frame, where it is.

        Raises:
            CorruptFrame: the frame fits no zone.
        """
        pieces = _pieces(self._segment, header, size)
        if pieces is None or len(pieces) != 1:
            raise _no_zone(size)
        return pieces[0]


class FilledZones:
    """Zones of the peer's segment, which this end fills.  See [Note: free zones].

    Args:
        segment: with the zones.
    """

    def __init__(self, segment: PeerSegment) -> None:
        self._segment = segment
        # by zone: the count at which it was written last, and how far
        self._written = {name: (0, zone.size) for name, zone in segment.zones.items()}

    def claim(self, header: Frame, payload: Sequence[memoryview], size: int) -> bool:
        """Copies a payload to its zone, if it has one that is free."""
        pieces = _pieces(self._segment, header, size)
        if pieces is None or len(pieces) != 1:
            return False
        (place,), (part,) = pieces, header.parts
        count = int(self._segment.counts[self._segment.zones[part.name].index])
        before, end = self._written[part.name]
        if part.offset != (end if count == before else 0):
            return False
        self._written[part.name] = count, part.offset + size
        for buffer in payload:
            copy_bytes(place[: buffer.nbytes], buffer)
            place = place[buffer.nbytes :]
        return True

    def receive(self, header: Frame, size: int, land: Land | None) -> memoryview:
        """Raises, as no frame arrives there.

        Raises:
            CorruptFrame: always.
        """
        raise CorruptFrame(f"expected no frame of kind {header.kind} in a zone that this end fills")


class ReadZones:
    """Zones of the peer's segment, which this end reads.  See [Note: values that change].

    Args:
        segment: with the zones.
    """

    def __init__(self, segment: PeerSegment) -> None:
        self._segment = segment
        self._read: dict[str, int] = {}  # by zone: the count of the part that was read last

    def claim(self, header: Frame, payload: Sequence[memoryview], size: int) -> bool:
        """False: a payload of this end travels."""
        return False

    def receive(self, header: Frame, size: int, land: Land | None) -> memoryview:
        """Copies a value to its destination.

        Raises:
            CorruptFrame: the frame fits no zone.
        """
        sources = _pieces(self._segment, header, size)
        if sources is None:
            raise _no_zone(size)
        targets = None if land is None else land(header, size)
        whole = memoryview(bytearray(size)) if targets is None else LANDED
        places = [whole] if targets is None else targets
        if not all(
            self._copy(part, source, place)
            for part, source, place in zip(
                header.parts, sources, _cut(places, sources), strict=True
            )
        ):
            return MISSED
        return whole

    def _copy(self, part: Part, source: memoryview, places: Sequence[memoryview]) -> bool:
        """Copies a part of a value; returns whether it is whole."""
        counts, index = self._segment.counts, self._segment.zones[part.name].index
        for _ in range(TRIES):
            count = int(counts[index])
            if count % 2 or (part.offset and count != self._read.get(part.name)):
                continue
            spread(source, places)
            if int(counts[index]) == count:
                self._read[part.name] = count
                return True
        return False


class UnmappedZones:
    """Zones of a segment that this end cannot map: gradients travel, and values are missed."""

    def claim(self, header: Frame, payload: Sequence[memoryview], size: int) -> bool:
        """False: a payload of this end travels, as the segment is not mapped."""
        return False

    def receive(self, header: Frame, size: int, land: Land | None) -> memoryview:
        """Returns that the value is missed: the segment cannot be read."""
        return MISSED


Zones = OfferedZones | FilledZones | ReadZones | UnmappedZones


def _pieces(segment: ZoneMemory | PeerSegment, header: Frame, size: int) -> list[memoryview] | None:
    """The places of a frame's parts in a segment; None: one of them fits no zone, or they are of
    another size together.
    """
    pieces = []
    for part in header.parts:
        zone = segment.zones.get(part.name)
        if zone is None or part.offset + part.size > zone.size or not part.size:
            return None
        begin = zone.begin + part.offset
        pieces.append(segment.memory[begin : begin + part.size])
    return pieces if pieces and sum(each.nbytes for each in pieces) == size else None


def _cut(places: Sequence[memoryview], sources: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """The places of each source, where they stand one behind another."""
    left = list(reversed(places))
    for source in sources:
        found, missing = list[memoryview](), source.nbytes
        while missing:
            place = left.pop()
            if place.nbytes > missing:
                left.append(place[missing:])
            found.append(place[:missing])
            missing -= found[-1].nbytes
        yield found


def _no_zone(size: int) -> CorruptFrame:
    return CorruptFrame(f"expected parts within zones, got {size} bytes that fit none")
