"""A segment of memory that two processes of one host share, and the slots in it that payloads travel in.

::

    one memfd:   | slot 0 | slot 1 | ... from the connecting end | slot 0 | slot 1 | ... to it |

A segment has no name: it lives as long as a process holds it, so one that was killed leaves nothing behind, and the size of
/dev/shm does not matter.  Both ends use the slots of a direction in turn, so nothing has to be said but how many were
filled, and how many were read.

[Note: a segment may come from a stranger]  Whoever maps a file that another process can shorten dies of a bus error when that
happens.  So the end that makes a segment seals its size, and the end that takes it looks at the seals before it maps.
Its pages are allocated when it is made: where there is no room for them, that is an error there, and not a crash later.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence

from pserver.codec import copy_bytes

SLOTS = 2  # a direction: one is filled while another is read.  Four were no faster, and each is memory of both ends
SLOT_BYTES = 2**21  # a frame of codec.CHUNK_BYTES fills one
SEGMENT_BYTES = 2 * SLOTS * SLOT_BYTES


def make() -> int:
    """A new segment's file descriptor, its size sealed and its pages allocated.

    Raises:
        OSError: this system has no such facility, or no room for it.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memfd_create")
    descriptor = os.memfd_create("pserver", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, SEGMENT_BYTES)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _seals() | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def attach(descriptor: int) -> tuple[memoryview, memoryview]:
    """The two halves of a segment: what the connecting end writes, and what it reads.  They live as long as a view of them.

    Raises:
        OSError: it is no sealed segment of our size (see [Note: a segment may come from a stranger]), or cannot be mapped.
    """
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _seals() != _seals() or os.fstat(descriptor).st_size != SEGMENT_BYTES:
        raise OSError(f"expected a sealed segment of {SEGMENT_BYTES} bytes")
    memory = memoryview(mmap.mmap(descriptor, SEGMENT_BYTES, mmap.MAP_SHARED))
    return memory[: SEGMENT_BYTES // 2], memory[SEGMENT_BYTES // 2 :]


def _seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Ring:
    """One direction's slots, as one end sees them: which is the next, and how many are in use."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._next = 0
        self.used = 0  # filled, and not yet said to be read

    @property
    def full(self) -> bool:
        """Whether the writer has to wait."""
        return self.used == SLOTS

    def take(self) -> memoryview:
        """The next slot, to fill or to read."""
        start = self._next * SLOT_BYTES
        self._next = (self._next + 1) % SLOTS
        self.used += 1
        return self._memory[start : start + SLOT_BYTES]

    def release(self) -> None:
        """Lets go of the memory; views that were given out keep it."""
        self._memory = memoryview(b"")


def slots_of(size: int) -> Iterator[int]:
    """How many bytes of a payload of ``size`` bytes stand in each slot that it takes."""
    for start in range(0, size, SLOT_BYTES):
        yield min(SLOT_BYTES, size - start)


class Pieces:
    """A payload's buffers, one behind another, copied out bit by bit."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._left = list(reversed(buffers))

    def fill(self, target: memoryview) -> None:
        """Copies the next ``target.nbytes`` bytes."""
        position = 0
        while position < target.nbytes:
            piece = self._left.pop()
            size = min(piece.nbytes, target.nbytes - position)
            copy_bytes(target[position : position + size], piece[:size])
            position += size
            if size < piece.nbytes:
                self._left.append(piece[size:])
