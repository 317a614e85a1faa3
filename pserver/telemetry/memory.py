"""The memory of this process: kept buffers, returned holes, resident bytes.

[Note: frozen modules]  torch and its compiler are 300,000 objects.  The collector visits them again
and again while they are imported (0.3 s), in every full collection (0.2 s, in which no thread
runs), and once more when the process ends (0.5 s, in which a trainer that is to end still exists).
None of them is ever garbage.  Frozen objects are never visited again; later garbage is collected as
usual.

[Note: warm buffers]  A page that the kernel has just mapped costs a page fault and is cleared
first: copying into fresh pages runs at less than a tenth of the speed of copying into pages used
before.  By default glibc maps and unmaps every buffer of more than a few hundred KB.  Every frame
is such a buffer, and would pay that price each time.

[Note: holes]  Memory that is kept has holes: what the start-up used and freed, and the places of
large tensors that were freed when a small allocation had moved into them.  So a trainer gives the
pages of its holes back to the kernel after it has joined and after its 1st, 2nd, 4th, ... step, and
keeps only what steps use.  Such calls are rare and cost little.  A server does the same.  Large
buffers that are kept from step to step do not come from the heap at all.

[Note: one heap]  By default glibc gives each thread a heap of its own, and one thread cannot use
what another has freed.  In a server one thread receives a gradient and another frees it: separate
heaps took up to half as much memory again.  The setting must be made before any thread starts, so
this module imports nothing that starts threads (torch does).
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from pserver.own_packages import uncollected

# ---- garbage collector ----
#
# Python's garbage collector, kept away from what lives as long as the process does.


@contextmanager
def frozen_imports() -> Iterator[None]:
    """Suspends collection while the block runs, and freezes the objects that exist at its end.

    For a process of ours, before it has anything but modules.
    """
    with uncollected():
        try:
            yield
        finally:
            gc.freeze()


@cache
def freeze_at_exit() -> None:
    """Lets a user's process end without a last collection; until then it collects."""
    atexit.register(gc.freeze)


# ---- malloc ----
#
# Advice to malloc: freed memory stays in the process, so that the buffers of the next step are
# warm.


M_ARENA_MAX = -8  # malloc.h
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
# the largest value that glibc accepts: larger blocks (a whole table) are still mapped on their own
MMAP_BYTES = 2**25
TRIM_BYTES = 2**30  # free memory at the top of the heap that is kept
PAD_BYTES = 2**24  # by how much more than asked for the heap grows


def share_heap() -> bool:
    """Makes threads that start from here on share one heap.  See [Note: one heap].

    Returns:
        False where malloc takes no such advice (not glibc).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(M_ARENA_MAX, 1) == 1


def keep_memory(shared: bool = False) -> bool:
    """Makes malloc keep freed memory for the rest of the process's life.  See [Note: warm buffers].

    Args:
        shared: all threads use one heap; see [Note: one heap].

    Returns:
        False where malloc takes no such advice (not glibc).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = (
        (M_MMAP_THRESHOLD, MMAP_BYTES),
        (M_TRIM_THRESHOLD, TRIM_BYTES),
        (M_TOP_PAD, PAD_BYTES),
    )
    return all([mallopt(name, value) == 1 for name, value in settings]) and (
        not shared or share_heap()
    )


def trim_memory() -> bool:
    """Gives the pages of the heap's holes back to the kernel.  See [Note: holes].

    Returns:
        False where there were none, or malloc cannot.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and trim(0) == 1


# ---- resident ----
#
# How much memory this process has.


STATM = Path("/proc/self/statm")


def resident_bytes(statm: Path = STATM) -> int:
    """Bytes of this process that are in memory now; 0 where the system has no such file.

    Args:
        statm: Linux's file of sizes in pages; the second number is the resident one.

    Example:
        >>> resident_bytes(Path("/nowhere"))
        0
    """
    try:
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
