"""A segment of memory that two processes of one host share, and the slots in it that payloads
travel in.

::

    one memfd:   | slot | slot | slot ...  from the connecting end | slot | slot ...  to it |

A segment has no name: it lives as long as a process holds it, so one that was killed leaves nothing
behind, and the size of /dev/shm does not matter.  A slot is as long as what it holds; it stands
behind the one before it, or at the direction's begin where the rest is too short.  So both ends
know where each is, and nothing has to be said but how many were filled, how long they are, and how
many were read.

[Note: a segment may come from a stranger]  Whoever maps a file that another process can shorten
dies of a bus error when that happens.  So the end that makes a segment seals its size, and the end
that takes it looks at the seals before it maps. Its pages are allocated when it is made: where
there is no room for them, that is an error there, and not a crash later.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections import deque
from collections.abc import Iterator, Sequence

from pserver.transport.codec import copy_bytes

SLOT_BYTES = 2**21  # the longest: a frame of codec.CHUNK_BYTES
# of that length a direction: one is filled while another is read.  More were no faster, and are
# memory of both ends
SLOTS = 2
WAY_BYTES = SLOTS * SLOT_BYTES
SEGMENT_BYTES = 2 * WAY_BYTES
ALIGNMENT = 64  # of a slot's begin: a line of the processor's caches


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
    """The two halves of a segment: what the connecting end writes, and what it reads.  They live as
    long as a view of them.

    Raises:
        OSError: it is no sealed segment of our size (see [Note: a segment may come from a
            stranger]), or cannot be mapped.
    """
    if (
        fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _seals() != _seals()
        or os.fstat(descriptor).st_size != SEGMENT_BYTES
    ):
        raise OSError(f"expected a sealed segment of {SEGMENT_BYTES} bytes")
    memory = memoryview(mmap.mmap(descriptor, SEGMENT_BYTES, mmap.MAP_SHARED))
    return memory[:WAY_BYTES], memory[WAY_BYTES:]


def _seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Ring:
    """One direction's slots, as one end sees them: where the next begins, and which are in use."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._next = 0
        # bytes of each slot that is in use, with what had to be left out before it
        self._taken: deque[int] = deque()
        self._left = WAY_BYTES

    @property
    def used(self) -> int:
        """Slots that are filled, and not yet said to be read."""
        return len(self._taken)

    def has_room(self, size: int) -> bool:
        """Whether the next slot may be of this size; otherwise the writer has to wait."""
        return self._of(size)[1] <= self._left

    def _of(self, size: int) -> tuple[int, int]:
        """Where the next slot, of this size, begins, and the bytes that it takes."""
        taken = size + -size % ALIGNMENT
        if self._next + taken <= WAY_BYTES:
            return self._next, taken
        return 0, WAY_BYTES - self._next + taken

    def take(self, size: int) -> memoryview:
        """The next slot, of ``SLOT_BYTES`` at most, to fill or to read."""
        begin, taken = self._of(size)
        self._next = begin + size + -size % ALIGNMENT
        self._taken.append(taken)
        self._left -= taken
        return self._memory[begin : begin + size]

    def free(self, slots: int) -> None:
        """The slots that were taken first are free again."""
        for _ in range(slots):
            self._left += self._taken.popleft()

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
