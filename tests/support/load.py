"""The load of this machine, and the limits of waits, which grow with it.

[Note: limits and load]  A limit ends what hangs; it does not judge how fast a machine is.  Limits
are written for a machine that has what ``make test`` itself gives it to do, up to ``USUAL`` running
processes a core.  Where more runs, whatever is waited for takes as much longer, and so does the
limit: in proportion, up to ``MOST`` times, which still ends a hang.  The load is read when a wait
begins, and again when its limit has come: the system's figure is an average of the last minute, so
it says little when the load has just begun.  A file's highest load holds for the rest of the file:
what has been told a long deadline may be awaited after the load has gone.

::

    deadline = Deadline(20.0)
    while not holds():
        assert not deadline.over
    patiently(process.wait, 20.0)
    result(future, 20.0)
    run(command, timeout=100)       # as subprocess.run
    scaled(3.0)                     # for a limit that somebody else keeps: a process under test
"""

from __future__ import annotations

import os
import queue
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

USUAL = 2.0
MOST = 6.0
Result = TypeVar("Result")
LATE = (TimeoutError, subprocess.TimeoutExpired, queue.Empty)
_highest = 1.0  # of this file


def begin() -> None:
    """Forgets the load of the past: another file begins."""
    global _highest
    _highest = 1.0


def factor() -> float:
    """By how much limits grow: 1 to ``MOST``, and never less than before in the same file."""
    global _highest
    now = os.getloadavg()[0] / (USUAL * (os.cpu_count() or 1))
    _highest = max(_highest, min(now, MOST))
    return _highest


def scaled(seconds: float) -> float:
    """A limit, as it is at the load of now."""
    return seconds * factor()


class Deadline:
    """The end of a wait.

    Args:
        seconds: from now on, at the usual load.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._began = seconds, time.monotonic()
        factor()

    @property
    def limit(self) -> float:
        """How long the wait may take at the highest load so far, in seconds."""
        return scaled(self._seconds)

    @property
    def left(self) -> float:
        """Seconds to the end; 0 when it has come."""
        return max(0.0, self._began + self.limit - time.monotonic())

    @property
    def over(self) -> bool:
        """Whether the end has come."""
        return not self.left


def patiently(attempt: Callable[[float], Result], seconds: float) -> Result:
    """Waits, and goes on where the load has grown in the meantime.

    Args:
        attempt: waits at most the seconds that it gets; it returns False or raises one of ``LATE``
            when they are over.

    Returns:
        what ``attempt`` has returned last.
    """
    deadline = Deadline(seconds)
    while True:
        try:
            found = attempt(deadline.left)
            if found is not False or deadline.over:
                return found
        except LATE:
            if deadline.over:
                raise


def result(future: Future[Result], seconds: float) -> Result:
    """A future's result, which may be an exception of any kind."""
    patiently(lambda left: bool(wait([future], left).done), seconds)
    return future.result(0)


def run(
    command: Sequence[str | os.PathLike[str]],
    *,
    timeout: float,
    check: bool = False,
    capture_output: bool = False,
    input: str | bytes | None = None,
    **named: Any,
) -> subprocess.CompletedProcess[Any]:
    """``subprocess.run``, of which the timeout grows with the load."""
    if capture_output:
        named |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        named["stdin"] = subprocess.PIPE
    with subprocess.Popen(command, **named) as process:
        try:
            out, err = communicated(process, timeout, input)
        except BaseException:
            process.kill()
            raise
        done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def communicated(
    process: subprocess.Popen[Any], seconds: float, input: str | bytes | None = None
) -> tuple[Any, Any]:
    """What a process has said until its end."""
    given = [input]

    def attempt(left: float) -> tuple[Any, Any]:
        return process.communicate(given.pop() if given else None, left)

    return patiently(attempt, seconds)
