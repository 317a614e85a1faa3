"""Keeps freed memory in the process, so that the buffers of the next step are warm.

[Note: warm buffers]  A page that the kernel has just mapped costs a fault and a clearing: copying into fresh pages runs at less
than a tenth of the speed of copying into pages used before.  By default glibc maps and unmaps every buffer of more than a
few hundred KB, which is every frame of ours, so each would be paid for anew.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
MMAP_BYTES = 2**25  # the most that glibc accepts: larger blocks (a whole table) are still mapped on their own
TRIM_BYTES = 2**30  # free memory at the top of the heap that is kept
PAD_BYTES = 2**24  # by how much more than asked for the heap grows


def keep_memory() -> bool:
    """Tells malloc so, for the rest of the process's life; False where malloc does not take advice (not glibc)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((M_MMAP_THRESHOLD, MMAP_BYTES), (M_TRIM_THRESHOLD, TRIM_BYTES), (M_TOP_PAD, PAD_BYTES))
    return all([mallopt(name, value) == 1 for name, value in settings])
