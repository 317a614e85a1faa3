"""The side business of a thread: filing a line, showing it, reporting its state.

[Note: side business]  Others depend on a thread that drains a pipe, ticks, listens or sends
heartbeats: where it ends, a job stands still, in a ``print`` whose pipe is full.  What it does
beside that may fail: a disk is full, a terminal has gone, descriptors are short.  That is one
warning, and the thread continues; it tries again the next time, and logs when it works again.

An onlooker (``pserver/onlookers.py``) is off after its first error, whatever that is; a side
business fails by the system's errors alone, which may pass.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

log = logging.getLogger(__name__)

R = TypeVar("R")


class SideBusiness:
    """An activity of a thread beside its work.  Any thread may use it.

    See [Note: side business].

    Args:
        what: its name, for the warning: "the log logs/server-0.log".
        say: called with a sentence; None: a warning of this module.

    Attributes:
        failures: how often it has failed since it last worked.

    Example:
        >>> from pserver.side_business import SideBusiness
        >>> said = []
        >>> filing = SideBusiness("the log", said.append)
        >>> def full():
        ...     raise OSError(28, "No space left on device")
        >>> filing.do(full), filing.do(full), filing.do(lambda: 7)
        (None, None, 7)
        >>> for line in said:
        ...     print(line)
        the log: [Errno 28] No space left on device; will be tried again, all else continues
        the log: works again, after 2 failures
    """

    def __init__(self, what: str, say: Callable[[str], None] | None = None) -> None:
        self._what, self._say = what, say or _warn
        self._lock = threading.Lock()  # guards the one below
        self.failures = 0

    def do(self, call: Callable[[], R]) -> R | None:
        """Calls the function; returns its result, or None where the system makes it fail."""
        try:
            found = call()
        except OSError as error:
            with self._lock:
                self.failures += 1
                first = self.failures == 1
            if first:
                self._tell(f"{self._what}: {error}; will be tried again, all else continues")
            return None
        if self.failures:
            with self._lock:
                count, self.failures = self.failures, 0
            if count:
                times = "failure" if count == 1 else "failures"
                self._tell(f"{self._what}: works again, after {count} {times}")
        return found

    def _tell(self, text: str) -> None:
        try:
            self._say(text)
        except OSError:  # where it would be said is out of order, too
            return


def _warn(text: str) -> None:
    log.warning("%s", text)
