"""The waits of a job's threads: each at an event of its own, under the job's lock.

A wait, from the thread's asking whether it is done::

    asks --done--------------------------------------------------> over
     |  ^
     |  `--the event is told, all are woken, or WAKE_SECONDS--.
     `--not yet--> STANDS ------------------------------------'
                     `--the deadline------------------------------> over, and not done

[Note: one wake for one waiter]  A server has a thread for each stream, and most of them wait: for a
step's record, a turn, a round, an update.  If all stood at one place, each change would wake them
all: a step of 64 trainers would switch threads hundreds of times.  So each thing that is waited for
has an event of its own, and whoever makes it come true tells that event.  It may tell as many
threads as can go on, where one of them is enough.

No wake-up is lost: a thread asks whether it is done, and goes to stand, under the job's lock; an
event is told under the same lock, after what it is about has changed.  What ends waits from
outside wakes every thread that stands: a failure, a loss, a server that drains, a trainer that
comes, leaves or finishes.  ``WAKE_SECONDS`` is a net below that, of which nothing depends: the
suite passes with an hour.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from pserver import polling

WAKE_SECONDS = 1.0  # after which a thread that stands asks again, whatever it has been told
ALL = 2**31  # threads

log = logging.getLogger(__name__)


class Event:
    """Something that threads wait for; they stand here until it is told.

    The caller holds the job's lock.

    Args:
        lock: the job's.

    Attributes:
        standing: how many threads stand here, or were told and have not gone on yet.
    """

    __slots__ = ("_condition", "_lock", "standing")

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._condition: threading.Condition | None = None  # from the first thread on
        self.standing = 0

    @property
    def condition(self) -> threading.Condition:
        """The condition at which the threads stand."""
        if self._condition is None:
            self._condition = threading.Condition(self._lock)
        return self._condition

    def tell(self, most: int = ALL) -> None:
        """It has come true, or may have: threads that stand here ask again.

        Args:
            most: how many of them, those that have stood longest.
        """
        if self.standing:
            self.condition.notify(most)


class Waits:
    """The waits of one job.  See [Note: one wake for one waiter].

    The caller holds the lock, which is free while a thread stands.

    Example::

        waits = Waits()
        arrived = waits.event()
        with waits.lock:  # one thread
            waits.wait(arrived, lambda: bool(steps))
        with waits.lock:  # another one
            steps.append(step)
            arrived.tell()

    Attributes:
        lock: the job's: see [Note: the job's lock] in lifecycle.py.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._stood_at: dict[Event, None] = {}  # where threads stand

    def event(self) -> Event:
        """A new one, at which nobody stands."""
        return Event(self.lock)

    def wake_all(self) -> None:
        """Something has changed that may concern any wait: all ask again."""
        for event in self._stood_at:
            event.tell()

    def wait(
        self,
        event: Event,
        done: Callable[[], bool],
        for_whom: Callable[[], str] | None = None,
        deadline: float = math.inf,
        check: Callable[[], None] = lambda: None,
    ) -> bool:
        """Waits until ``done``, which the event tells.

        Args:
            for_whom: the line that is logged when the wait has lasted
                :data:`pserver.polling.NOTICE_SECONDS`: who waits, and for whom.
            deadline: the longest, by :func:`time.monotonic`.
            check: raises what ends the wait; asked before the thread stands.

        Returns:
            Whether it is done; False where the deadline has come before.

        Raises:
            Exception: what ``done`` and ``check`` raise.
        """
        if done():
            return True
        now = time.monotonic()
        notice = math.inf if for_whom is None else now + polling.NOTICE_SECONDS
        while True:
            check()
            if now >= deadline:
                return False
            end = min(now + WAKE_SECONDS, deadline)
            told = self._stand(event, min(end, notice) - now)
            now = time.monotonic()
            if now >= notice and for_whom is not None:
                log.warning("%s", for_whom())
                notice = math.inf
                if not told and now < end:
                    self._stand(event, end - now)  # nothing has changed
                    now = time.monotonic()
            if done():
                return True

    def _stand(self, event: Event, seconds: float) -> bool:
        """Gives whether the thread was told."""
        event.standing += 1
        self._stood_at[event] = None
        try:
            return event.condition.wait(seconds)
        finally:
            event.standing -= 1
            if not event.standing:
                del self._stood_at[event]


def patience(end: float = math.inf) -> float:
    """How long to stand at a condition that has another lock than the job's, before one asks again.

    Args:
        end: of the wait, by :func:`time.monotonic`.
    """
    return max(0.0, min(WAKE_SECONDS, end - time.monotonic()))
