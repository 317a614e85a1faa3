"""A question to a job's servers: ``launch`` asks by another process, because asking imports gRPC,
and ``launch`` does not.

[Note: no answer is no answer]  That process may take long to begin, on a busy host or a cold disk,
and a server may be too busy to answer.  Neither tells the state of the job.  So a server that does
not answer is asked again, until the heartbeat timeout has passed twice; a missing answer then
counts as unknown, and not as no.  ``launch`` continues meanwhile: it takes signals, and the ends of
its processes.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from pserver.timeouts import Timeouts
from transpiler.files import bounded_json

BEGIN_SECONDS = 120.0  # for the process that asks to begin: imports, from a cold disk


def patience(heartbeat_timeout_seconds: float | None) -> float:
    """The seconds for which servers that do not answer are asked again.

    Args:
        heartbeat_timeout_seconds: of the job; None: the default.
    """
    if heartbeat_timeout_seconds is None:
        return Timeouts().question
    return Timeouts(heartbeat_timeout_seconds).question


class Question:
    """A process that asks.  See [Note: no answer is no answer].

    Args:
        command: that starts it; it prints one line of JSON.
        over: called, in a thread, when it has ended.

    Attributes:
        answer: that line; nothing where it has ended without one.  None: it has not ended.
    """

    def __init__(self, command: Sequence[str], over: Callable[[], None]) -> None:
        self.answer: Mapping[str, Any] | None = None
        self._over = over
        self._asking = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        threading.Thread(target=self._read, name="question", daemon=True).start()

    def end(self) -> None:
        """Ends the process, whatever it does."""
        self._asking.kill()
        self._asking.wait()

    def _read(self) -> None:
        answer: Mapping[str, Any] = {}
        assert self._asking.stdout is not None
        with suppress(OSError, ValueError), self._asking.stdout as said:
            answer = bounded_json.loads(said.read())
        self.answer = answer
        self._over()
