"""Memory that two processes of a host share for tensors, and how many bytes of each have passed.

[Note: memory may come from a stranger]  A process that maps a file dies of a bus error when another
process shortens the file.  So the end that makes a memory file seals its size, and the end that
takes it checks the seals before it maps.  The pages are allocated when the file is made: if there
is no room for them, that is an error at once, and not a crash later.  Pages that are given back
are allocated in the same way before they are used again.  A mapping that can only be read protects
nothing, as a process that has the descriptor can map it again.  So a file that others must not
write is sealed against that, too: only a mapping from before the seal can write to it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pserver.errors import CorruptFrame
from pserver.wire_pb2 import Frame, Kind, Part, StatusReply, VariableBytes
from transpiler.plan.plan import Plan

# ---- byte counters ----
#
# Counts payload bytes by name on the wire, at one end of streams, after compression.


Bytes = tuple[int, int]  # received, sent
Counts = np.ndarray[Any, np.dtype[np.int64]]


class ByteCounters:
    """Byte counts of all streams of a process with one peer, or of a job.  Any thread may count.

    Args:
        has: whether there is something of this name on the wire.  Names that a peer invents are not
            counted, so that they are not kept.
    """

    def __init__(self, has: Callable[[str], bool] = lambda name: True) -> None:
        self._has = has
        self._lock = threading.Lock()  # guards the two below
        self._received: dict[str, int] = {}
        self._sent: dict[str, int] = {}

    def received(self, header: Frame) -> None:
        """Counts a frame that has arrived."""
        self._count(self._received, header)

    def sent(self, header: Frame) -> None:
        """Counts a frame that has left; one that is sent again counts again."""
        self._count(self._sent, header)

    def _count(self, counts: dict[str, int], header: Frame) -> None:
        if header.parts:
            with self._lock:
                for part in header.parts:
                    if part.name in counts or self._has(part.name):
                        counts[part.name] = counts.get(part.name, 0) + part.size

    def by_name(self) -> dict[str, Bytes]:
        """The counts: (received, sent) by name on the wire."""
        with self._lock:
            return {
                n: (self._received.get(n, 0), self._sent.get(n, 0))
                for n in {**self._received, **self._sent}
            }

    def report(self, plan: Plan, reply: StatusReply) -> None:
        """Writes the counts by variable into a server's status."""
        for name, (received, sent) in by_variable(self.by_name(), plan).items():
            reply.variables[name].CopyFrom(VariableBytes(bytes_in=received, bytes_out=sent))


def by_variable(counts: Mapping[str, Bytes], plan: Plan) -> dict[str, Bytes]:
    """Counts by variable: those of its slices and of their companions (scales, ids) are added up.
    Optimizer states keep their own names.
    """
    variables = {
        slice_.name: placement.name for placement in plan.placements for slice_ in placement.slices
    }
    total: dict[str, Bytes] = {}
    for name, (received, sent) in counts.items():
        name = name if name in variables else name.partition("@")[0]
        name = variables.get(name, name)
        before = total.get(name, (0, 0))
        total[name] = before[0] + received, before[1] + sent
    return total


def totals(counts: Iterable[ByteCounters], plan: Plan) -> dict[str, dict[str, int]]:
    """The sum of several counts: "bytes_in" and "bytes_out" of each variable."""
    total: dict[str, dict[str, int]] = {}
    for traffic in counts:
        for name, (received, sent) in by_variable(traffic.by_name(), plan).items():
            both = total.setdefault(name, {"bytes_in": 0, "bytes_out": 0})
            both["bytes_in"] += received
            both["bytes_out"] += sent
    return total


# ---- memory file ----
#
# Memory without a name (memfd) that a process gives to another one of its host.
#
# It lives as long as a process holds it, so a process that was killed leaves nothing behind, and
# the size of /dev/shm does not matter.


F_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h; Python 3.11 has no name for it
MADV_POPULATE_WRITE = 23  # linux/mman.h, from Linux 5.14 on; likewise


