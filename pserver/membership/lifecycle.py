"""The state of a server's job: its phase, the error that ended it, and the lock of all its parts.

::

          trainer 0 joins          its values have arrived          all have left
    EMPTY ---------------> INSTALLING ---------------> SERVING ---------------> EMPTY
                               |                          |
                               `-------- a failure -------+--> FAILED ----------> EMPTY
                                                                       reset, or the next Join

[Note: kept values]  A failed job leaves its values: ``pserver save`` writes them.  So a
failed server lets another job in only after ``--keep-failed`` seconds.  A Join with the same
fingerprint (the same job, started again) does not wait, nor does one after ``pserver reset``.  A
job without an update has nothing to lose, and is not kept.

A server that starts with a program (``--program``) begins in SERVING and returns there.

[Note: the job's lock]  ``Lifecycle.lock`` is a re-entrant lock.  It guards the bookkeeping of the
job room: the state, the members and their watermarks, sync rounds, update tasks.  It is the outer
lock: under it a thread may take a snapshot's lock for an instant; a thread that holds a slice's, a
snapshot's or a table's lock never takes it.  A thread holds it for bookkeeping only: never while
tensors are merged, updated or copied between processes, never while anything is sent.

A thread that changes what others may wait for notifies the event of that: see [Note: one wake for
one waiter] in waits.py.  Control calls, which wait for one another, share one event, ``changed``;
its condition is ``Lifecycle.condition``, at which no step waits.
"""

from __future__ import annotations

import enum
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from pserver import wire_pb2 as wire
from pserver.errors import Draining, FingerprintMismatch, JobFailed, PServerError, TrainerLost
from pserver.membership.waits import WaitEvent, Waits
from pserver.onlookers import onlooker
from pserver.telemetry.logs import WIDTH, LimitedLog

# ---- events ----
#
# The events of a server: joins, losses, checkpoints, refusals; for observers.


KEPT = 32  # of each kind: many of one kind do not push out another


class Events:
    """The last events of each kind.  Any thread may call it.  They outlive the job.

    Args:
        clock: seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # guards the next
        self._by_kind: dict[str, deque[wire.Event]] = {}

    @onlooker("the list of events")
    def add(self, kind: str, text: str) -> None:
        """Adds an event.

        Args:
            kind: one of a few words, none of which comes from a peer.
            text: a sentence, which is cut where it is long.
        """
        with self._lock:
            event = wire.Event(
                number=next(self._numbers), time=self._clock(), kind=kind, text=text[:WIDTH]
            )
            self._by_kind.setdefault(kind, deque(maxlen=KEPT)).append(event)

    def all(self) -> list[wire.Event]:
        """The kept events, in the order in which they happened."""
        with self._lock:
            kept = [event for events in self._by_kind.values() for event in events]
        return sorted(kept, key=lambda event: event.number)


class EventLog(LimitedLog):
    """Logs events, and keeps them.

    Args:
        log: where lines go.
        events: where events go.
    """

    def __init__(self, log: logging.Logger, events: Events) -> None:
        super().__init__(log)
        self._events = events

    def log(
        self,
        kind: str,
        text: str,
        level: int = logging.WARNING,
        error: BaseException | None = None,
    ) -> None:
        """See :class:`LimitedLog`; the first word of ``kind`` is the event's kind."""
        self._events.add(kind.partition(" ")[0], text)
        super().log(kind, text, level, error)


# ---- lifecycle ----


log = logging.getLogger(__name__)

T = TypeVar("T")


class JobState(enum.Enum):
    """The phase that a server's job is in; the values are the words that ``status`` shows."""

    EMPTY = "empty"
    INSTALLING = "installing"
    SERVING = "serving"
    FAILED = "failed"


