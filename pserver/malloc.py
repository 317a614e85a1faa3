"""Keeps freed memory in the process, so that the buffers of the next step are warm.

[Note: warm buffers]  A page that the kernel has just mapped costs a fault and a clearing: copying
into fresh pages runs at less than a tenth of the speed of copying into pages used before.  By
default glibc maps and unmaps every buffer of more than a few hundred KB, which is every frame of
ours, so each would be paid for anew.

[Note: holes]  The price is that a hole in the heap stays where it is: what a start took and gave
back, and the places that large tensors, freed and made again at each step, left for others when
something small had settled in them.  So a trainer gives the pages of its holes back after it has
joined and after its 1st, 2nd, 4th, ... step, which costs nothing much, because they are seldom, and
keeps only what steps use.  A server does the same.  Large buffers that are kept from step to step
do not come from the heap at all.

[Note: one heap]  By default glibc gives each thread a heap of its own, and what one has freed the
others cannot use.  A server's gradients come in through one thread, are freed by another, and are
announced by a third: it held up to half as much again.  This has to be arranged before any thread
is made, so nothing is imported here that makes some (torch does).
"""

from __future__ import annotations

import ctypes

M_ARENA_MAX = -8  # malloc.h
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
# the most that glibc accepts: larger blocks (a whole table) are still mapped on their own
MMAP_BYTES = 2**25
TRIM_BYTES = 2**30  # free memory at the top of the heap that is kept
PAD_BYTES = 2**24  # by how much more than asked for the heap grows


def share_heap() -> bool:
    """Tells malloc so, for threads that are made from here on; False where malloc does not take
    advice (not glibc).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(M_ARENA_MAX, 1) == 1


def keep_memory(shared: bool = False) -> bool:
    """Tells malloc so, for the rest of the process's life; False where malloc does not take advice
    (not glibc).

    Args:
        shared: all threads use one heap; see [Note: one heap].
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
    """Gives the pages of the heap's holes back; False where malloc cannot.  See [Note: holes]."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and trim(0) == 1