def make(size: int) -> int:
    """A new file's descriptor, its size sealed and its pages allocated.

    Args:
        size: in bytes, at least 1.

    Raises:
        OSError: this system has no memfd, or no room for the file.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memfd_create")
    descriptor = os.memfd_create("pserver", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _size_seals())
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def end_writing(descriptor: int) -> None:
    """Seals the file: it can be written only through existing mappings.

    Raises:
        OSError: this kernel has no such seal.
    """
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)


def attach(descriptor: int, size: int, writable: bool = True) -> memoryview:
    """Maps a file, with all its pages.  See [Note: memory may come from a stranger].

    Returns:
        Its memory, which stays mapped as long as a view of it lives.

    Raises:
        OSError: it is no sealed file of this size, or cannot be mapped.
    """
    if (
        fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _size_seals() != _size_seals()
        or os.fstat(descriptor).st_size != size
    ):
        raise OSError(f"expected a sealed segment of {size} bytes")
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    return memoryview(
        mmap.mmap(descriptor, size, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0), access)
    )


def allocate_pages(memory: memoryview) -> None:
    """Allocates the pages of a part of a mapped file that are not there.

    Args:
        memory: of :func:`attach`, writable; it begins and ends with a page.

    Raises:
        OSError: there is no room for them, or this system cannot tell.
    """
    _advise(memory, MADV_POPULATE_WRITE)


def free_pages(memory: memoryview) -> None:
    """Gives the pages of a part of a mapped file back to the system, for all processes.  What was
    there is 0; :func:`allocate_pages` comes before the next use.

    Args:
        memory: as of :func:`allocate_pages`.

    Raises:
        OSError: this system cannot.
    """
    _advise(memory, getattr(mmap, "MADV_REMOVE", -1))


def _advise(memory: memoryview, advice: int) -> None:
    mapping = memory.obj
    assert isinstance(mapping, mmap.mmap), "memory of attach()"
    begin = address_of(memory) - address_of(memoryview(mapping))
    mapping.madvise(advice, begin, memory.nbytes)


def address_of(memory: memoryview) -> int:
    """The address of a run of bytes in this process."""
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])


def _size_seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


# ---- segment ----
#
# Memory in which tensors lie that another process of the host writes or reads where they are.
#
# ::
#
#   one memory file:   | a count for each zone | zone | zone | ...
#
# A zone holds one tensor.  What its count means depends on who writes: see
# :mod:`pserver.transport.zones`.


ZONE_BYTES = 2**18  # smaller tensors have no zone: they share frames
ALIGNMENT = 64  # of a zone's begin: a cache line of the processor
COUNT = np.dtype("<i8")
WRITTEN_BY_PEERS = (Kind.GRADIENT,)  # frames that come to a segment's maker
# Whether a processor's cores see another one's writes in the order in which they were made, and
# read in the order of the program, without further instructions, for which Python has no name.
IN_ORDER = platform.machine() in ("x86_64", "AMD64")


@dataclass(frozen=True, slots=True)
class Zone:
    """The place of a tensor: bytes of the segment, and the index of its count."""

    begin: int
    size: int
    index: int


class ZoneMemory:
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
        self.descriptor = make(end)
        weakref.finalize(self, os.close, self.descriptor)
        self.memory = attach(self.descriptor, end)
        self._begin = address_of(self.memory)
        if read_only:
            end_writing(self.descriptor)
        self.counts = _counts(self.memory, len(self.zones))

    def tensor(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """The tensor in a zone, which keeps the memory."""
        zone = self.zones[name]
        view = self.memory[zone.begin : zone.begin + zone.size]
        return torch.frombuffer(view, dtype=dtype).view(tuple(shape))

    def address(self, name: str) -> int:
        """The address of a zone in this process."""
        return self._begin + self.zones[name].begin

    @contextmanager
    def writing(self, names: Iterable[str]) -> Iterator[None]:
        """Marks, while the block runs, that the caller writes to those of these that are zones:
        their counts are odd.  One caller at a time for one zone.
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
        """The zones as a header: the parts that frames of a kind may bring there."""
        parts = [Part(name=n, offset=each.begin, size=each.size) for n, each in self.zones.items()]
        return Frame(kind=kind, parts=parts)


@dataclass(frozen=True, slots=True)
class PeerSegment:
    """The peer's segment, mapped.

    Attributes:
        zones, memory, counts: as of :class:`ZoneMemory`.
    """

    zones: Mapping[str, Zone]
    memory: memoryview
    counts: Counts

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
        memory = attach(descriptor, size, table.kind in WRITTEN_BY_PEERS)
        return cls(zones, memory, _counts(memory, len(table.parts)))


def _aligned(position: int) -> int:
    return position + -position % ALIGNMENT


def _counts(memory: memoryview, number: int) -> Counts:
    return np.frombuffer(memory, COUNT, number)
