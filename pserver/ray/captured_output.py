"""The output of a function that trains in the actor's own process."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from pserver.side_business import SideBusiness

DRAIN_SECONDS = 1.0  # a process that the function has started may hold the pipe open for longer


@contextmanager
def captured_output(say: Callable[[str], None]) -> Iterator[None]:
    """While it lasts, what this process writes to its descriptors 1 and 2 becomes lines.

    Args:
        say: called for each line, in a thread of its own.
    """
    reads, writes = os.pipe()
    kept = os.dup(1), os.dup(2)
    reader = threading.Thread(target=_read, args=(reads, say), name="output", daemon=True)
    _flush()
    os.dup2(writes, 1)
    os.dup2(writes, 2)
    os.close(writes)
    reader.start()
    try:
        yield
    finally:
        _flush()
        for number, descriptor in zip((1, 2), kept, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        reader.join(DRAIN_SECONDS)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _read(descriptor: int, say: Callable[[str], None]) -> None:
    with os.fdopen(descriptor, encoding="utf-8", errors="replace", newline="\n") as lines:
        saying = SideBusiness("what this process prints")
        for line in lines:
            saying.do(partial(say, line.rstrip("\n").rpartition("\r")[2]))
