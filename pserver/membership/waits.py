"""The waits of a job's threads: each at an event of its own, under the job's lock.

A wait, from the thread's asking whether it is done::

    asks --done--------------------------------------------------> over
     |  ^
     |  `--the event notifies, all are woken, or WAKE_SECONDS--.
     `--not yet--> STANDS -------------------------------------'
                     `--the deadline------------------------------> over, and not done

[Note: one wake for one waiter]  A server has a thread for each stream, and most of them wait: for a
step's record, a turn, a round, an update.  If all stood at one place, each change would wake them
all: a step of 64 trainers would switch threads hundreds of times.  So each awaited condition has an
event of its own, and the thread that makes it true notifies that event.  It may notify only as many
threads as can continue.

No wake-up is lost: a thread checks whether it is done, and begins to stand, under the job's lock;
an event is notified under the same lock, after its condition has changed.  What ends waits from
outside wakes every standing thread: a failure, a loss, a draining server, a trainer that joins,
leaves or finishes.  ``WAKE_SECONDS`` is a safety net, on which nothing depends: the suite passes
with an hour.

[Note: rings]  A waiting trainer continues when all awaited trainers have arrived.  So where
trainers wait for one another in a ring, none of them ever continues, unless one does something
beside its wait: a trainer that waits for samples, for instance, joins a save in which the others
wait for it.  It does so between two of its calls, each of which takes a second at most.  Therefore
a ring counts when it has stood for a while: seen twice, and at each look between, with the same
numbers of its waits.  Then it is broken by these rules, the first one that fits:

1.  A wait of the job's own gives way: each automatic save in the ring is put off.
2.  What the script has asked for never gives way: the job fails, and says who waits where and for
    whom.

Waits that end by themselves (for admission, for the others' position, for the job's end) are shown
and are in no ring.  Nor are steps alone: a trainer's steps of several lanes travel side by side,
and may be on their way while others wait for them.
"""

from __future__ import annotations

import enum
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from pserver import polling
from pserver.running_clock import RUNNING

# ---- wait table ----
#
# The table of waits of a job, and the rings in it: waits that wait for one another.
#
# No locks, no threads and no sockets: the clock is an argument, and the caller holds the job's
# lock.


LINGER_SECONDS = 2.5  # of a wait that is asked for call by call, from one call to the next
SAVE_SECONDS = 3.0  # for which a ring stands before its saves are put off: others may come to them
STEPS_SECONDS = 0.5  # likewise, where only steps wait for the saves: their trainers join no save


class WaitKind(enum.Enum):
    """The kinds of waits; the values are the words that ``pserver status`` shows."""

    STEP = "step"
    BARRIER = "barrier"
    SAVE = "save"
    ROUND = "round"
    SAMPLES = "samples"
    JOIN = "join"
    POSITION = "position"
    END = "end"


