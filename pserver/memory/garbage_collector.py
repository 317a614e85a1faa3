"""Python's garbage collector, kept away from what lives as long as the process does.

[Note: frozen modules]  torch and its compiler are 300,000 objects.  The collector visits them again
and again while they are imported (0.3 s), in every full collection (0.2 s, in which no thread
runs), and once more when the process ends (0.5 s, in which a trainer that has been told to end is
still there).  None of them is ever garbage.  What is frozen is never visited again; garbage that is
made later is collected as ever.
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache


@contextmanager
def frozen_imports() -> Iterator[None]:
    """While it lasts nothing is collected, and what there is at its end never will be.

    For a process of ours, before it has anything but modules.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()


@cache
def freeze_at_exit() -> None:
    """Lets a user's process end without a last look at all objects; until then it collects."""
    atexit.register(gc.freeze)
