"""gloo's own threads, when a group, a job or the process ends.

[Note: a group that waits]  The destructor of a group waits for its threads, one of which may be in
an operation that nobody waits for any more, and needs the interpreter's lock to free its tensors.
Whoever destroys the group has that lock: the collector, for one, which finds the group in what a
failed job has left.  So a group with such an operation is never destroyed.

[Note: a group that has just worked]  A thread of gloo's lets go of an operation's tensors after it
has told that the operation is done.  torch's reducer holds its group, and destroys it with the
interpreter's lock in its hands, where it is the last to hold it: a job that ends behind a
collective would wait for that thread, and the thread for the lock.  So a job lets these threads
come to rest before it gives up its groups.

[Note: gloo at exit]  A thread of gloo's tells the main thread that an operation is done, and frees
its tensors after that, for which it needs the interpreter's lock.  A script whose last call is a
collective is at its end by then; a thread that asks an interpreter in its end for the lock is ended
inside a destructor, which aborts the process (until Python 3.14; 1 run in 8 of a small script).  So
an interpreter ends after these threads have come to rest.  One that still waits for a peer is at
rest, too: it is not waited for.

[Note: a group that nobody waits for]  A group that was given up while it came up leaves a thread
behind, which waits for a trainer that is gone.  It ends by its timeout, or when the store goes with
trainer 0; and where the interpreter is in its end by then, it aborts the process.  So a process
that has such a thread ends after it.  Not one that ends with an error: it has failed anyway, and
the others are to hear of it.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import sys
import time
from concurrent.futures import Future, wait
from functools import cache
from pathlib import Path
from typing import Any

_NAME = "pt_gloo_runloop"
_TASKS = Path("/proc/self/task")
_LOOKS = 10  # in a row: a thread that was given the lock may not have run yet, nor been given it
_PAUSE_SECONDS = 0.002  # in which this thread leaves the lock to others
_LONGEST_SECONDS = 2.0
_SILENT_SECONDS = 2.0  # that a process waits at its end and says nothing

log = logging.getLogger(__name__)


def never_destroy(group: object) -> None:
    """Keeps a process group for as long as the process lives.  See [Note: a group that waits]."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def end_at_exit(comes_up: Future[Any], seconds: float) -> None:
    """Lets this process end after a group that was given up while it came up.

    See [Note: a group that nobody waits for].

    Args:
        comes_up: done when its thread is.
        seconds: until it gives up by itself.
    """
    atexit.register(_wait_for_end, comes_up, time.monotonic() + seconds)


def _wait_for_end(comes_up: Future[Any], end: float) -> None:
    if getattr(sys, "last_value", None) is not None:
        return
    if not wait([comes_up], _SILENT_SECONDS).not_done:
        return
    left = end - time.monotonic()
    if left > 0:
        log.warning("waits up to %.0f s for the end of a process group that was given up", left)
        wait([comes_up], left)


@cache
def rest_at_exit() -> None:
    """Lets this process end after gloo's threads have let go of their tensors.

    See [Note: gloo at exit].
    """
    atexit.register(wait_for_rest)


def wait_for_rest(tasks: Path = _TASKS, longest_seconds: float = _LONGEST_SECONDS) -> bool:
    """Waits until gloo's threads sleep.

    Args:
        tasks: the folder that Linux describes this process's threads in; elsewhere there is none,
            and this is one pause.
        longest_seconds: after which it gives up.

    Returns:
        They sleep.
    """
    end, resting = time.monotonic() + longest_seconds, 0
    while resting < _LOOKS and time.monotonic() < end:
        time.sleep(_PAUSE_SECONDS)
        resting = resting + 1 if _at_rest(tasks) else 0
    return resting == _LOOKS


def _at_rest(tasks: Path) -> bool:
    """No thread of gloo's runs, or waits for a core."""
    return all(_state(stat) == "S" for stat in tasks.glob("*/stat"))


def _state(stat: Path) -> str:
    """A thread's state; "S", asleep, of any that is not gloo's or has ended.

    proc(5): ``number (name) state ...``.
    """
    try:
        _, _, rest = stat.read_text().partition(f"({_NAME}) ")
    except OSError:
        return "S"
    return rest[:1] or "S"