ENDS_BY_ITSELF = frozenset({WaitKind.JOIN, WaitKind.POSITION, WaitKind.END})


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait.

    Attributes:
        trainer: the waiting one.
        kind: for what.
        what: in words: "barrier 'epoch'", "samples of pass 3".
        number: of this wait; the next one of the same trainer has another.
        since: when it began, by the table's clock.
        for_whom: the trainers that have not arrived.
    """

    trainer: int
    kind: WaitKind
    what: str
    number: int
    since: float
    for_whom: frozenset[int]

    def __str__(self) -> str:
        names = ", ".join(map(str, sorted(self.for_whom))) or "(none)"
        return f"trainer {self.trainer} waits at {self.what} for trainer {names}"


Key = tuple[int, WaitKind, str]  # of a wait: the trainer, and what it waits for


@dataclass(slots=True, eq=False)
class HeldWait:
    """A wait that the table holds.

    Attributes:
        number, since: see :class:`Wait`.
        missing: gives the trainers that have not arrived; the same for all that wait there.
        calls: that wait there now.
        until: when it is over, unless it is asked for again.
        over: no call needs to ask again.
        told: the newest wait in a save for this trainer of which a call has told it.
    """

    number: int
    since: float
    missing: Callable[[], Collection[int]]
    calls: int = 0
    until: float = 0.0
    over: bool = False
    told: int = 0


class WaitTable:
    """The waits of one job's trainers.

    Args:
        clock: seconds that never go back.

    Example:
        >>> table = WaitTable(lambda: 0.0)
        >>> with table.held(0, WaitKind.SAMPLES, "samples of pass 0", lambda: [1]):
        ...     print(*table.waits())
        trainer 0 waits at samples of pass 0 for trainer 1
    """

    def __init__(self, clock: Callable[[], float] = RUNNING) -> None:
        self._clock = clock
        self._held: dict[Key, HeldWait] = {}
        self._numbers = itertools.count(1)
        self._rings: dict[frozenset[int], float] = {}  # by numbers of waits: seen since when

    @property
    def now(self) -> float:
        """The time of its clock."""
        return self._clock()

    # ---- waiting trainers ----

    @contextmanager
    def held(
        self, trainer: int, kind: WaitKind, what: str, missing: Callable[[], Collection[int]]
    ) -> Iterator[HeldWait]:
        """Holds, while the block runs, the wait of a trainer's call.  It ends with the call, where
        that sets :attr:`HeldWait.over`; otherwise the trainer asks again, and it is the same wait.

        Args:
            missing: gives the trainers that have not arrived.
        """
        key = trainer, kind, what
        self._forget()
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = HeldWait(next(self._numbers), self._clock(), missing)
        held.missing, held.calls, held.over = missing, held.calls + 1, False
        try:
            yield held
        finally:
            held.calls -= 1
            held.until = self._clock() + LINGER_SECONDS
            if held.over and not held.calls and self._held.get(key) is held:
                del self._held[key]

    def steps(self, found: Mapping[tuple[int, str], Callable[[], Collection[int]]]) -> None:
        """Enters the waits in steps, which are looked up from time to time, and cost a step
        nothing.

        Args:
            found: by trainer and step ("step 12"), a function that gives those that have not
                arrived.
        """
        known = [(trainer, what) for trainer, kind, what in self._held if kind is WaitKind.STEP]
        for trainer, what in known:
            if (trainer, what) not in found:
                del self._held[trainer, WaitKind.STEP, what]
        for (trainer, what), missing in found.items():
            key = trainer, WaitKind.STEP, what
            held = self._held.get(key)
            if held is None:
                held = self._held[key] = HeldWait(next(self._numbers), self._clock(), missing, 1)
            held.missing = missing

    def over(self, trainer: int, kind: WaitKind, what: str) -> None:
        """Ends a trainer's wait."""
        self._held.pop((trainer, kind, what), None)

    def drop(self, trainer: int) -> None:
        """Removes the waits of a trainer that has gone."""
        for key in [key for key in self._held if key[0] == trainer]:
            del self._held[key]

    def paused(self) -> None:
        """Forgets earlier sightings of rings, as the server has not run for a while."""
        self._rings.clear()

    def _forget(self) -> None:
        now = self._clock()
        for key in [k for k, held in self._held.items() if not held.calls and now > held.until]:
            del self._held[key]

    def waits(self) -> list[Wait]:
        """All waits, by trainer, and each trainer's in the order in which they began."""
        self._forget()
        missing: dict[tuple[WaitKind, str], frozenset[int]] = {}
        found = []
        for (trainer, kind, what), held in self._held.items():
            if (kind, what) not in missing or kind is WaitKind.STEP:
                missing[kind, what] = frozenset(held.missing())
            others = missing[kind, what] - {trainer}
            found.append(Wait(trainer, kind, what, held.number, held.since, others))
        return sorted(found, key=lambda wait: (wait.trainer, wait.number))

    def long(self, trainer: int) -> list[Wait]:
        """The waits of a trainer that have lasted for a while, but those whose awaited trainers it
        logs by itself.
        """
        until = self._clock() - polling.NOTICE_SECONDS
        if not any(
            other == trainer and kind not in ENDS_BY_ITSELF and held.since <= until
            for (other, kind, _), held in self._held.items()
        ):
            return []
        return [
            each
            for each in self.waits()
            if each.trainer == trainer and each.kind not in ENDS_BY_ITSELF and each.since <= until
        ]

    def save_for(self, trainer: int) -> int:
        """The number of the newest wait in a save that waits for a trainer; 0: there is none."""
        return max(
            (
                held.number
                for (other, kind, _), held in self._held.items()
                if kind is WaitKind.SAVE and other != trainer and trainer in held.missing()
            ),
            default=0,
        )

    # ---- rings: see [Note: rings] ----

    def ring(self, fails_after: float) -> list[Wait]:
        """Looks for rings.

        Args:
            fails_after: the seconds for which a ring stands in which nothing gives way.

        Returns:
            The waits of a ring that has stood for so long that it is to be broken; none: there is
            no such ring.
        """
        if len({trainer for trainer, kind, _ in self._held if kind not in ENDS_BY_ITSELF}) < 2:
            self._rings.clear()
            return []
        now = self._clock()
        standing: dict[frozenset[int], float] = {}
        due: list[Wait] = []
        for ring in rings(self.waits()):
            numbers = frozenset(wait.number for wait in ring)
            standing[numbers] = self._rings.get(numbers, now)
            if (
                not due
                and now - standing[numbers] >= ring_patience(ring, fails_after)
                and (numbers in self._rings)
            ):
                due = ring
        self._rings = standing
        return due