class Lifecycle:
    """The phase of one server's job, and what the job's threads wait for.

    Every method may be called from any thread; each takes the lock itself, but where it says that
    the caller holds it.

    Attributes:
        waits: those of the job's threads.
        lock: see [Note: the job's lock].
        changed: the event of control calls: of the members, and of texts at barriers.
        condition: its condition, over ``lock``.
        state: guarded by ``lock``.
        failure: what ended the present job; None while all is well.
        failed_at: when that was, in seconds of the clock.
        last_failure: as ``failure``, but it stays when the server is empty again.
        succeeded: the last job has ended, and every trainer has finished.
        draining: the server is shutting down and takes no new step.
        ended: set when a job ends here, because its trainers left or because it failed.
        events: the events of this server.

    Args:
        clock: seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.waits = Waits()
        self.lock = self.waits.lock
        self.changed = self.waits.event()
        self.condition = self.changed.condition
        self.state = JobState.EMPTY
        self.failure: PServerError | None = None
        self.failed_at = 0.0
        self.last_failure: PServerError | None = None
        self.succeeded = False
        self.draining = False
        self.ended = threading.Event()
        self.events = Events()
        self._log = EventLog(log, self.events)

    def begin(self) -> None:
        """Begins a new job: trainer 0 has joined an empty server."""
        with self.lock:
            self.failure = self.last_failure = None
            self.succeeded = False
            self.ended.clear()
            self.state = JobState.INSTALLING

    def empty(self) -> None:
        """Makes the server empty: it has no job any more."""
        with self.lock:
            self.failure = None
            self.state = JobState.EMPTY

    def succeed(self) -> None:
        """Ends the job well: every trainer has finished, and left."""
        with self.lock:
            self.succeeded, self.last_failure = True, None

    def fail(self, error: PServerError) -> None:
        """Ends the job for all its trainers: each one that waits, or asks next, gets ``error``.

        The first error stays.  An empty server has nothing to fail.
        """
        with self.lock:
            if self.failure is None and self.state is not JobState.EMPTY:
                self.failure = self.last_failure = error
                self.failed_at = self._clock()
                self.succeeded = False
                self.state = JobState.FAILED
                self._log.log("failed", f"the job failed: {error}", logging.ERROR)
            self.wake_all()

    def wake_all(self) -> None:
        """Wakes all waits after a change that may concern any of them.  The caller holds the
        lock.
        """
        self.waits.wake_all()
        self.condition.notify_all()

    def wait(self, event: WaitEvent, done: Callable[[], bool], deadline: float = math.inf) -> bool:
        """Waits until ``done``, of which the event notifies.  The caller holds the lock.

        Args:
            deadline: the longest, by :func:`time.monotonic`.

        Returns:
            Whether it is done; False where the deadline has come before.

        Raises:
            PServerError: what ended the job meanwhile.
        """
        return self.waits.wait(event, done, deadline=deadline, check=self.check_running)

    def log_event(self, kind: str, text: str) -> None:
        """Logs something after which the job continues, and keeps it as an event."""
        self._log.log(kind, text)

    def lose(self, error: TrainerLost) -> None:
        """Ends the job, because a trainer is lost."""
        with self.lock:
            self.events.add("lost", str(error))
            self.fail(error)

    def or_fail(self, work: Callable[[], T]) -> T:
        """Calls ``work``; if it raises, the job fails: tensors may be half updated, or trainers
        disagree.
        """
        try:
            return work()
        except FingerprintMismatch as error:
            self.fail(error)
            raise
        except Exception as error:
            self.fail(JobFailed(f"the server could not update: {type(error).__name__}: {error}"))
            raise

    def drain(self) -> None:
        """Shuts the server down: from now on every wait and every new step raises."""
        with self.lock:
            if not self.draining:
                self.events.add("draining", "the server is shutting down")
            self.draining = True
            self.wake_all()
            self.ended.set()

    def check_running(self) -> None:
        """Returns if the job runs.

        Raises:
            PServerError: what ended it.
            Draining: the server is shutting down.
        """
        if self.failure is not None:
            raise self.failure
        if self.draining:
            raise Draining("the server is shutting down")

    @property
    def word(self) -> str:
        """The state as ``pserver status`` shows it."""
        return "draining" if self.draining else self.state.value
