"""A segment of memory that two processes of one host share, and the slots in it that hold payloads.

::

    one memfd:   | slot | slot | slot ...  from the connecting end | slot | slot ...  to it |

A slot is as long as the payload in it.  It stands behind the slot before it, or at the direction's
begin where the rest is too short.  Both ends compute the same places, so they only tell each other
how many slots were filled, how long they are, and how many were read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from pserver.transport import memory_file
from pserver.transport.codec import copy_bytes

SLOT_BYTES = 2**21  # of the longest slot: a frame of codec.CHUNK_BYTES
# slots of that length in each direction: one is filled while the other is read.  More were measured
# no faster, and take memory of both ends
SLOTS = 2
DIRECTION_BYTES = SLOTS * SLOT_BYTES
SEGMENT_BYTES = 2 * DIRECTION_BYTES
ALIGNMENT = 64  # of a slot's begin: a cache line of the processor


def make() -> int:
    """A new segment's descriptor.

    Raises:
        OSError: this system has no memfd, or no room for a segment.
    """
    return memory_file.make(SEGMENT_BYTES)


def attach(descriptor: int) -> tuple[memoryview, memoryview]:
    """Maps a segment.  See [Note: memory may come from a stranger] in memory_file.py.

    Returns:
        The half that the connecting end writes, and the half that it reads.  They stay mapped as
        long as a view of them lives.

    Raises:
        OSError: it is no sealed segment of our size, or cannot be mapped.
    """
    memory = memory_file.attach(descriptor, SEGMENT_BYTES)
    return memory[:DIRECTION_BYTES], memory[DIRECTION_BYTES:]


class Ring:
    """The slots of one direction, as one end sees them: where the next begins, which are in use.

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

    @property
    def used(self) -> int:
        """How many slots are filled and not yet freed."""
        return len(self._taken)

    def has_room(self, size: int) -> bool:
        """Whether the next slot can have this size; otherwise the writer has to wait."""
        return self._place(size)[1] <= self._left

    def _place(self, size: int) -> tuple[int, int]:
        """Where the next slot, of this size, begins, and how many bytes it takes."""
        taken = size + -size % ALIGNMENT
        if self._next + taken <= DIRECTION_BYTES:
            return self._next, taken
        return 0, DIRECTION_BYTES - self._next + taken

    def take(self, size: int) -> memoryview:
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
