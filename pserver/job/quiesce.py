"""Quiescing a server: no step changes a value while a save, a load or a shrink runs.

A step counts as running from the first change of a tensor to the change of its watermark.  A pause
waits until no step runs, and no step begins before the pause ends.  Values and watermarks are then
of one moment, between two steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pserver.job.blocking_waits import WAKE_SECONDS
from pserver.job.lifecycle import Lifecycle


class Quiesce:
    """Counts the steps that run, and knows of a pause that keeps new ones from beginning.

    Any thread may use it.  Both are guarded by the job's lock, which is not held while a
    step or a pause lasts.

    Args:
        job: for its lock.
        paused: told the seconds that each pause has lasted.
    """

    def __init__(
        self, job: Lifecycle, paused: Callable[[float], None] = lambda seconds: None
    ) -> None:
        self._job = job
        self._told = paused
        self._since = 0.0  # when the pause began
        self._running = 0
        self._paused = False

    @contextmanager
    def updating(self) -> Iterator[None]:
        """While it lasts a step changes tensors, and then its watermark.

        Raises:
            PServerError: the job ended during a pause.
        """
        with self._job.condition:
            while self._paused:
                self._job.check_running()
                self._job.condition.wait(WAKE_SECONDS)
            self._running += 1
        try:
            yield
        finally:
            with self._job.condition:
                self._running -= 1
                self._job.condition.notify_all()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While it lasts no step changes anything, and no other pause begins: a save that is asked
        again over another connection waits for the one under way.
        """
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def pause(self) -> None:
        """Begins what :meth:`paused` does; :meth:`resume` ends it."""
        with self._job.condition:
            while self._paused:
                self._job.condition.wait(WAKE_SECONDS)
            self._paused, self._since = True, time.monotonic()
            while self._running:
                self._job.condition.wait(WAKE_SECONDS)

    def resume(self) -> None:
        """Ends a pause."""
        with self._job.condition:
            self._paused, seconds = False, time.monotonic() - self._since
            self._job.condition.notify_all()
        self._told(seconds)
