"""Quiescing a server: no step changes a value while a save, a load or a shrink runs.

A step counts as running from the first change of a tensor to the change of its watermark.  A pause
waits until no step runs, and no step begins before the pause ends.  Values and watermarks are then
of one moment, between two steps.

A save pauses for its cut only (server_cut.py), which it reads while steps go on.

A call that has a place in the job's log holds the steps whose records stand behind it, until it has
been carried out (logged_calls.py).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pserver.errors import Busy
from pserver.job.lifecycle import Lifecycle
from pserver.undone import or_undone

CUT_SECONDS = 600.0  # for which a load or a shrink waits for a save that is being written


class Quiesce:
    """Counts the steps that run, and knows of a pause that keeps new ones from beginning.

    Any thread may use it.  Both are guarded by the job's lock, which is not held while a
    step or a pause lasts.

    Args:
        job: for its lock.
        paused: told the seconds that each pause has lasted.

    Attributes:
        condition: the job's.
        rested: the event that a step has ended, or that what holds steps has: for who waits until
            none runs, or until certain ones are applied.
    """

    def __init__(
        self, job: Lifecycle, paused: Callable[[float], None] = lambda seconds: None
    ) -> None:
        self._job, self.condition = job, job.condition
        self._told = paused
        self.rested = job.waits.event()
        self._goes_on = job.waits.event()  # steps may begin
        self._since = 0.0  # when the pause began
        self._running = 0
        self._paused = False
        self._cut = self._reading = False  # one is to be taken; it is taken, and read
        self._held = deque[int]()  # records behind which steps wait

    @contextmanager
    def updating(self, record: int = 0) -> Iterator[None]:
        """While it lasts a step changes tensors, and then its watermark.

        Args:
            record: of the step.

        Raises:
            PServerError: the job ended during a pause.
        """
        with self._job.lock:
            self.begin_step(record)
        try:
            yield
        finally:
            with self._job.lock:
                self.end_step()

    # ---- the caller holds the job's lock ----

    def begin_step(self, record: int) -> None:
        """Begins what :meth:`updating` does; :meth:`end_step` ends it."""
        if self._is_held(record):
            self._job.wait(self._goes_on, lambda: not self._is_held(record))
        self._running += 1

    def _is_held(self, record: int) -> bool:
        return self._paused or (bool(self._held) and record > self._held[0])

    def end_step(self) -> None:
        """A step has changed all that it changes."""
        self._running -= 1
        self.rested.tell()

    def hold_behind(self, record: int) -> None:
        """Steps whose records stand behind this one wait until :meth:`let_go`."""
        self._held.append(record)

    @property
    def held_behind(self) -> int:
        """The first record behind which steps wait; 0: none does."""
        return self._held[0] if self._held else 0

    def let_go(self, record: int) -> None:
        """Steps do not wait behind this record any more."""
        if record in self._held:
            self._held.remove(record)
            self._let_on()

    def _let_on(self) -> None:
        """Tells held steps, and whoever holds them next, that they are held no more."""
        self._goes_on.tell()
        self.rested.tell()

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

    def begin_cut(self, seconds: float = 0.0) -> None:
        """From here on until :meth:`end_cut` a cut is to be taken, and nobody begins another.

        Args:
            seconds: for how long to wait for one that is not at its end.

        Raises:
            Busy: it still is not.
        """
        with self._job.lock:
            self._await(lambda: self._cut, seconds)
            self._cut = True

    def read_cut(self) -> None:
        """It is taken, and read from here on."""
        with self._job.lock:
            self._reading = True

    def end_cut(self) -> None:
        """The cut is not read any more."""
        with self._job.lock:
            self._cut = self._reading = False
            self.rested.tell()

    def await_cut(self, seconds: float = CUT_SECONDS) -> None:
        """Returns when no cut is read: for who changes more than a step does, of which a cut would
        have to copy all.  One that is to be taken may stand behind that in the job's log, so it is
        not waited for.

        Raises:
            Busy: one is read still, after so many seconds.
        """
        with self._job.lock:
            self._await(lambda: self._reading, seconds)

    def _await(self, busy: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        if not self._job.waits.wait(self.rested, lambda: not busy(), deadline=end):
            raise Busy("a save is being written here: ask again when it is done")

    def pause(self, given_up: Callable[[], bool] = lambda: False) -> bool:
        """Begins what :meth:`paused` does; :meth:`resume` ends it.

        Args:
            given_up: asked while another pause lasts, under the job's lock: no more is wanted.
                Whoever gives up tells ``rested``.

        Returns:
            Whether it has begun.
        """
        with self._job.lock:
            self._job.waits.wait(self.rested, lambda: not self._paused or given_up())
            if self._paused:
                return False
            self._paused, self._since = True, time.monotonic()
            with or_undone(self.resume):
                self._job.waits.wait(self.rested, lambda: not self._running)
            return True

    def resume(self) -> None:
        """Ends a pause."""
        with self._job.lock:
            self._paused, seconds = False, time.monotonic() - self._since
            self._job.wake_all()  # watermarks may have been loaded
        self._told(seconds)
