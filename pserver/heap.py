"""One heap for all threads of a server; imports nothing that makes threads, because it has to be
first.

By default glibc gives each thread a heap of its own, and what one has freed the others cannot use.
A server's gradients come in through one thread, are freed by another, and are announced by a third:
it held up to half as much again."""

from __future__ import annotations

import ctypes

M_ARENA_MAX = -8  # malloc.h


def share_heap() -> bool:
    """Tells malloc so, for threads that are made from here on; False where malloc does not take
    advice (not glibc).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(M_ARENA_MAX, 1) == 1
