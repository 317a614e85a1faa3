"""The clock by which a process measures the silence of others: it counts the time in which this
process has run.

[Note: one's own pause]  A process may not run for a while: SIGSTOP, a debugger, a laptop's lid, a
virtual machine that is moved, a host that swaps, or a library that keeps the interpreter's lock.
Messages of others wait unread meanwhile, and they may have been stopped with it.  So a process that
measures silence measures its own: a thread here ticks a few times a second, and where two ticks are
more than ``PAUSE_SECONDS`` apart this process did not run between them::

    the system's clock   ....tick.tick.tick.............(away)............tick.tick.tick.tick
    this clock           ....0.2..0.2..0.2...........................1....0....0....0.2..0.2
                                                                          (stands still)

Others need time, too, to send again, as they may resume one after the other.  So the clock stands
still after a pause for as long as the pause was, up to ``STILL_SECONDS``.

Both are capped, so that a server which hardly ever runs still loses a trainer that is dead: a pause
counts as ``COUNTED_SECONDS``, and the clock does not stand still for longer than it has counted
since the pause before.

It is a clock for the silence of others.  A process that holds a lease for a time, and does not run,
may have lost it: the system's clock decides that (``time.monotonic``), never this one.  And a
message is due by the system's clock: after a pause a process sends at once.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

TICK_SECONDS = 0.2
PAUSE_SECONDS = 1.0  # between two ticks: more is a pause
COUNTED_SECONDS = PAUSE_SECONDS  # of a pause: as of a tick that comes just in time
STILL_SECONDS = 10.0  # behind a pause, at most


class _State(NamedTuple):
    """The state that one tick leaves for the next: replaced, never changed.

    Attributes:
        ticked: when that was, by the system's clock.
        still: the end of the time in which the clock stands still, by the system's.
        away: seconds that do not count.
        began: what this clock showed at the end of the last pause.
    """

    ticked: float
    still: float
    away: float
    began: float

    def shows(self, now: float) -> float:
        """The time of this clock when the system's shows ``now``."""
        return max(now, self.still) - self.away


class RunningClock:
    """Seconds in which this process has run; they never go back.  Any thread may ask.

    See [Note: one's own pause].  It sees pauses while silence is measured by it (:meth:`ticking`);
    otherwise it runs as the system's clock.

    Args:
        system: the system's monotonic clock, in seconds.  Another one than ``time.monotonic`` needs
            no thread: each question is a tick.

    Attributes:
        last_pause: when the last pause ended, by the system's clock, and its seconds; zeros: there
            was none.

    Example:
        >>> from pserver.running_clock import RunningClock
        >>> now = [100.0]
        >>> clock = RunningClock(lambda: now[0])
        >>> begun = clock()
        >>> now[0] += 30  # the process was stopped
        >>> clock() - begun
        1.0
    """

    def __init__(self, system: Callable[[], float] = time.monotonic) -> None:
        self._system = system
        self._asks = system is not time.monotonic  # whether each question is a tick
        # guards the three below; nothing blocks under it.  _state may be read without it
        self._lock = threading.Lock()
        now = system()
        self._state = _State(now, now, 0.0, now - STILL_SECONDS)
        self._holders = 0
        self._ended = threading.Event()  # of the present thread
        self.last_pause = (0.0, 0.0)
        if not self._asks:
            os.register_at_fork(after_in_child=self._again)

    def __call__(self) -> float:
        """Seconds, from any beginning."""
        state = self._state
        now = self._system()
        if self._asks or (self._holders and now - state.ticked > PAUSE_SECONDS):
            return self._tick()
        return state.shows(now)

    def away_since(self, at: float) -> float:
        """The seconds of the last pause, if it ended after ``at``; otherwise 0.

        Args:
            at: by the system's clock.
        """
        self()  # sees a pause that has ended just now
        ended, seconds = self.last_pause
        return seconds if ended > at else 0.0

    @contextmanager
    def ticking(self) -> Iterator[None]:
        """Measures pauses while the block runs."""
        with self._lock:
            self._holders += 1
            ended = self._ended
            if self._holders == 1 and not self._asks:
                self._state = self._state._replace(ticked=self._system())
                ended = self._ended = threading.Event()
                threading.Thread(
                    target=self._run, args=(ended,), name="running clock", daemon=True
                ).start()
        try:
            yield
        finally:
            with self._lock:
                self._holders = max(0, self._holders - 1)  # of a forked child they are none
                if not self._holders:
                    ended.set()

    def _again(self) -> None:
        """In a forked child: another thread's lock would be held for ever, and no thread ticks."""
        self._lock, self._holders = threading.Lock(), 0

    def _tick(self) -> float:
        with self._lock:
            state, now = self._state, self._system()
            seconds = now - state.ticked
            if seconds <= PAUSE_SECONDS:
                self._state = state._replace(ticked=now)
            else:
                shown = state.shows(state.ticked) + COUNTED_SECONDS
                still = min(seconds, STILL_SECONDS, shown - state.began)
                self._state = _State(now, now + still, now + still - shown, shown)
                self.last_pause = now, seconds
            return self._state.shows(now)

    def _run(self, ended: threading.Event) -> None:
        while not ended.wait(TICK_SECONDS):
            self._tick()


RUNNING = RunningClock()  # of this process
