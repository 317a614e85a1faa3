"""Memory in which tensors lie that another process of the host writes or reads where they are.

::

    one memory file:   | a count for each zone | zone | zone | ...

A zone holds one tensor.  What its count means depends on who writes: see
:mod:`pserver.transport.zones`.
"""

from __future__ import annotations

import os
import platform
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pserver.errors import CorruptFrame
from pserver.transport import memory_file
from pserver.wire_pb2 import Frame, Kind, Part

ZONE_BYTES = 2**18  # smaller tensors have no zone: they share frames
ALIGNMENT = 64  # of a zone's begin: a cache line of the processor
COUNT = np.dtype("<i8")
WRITTEN_BY_PEERS = (Kind.GRADIENT,)  # frames that come to a segment's maker
# Whether a processor's cores see another one's writes in the order in which they were made, and
# read in the order of the program, without further instructions, for which Python has no name.
IN_ORDER = platform.machine() in ("x86_64", "AMD64")


@dataclass(frozen=True, slots=True)
class Zone:
    """Where a tensor lies: bytes of the segment, and which count is its."""

    begin: int
    size: int
    index: int


class Segment:
    """Memory with zones, at the end that made it.

    Args:
        sizes: bytes of each zone, by name, at least one.
        read_only: only this process can write to it.

    Attributes:
        descriptor: of the memory file; closed with the segment.
        zones: by name.
        memory: all of it.
        counts: of the zones, int64 [zones].

    Raises:
        OSError: this system has no such memory, or no room for it.
    """

    def __init__(self, sizes: Mapping[str, int], read_only: bool = False) -> None:
        self.zones: dict[str, Zone] = {}
        end = _aligned(len(sizes) * COUNT.itemsize)
        for index, (name, size) in enumerate(sizes.items()):
            self.zones[name] = Zone(end, size, index)
            end = _aligned(end + size)
        self.descriptor = memory_file.make(end)
        weakref.finalize(self, os.close, self.descriptor)
        self.memory = memory_file.attach(self.descriptor, end)
        self._begin = memory_file.address_of(self.memory)
        if read_only:
            memory_file.end_writing(self.descriptor)
        self.counts = _counts(self.memory, len(self.zones))

    def tensor(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """The tensor in a zone, which keeps the memory."""
        zone = self.zones[name]
        view = self.memory[zone.begin : zone.begin + zone.size]
        return torch.frombuffer(view, dtype=dtype).view(tuple(shape))

    def address(self, name: str) -> int:
        """Where a zone begins in this process."""
        return self._begin + self.zones[name].begin

    @contextmanager
    def writing(self, names: Iterable[str]) -> Iterator[None]:
        """While it lasts the caller writes to those of these that are zones: their counts are odd.
        One caller at a time for one zone.
        """
        indices = [self.zones[name].index for name in names if name in self.zones]
        for index in indices:
            self.counts[index] += 1
        try:
            yield
        finally:
            for index in indices:
                self.counts[index] += 1

    def table(self, kind: Kind) -> Frame:
        """The zones as a header: what frames of a kind may bring there."""
        parts = [Part(name=n, offset=each.begin, size=each.size) for n, each in self.zones.items()]
        return Frame(kind=kind, parts=parts)


@dataclass(frozen=True, slots=True)
class PeerSegment:
    """The peer's segment, mapped.

    Attributes:
        zones, memory, counts: as of :class:`Segment`.
    """

    zones: Mapping[str, Zone]
    memory: memoryview
    counts: NDArray[np.int64]

    @classmethod
    def attach(cls, descriptor: int, size: int, table: Frame) -> PeerSegment:
        """Maps a segment: to write, where its frames go to the peer that made it.

        Raises:
            CorruptFrame: the table is not of a segment of this size.
            OSError: it cannot be mapped.
        """
        zones = {p.name: Zone(p.offset, p.size, index) for index, p in enumerate(table.parts)}
        first = _aligned(len(table.parts) * COUNT.itemsize)
        ends = [each.begin + each.size for each in zones.values()]
        if max((first, *ends)) > size or any(each.begin < first for each in zones.values()):
            raise CorruptFrame(f"expected zones within a segment of {size} bytes")
        memory = memory_file.attach(descriptor, size, table.kind in WRITTEN_BY_PEERS)
        return cls(zones, memory, _counts(memory, len(table.parts)))


def _aligned(position: int) -> int:
    return position + -position % ALIGNMENT


def _counts(memory: memoryview, number: int) -> NDArray[np.int64]:
    return np.frombuffer(memory, COUNT, number)
