"""Memory without a name (memfd) that a process gives to another one of its host.

It lives as long as a process holds it, so a process that was killed leaves nothing behind, and the
size of /dev/shm does not matter.

[Note: memory may come from a stranger]  A process that maps a file dies of a bus error when another
process shortens the file.  So the end that makes a memory file seals its size, and the end that
takes it checks the seals before it maps.  The pages are allocated when the file is made: if there
is no room for them, that is an error at once, and not a crash later.  A mapping that can only be
read protects nothing, as whoever has the descriptor can map it again.  So a file that others are
not to write is sealed against that, too: only a mapping from before the seal writes to it.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np

F_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h; Python 3.11 has no name for it


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
    """From here on nobody can write to the file, but through mappings that exist.

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


def address_of(memory: memoryview) -> int:
    """Where a run of bytes begins in this process."""
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])


def _size_seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