def rings(waits: Iterable[Wait]) -> list[list[Wait]]:
    """The rings among waits: of each the waits of trainers that wait for one another, directly or
    through others.

    Example:
        >>> one = Wait(0, WaitKind.SAMPLES, "samples of pass 0", 1, 0.0, frozenset({1}))
        >>> other = Wait(1, WaitKind.BARRIER, "barrier 'x'", 2, 0.0, frozenset({0, 2}))
        >>> [[wait.number for wait in ring] for ring in rings([one, other])]
        [[1, 2]]
        >>> rings([one])
        []
    """
    blocking = [wait for wait in waits if wait.kind not in ENDS_BY_ITSELF]
    trainers = {wait.trainer for wait in blocking}
    edges: dict[int, set[int]] = {trainer: set() for trainer in trainers}
    for wait in blocking:
        edges[wait.trainer] |= wait.for_whom & trainers - {wait.trainer}
    found = []
    for component in _components(edges):
        inside = [w for w in blocking if w.trainer in component and w.for_whom & component]
        if any(wait.kind is not WaitKind.STEP for wait in inside):
            found.append(sorted(inside, key=lambda wait: (wait.trainer, wait.number)))
    return found


def _components(edges: Mapping[int, Collection[int]]) -> list[set[int]]:
    """The groups of two or more trainers that reach one another (Tarjan's way, without
    recursion).
    """
    order: dict[int, int] = {}
    low: dict[int, int] = {}
    path: list[int] = []
    on_path: set[int] = set()
    found = []
    for root in sorted(edges):
        if root in order:
            continue
        order[root] = low[root] = len(order)
        path.append(root)
        on_path.add(root)
        stack = [(root, iter(sorted(edges[root])))]
        while stack:
            node, further = stack[-1]
            for other in further:
                if other not in order:
                    order[other] = low[other] = len(order)
                    path.append(other)
                    on_path.add(other)
                    stack.append((other, iter(sorted(edges[other]))))
                    break
                if other in on_path:
                    low[node] = min(low[node], order[other])
            else:
                stack.pop()
                if stack:
                    low[stack[-1][0]] = min(low[stack[-1][0]], low[node])
                if low[node] == order[node]:
                    component = set(path[path.index(node) :])
                    del path[path.index(node) :]
                    on_path -= component
                    if len(component) > 1:
                        found.append(component)
    return found


def saves_of(ring: Iterable[Wait]) -> list[Wait]:
    """The waits that give way: rule 1 of [Note: rings]."""
    return [wait for wait in ring if wait.kind is WaitKind.SAVE]


def ring_patience(ring: Sequence[Wait], fails_after: float) -> float:
    """The seconds for which a ring stands until it is broken."""
    if not saves_of(ring):
        return fails_after
    steps = all(wait.kind in (WaitKind.SAVE, WaitKind.STEP) for wait in ring)
    return STEPS_SECONDS if steps else SAVE_SECONDS


def in_words(ring: Iterable[Wait]) -> str:
    """The waits of a ring, for messages."""
    return "; ".join(map(str, ring))


# ---- waits ----


WAKE_SECONDS = 1.0  # after which a thread that stands asks again, notified or not
ALL = 2**31  # threads

log = logging.getLogger(__name__)


class WaitEvent:
    """A condition that threads wait for; they stand here until they are notified.

    The caller holds the job's lock.

    Args:
        lock: the job's.

    Attributes:
        standing: the number of threads that stand here, or were notified and have not continued
            yet.
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

    def notify(self, most: int = ALL) -> None:
        """Notifies the threads that stand here: the condition is true, or may be, and they check it
        again.

        Args:
            most: the largest number of threads to notify, those that have stood longest.
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
            arrived.notify()

    Attributes:
        lock: the job's: see [Note: the job's lock] in lifecycle.py.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._stood_at: dict[WaitEvent, None] = {}  # where threads stand

    def event(self) -> WaitEvent:
        """A new event, at which no thread stands."""
        return WaitEvent(self.lock)

    def wake_all(self) -> None:
        """Makes all waits check again, after a change that may concern any of them."""
        for event in self._stood_at:
            event.notify()

    def wait(
        self,
        event: WaitEvent,
        done: Callable[[], bool],
        for_whom: Callable[[], str] | None = None,
        deadline: float = math.inf,
        check: Callable[[], None] = lambda: None,
    ) -> bool:
        """Waits until ``done``, of which the event notifies.

        Args:
            for_whom: the line that is logged when the wait has lasted
                :data:`pserver.polling.NOTICE_SECONDS`: the waiting and the awaited trainers.
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

    def _stand(self, event: WaitEvent, seconds: float) -> bool:
        """Stands at an event; returns whether the thread was notified."""
        event.standing += 1
        self._stood_at[event] = None
        try:
            return event.condition.wait(seconds)
        finally:
            event.standing -= 1
            if not event.standing:
                del self._stood_at[event]


def patience(end: float = math.inf) -> float:
    """The seconds to stand at a condition with another lock than the job's, before it is checked
    again.

    Args:
        end: of the wait, by :func:`time.monotonic`.
    """
    return max(0.0, min(WAKE_SECONDS, end - time.monotonic()))
