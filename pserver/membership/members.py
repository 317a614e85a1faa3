"""The trainers of a server's job: joining, heartbeats, leaving, losses, and waits for one another.

No locks and no clock: time is an argument, and the caller holds the job's lock.

A member's states::

    (absent) --join--> JOINED --leave----------------> LEFT
                          `----heartbeat timeout-----> LOST

[Note: whose end it is]  A server learns of a job from trainer 0's Join.  Before that it cannot tell
which announcements belong together, and trainers of the next job may wait while one runs.  So the
end of an announced trainer counts at once for those trainers that were there when it became known.
For one that arrived within a heartbeat timeout after that it counts when another heartbeat timeout
has passed, in which no other process of that number arrived: trainers of one job start at about the
same time, and so do those of a job that is started again.  For later ones it does not count.  And
it counts for no trainer while another process of the same number is there.

[Note: a straggler]  What counts is a trainer's own time: from one step's close to the next one's,
without what its script waited in steps.  So in a sync job, where all steps take equally long, the
one for which the others wait is named, and not those that wait.  The time is the mean over the
steps of the last ``REPORTS`` heartbeats that brought some, so that one long step, as after a
checkpoint, names no trainer for long.

[Note: trainers that wait for each other]  A trainer waits in a step (for the others' steps) or at a
barrier (for the others to reach it).  If some trainers wait in a step and all the rest at a
barrier, none of them can ever continue: they have taken different numbers of steps.  The same holds
where all wait at barriers, but not at the same one.  The job then fails and reports that.  Not
where one waits in a save of the job's own, which gives way, nor where they wait for samples: see
[Note: rings] in waits.py.  Trainers join a meeting round from every wait.
"""

from __future__ import annotations

import enum
import math
import secrets
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pserver import wire_pb2 as wire
from pserver.errors import JobFailed, PServerError, TrainerLost, UnknownSession
from pserver.job_log.records import Applied, Process
from pserver.limits import Limits
from pserver.membership.lifecycle import Lifecycle
from pserver.membership.waits import Wait, WaitEvent, WaitTable
from pserver.membership.watermark import Watermark
from pserver.onlookers import onlooker
from pserver.running_clock import RUNNING
from pserver.telemetry.metrics import public_name
from pserver.telemetry.trace import clock_ns

# ---- announcements ----
#
# Trainers that have started and have not joined yet: they say so as often as they send heartbeats,
# so that the end of one is known although it was never a member.
#
# No locks and no clock: time is an argument, and the caller holds the job's lock.


@dataclass(slots=True)
class Announced:
    """One process that has announced itself.

    Attributes:
        trainer: its number.
        first, last: when it was heard first, and last, in seconds of the job's clock.
    """

    trainer: int
    first: float
    last: float


@dataclass(frozen=True, slots=True)
class AnnouncedEnd:
    """The end of an announced trainer.

    Attributes:
        known: since when, in seconds of the job's clock.
        reason: for the others.
    """

    known: float
    reason: str


class Announcements:
    """The announced processes of one server, and those of them that ended without joining."""

    def __init__(self) -> None:
        self._announced: dict[str, Announced] = {}  # by incarnation
        self._ended: dict[int, AnnouncedEnd] = {}  # by trainer

    @property
    def any(self) -> bool:
        """Whether a process has announced itself and neither joined nor ended."""
        return bool(self._announced)

    def announce(self, trainer: int, incarnation: str, now: float, most: int) -> bool:
        """Takes a trainer's announcement.

        Args:
            most: the largest number of processes; beyond it, the one that was silent for longest is
                forgotten.

        Returns:
            Whether it is new.
        """
        new = incarnation not in self._announced
        if new and len(self._announced) >= most:
            del self._announced[min(self._announced, key=lambda one: self._announced[one].last)]
        known = self._announced.setdefault(incarnation, Announced(trainer, now, now))
        known.last = now
        self._ended.pop(trainer, None)
        return new

    def first_heard(self, incarnation: str, now: float) -> float:
        """The time of a process's first announcement; ``now`` for one that was never announced."""
        known = self._announced.get(incarnation)
        return now if known is None else known.first

    def joined(self, trainer: int, incarnation: str) -> None:
        """Removes a process that has joined, or has ended in good order."""
        self._announced.pop(incarnation, None)
        self._ended.pop(trainer, None)

    def failed(self, trainer: int, incarnation: str, reason: str, now: float) -> None:
        """Notes that a trainer will never join: as it reports itself or, without an incarnation, as
        its launcher reports.
        """
        if not incarnation:
            for other, known in list(self._announced.items()):
                if known.trainer == trainer:
                    del self._announced[other]
            self._end(trainer, reason, now)
        elif self._announced.pop(incarnation, None) is not None:
            self._end(trainer, reason, now)

    def lose_silent(self, now: float, timeout: float) -> None:
        """Counts processes as lost that have been silent for longer than the heartbeat timeout.

        Args:
            now: in seconds of the job's clock.
            timeout: in seconds.
        """
        for incarnation, known in list(self._announced.items()):
            silence = now - known.last
            if silence > timeout:
                del self._announced[incarnation]
                reason = (
                    f"it has sent no heartbeat for {silence:.1f} s (heartbeat timeout {timeout:g} "
                    "s)"
                )
                self._end(known.trainer, reason, now)

    def lost(self, trainer: int, since: float, now: float, timeout: float) -> TrainerLost | None:
        """The error for a trainer that needs another one; None while that one may join.  See
        [Note: whose end it is].

        Args:
            trainer: the needed one.
            since: when the asking trainer was heard first, in seconds of the job's clock.
            now: likewise.
            timeout: the heartbeat timeout, in seconds.
        """
        ended = self._ended.get(trainer)
        if ended is None or since - ended.known > timeout:
            return None
        if ended.known < since and now - since <= timeout:
            return None  # it may belong to a job before
        return TrainerLost(f"trainer {trainer} ended before it joined: {ended.reason}")

    def _end(self, trainer: int, reason: str, now: float) -> None:
        if all(known.trainer != trainer for known in self._announced.values()):
            self._ended[trainer] = AnnouncedEnd(now, reason)


# ---- stragglers ----
#
# Trainers that compute far longer in a step than the others.


REPORTS = 8
LEAST_SECONDS = 0.005  # of a step: shorter times are mostly noise


class PacedMember(Protocol):
    """The part of a live trainer that its pace needs."""

    trainer: int
    pace: Pace


@dataclass
class Pace:
    """The duration of a trainer's own part of a step.

    Attributes:
        named: it has been named as a straggler.

    Example:
        >>> pace = Pace()
        >>> for steps, seconds in ((10, 1.0), (20, 3.0)):
        ...     lane = wire.LaneReport(steps=steps, step_seconds=seconds)
        ...     pace.record(wire.TrainerReport(lanes=[lane]))
        >>> pace.seconds
        0.2
    """

    named: bool = False
    _heard: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=REPORTS))

    @onlooker("the watch for stragglers")
    def record(self, report: wire.TrainerReport) -> None:
        """Takes a heartbeat's report: the steps and seconds of the lane that takes most of the
        time.
        """
        lane = max(report.lanes, key=lambda each: each.step_seconds, default=wire.LaneReport())
        if not self._heard or lane.steps > self._heard[-1][0]:
            own = max(0.0, lane.step_seconds - lane.blocked_seconds)
            self._heard.append((lane.steps, own))

    @property
    def seconds(self) -> float:
        """The seconds of a step; 0.0 where they are not known yet."""
        if len(self._heard) < 2:
            return 0.0
        (first, before), (last, after) = self._heard[0], self._heard[-1]
        return max(0.0, after - before) / (last - first)


def ratios(seconds: Mapping[int, float]) -> dict[int, float]:
    """By trainer, its own time over the median of the others'; those without measurements are left
    out, and so is a single one.

    Args:
        seconds: of a step, by trainer; 0.0: not known.

    Example:
        >>> ratios({0: 0.1, 1: 0.1, 2: 0.5, 3: 0.0})[2]
        5.0
    """
    known = {trainer: each for trainer, each in seconds.items() if each > 0}
    ordered = sorted(known.values())
    found = {}
    for trainer, own in known.items():
        others = _median_without(ordered, own)
        if others > 0:
            found[trainer] = own / others
    return found


def _median_without(ordered: Sequence[float], own: float) -> float:
    """The median of all but one of them; 0.0 where there are no others."""
    count, place = len(ordered) - 1, bisect_left(ordered, own)
    if not count:
        return 0.0
    middle = ((count - 1) // 2, count // 2)  # among the others
    low, high = (ordered[each + (each >= place)] for each in middle)
    return (low + high) / 2


def stragglers(members: Iterable[PacedMember], factor: float) -> dict[int, float]:
    """The trainers that compute so many times as long as the others, with their ratios.

    Args:
        members: the live trainers.
        factor: the ratio from which a trainer is named; 0: none is.
    """
    seconds = {member.trainer: member.pace.seconds for member in members}
    return {
        trainer: ratio
        for trainer, ratio in (ratios(seconds) if factor else {}).items()
        if ratio > factor and seconds[trainer] > LEAST_SECONDS
    }


def news(members: Sequence[PacedMember], factor: float) -> Iterator[tuple[int, str]]:
    """The number of each straggler that has not been named before, with a sentence."""
    slow = stragglers(members, factor)
    for member in members:
        if member.trainer in slow and not member.pace.named:
            member.pace.named = True
            yield (
                member.trainer,
                f"trainer {member.trainer} is slow: it computes {member.pace.seconds:.3g} s a "
                f"step, {slow[member.trainer]:.1f} times the median of the others",
            )


# ---- membership ----


class MemberState(enum.Enum):
    """The states of a trainer's membership."""

    JOINED = "joined"
    LEFT = "left"
    LOST = "lost"


# As JSON: {"0": {"incarnation": "...", "lanes": {"0": [applied, committed, overflow, rows]}}}
Watermarks = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class TrainerWait:
    """One wait of a trainer for the others.

    Attributes:
        member: the trainer that waits.
        place: where: "lane 0", "barrier".
        what: for messages: "step 12", "barrier 'epoch'".
        done: whether the wait is over.
        apart: trainers that wait at another barrier join this one, too.
        deadline: the longest, by :func:`time.monotonic`.
        missing: gives the trainers that have not arrived.
    """

    member: Member
    place: str
    what: str
    done: Callable[[], bool]
    apart: bool = False
    deadline: float = math.inf
    missing: Callable[[], Sequence[int]] = tuple


@dataclass(slots=True)
class Member:
    """One trainer, as one server sees it.

    Attributes:
        trainer: its number in the plan.
        incarnation: random, new for each start of its process.
        transport: the name of the transport that its streams use.
        last_heard: when its last call or frame came, in seconds of the job's clock.
        session: the secret that its calls and its streams repeat.
        state: of its membership.
        watermarks: by lane.
        activity: its reported activity ("step 12", "saving").
        report: its report of its training.
        wrong_lines: of its report, those that are in the job's counts.
        waits: its waits, by place; see :func:`wait_until_done`.
        leaving: the lanes of which its last step has arrived; it leaves when all are applied.
        finished: it takes no further step, and waits for the others to finish.
        returns: it has left to join again, with another plan.
        fenced: why it was lost, a sentence; "" while it is not.
        pace: of its own part of a step.
        preempted_after: it has left because its host takes it away, after this step of its script;
            None: it has not.
        late: the others trained already when it joined; the number of that change of the members.
            0: it was there from the beginning.
        placed: it has received their position.
        kept_bytes: of the lookups that are kept for it.
    """

    trainer: int
    incarnation: str
    transport: str
    last_heard: float
    session: str = field(default_factory=lambda: secrets.token_hex(16))
    state: MemberState = MemberState.JOINED
    watermarks: dict[int, Watermark] = field(default_factory=dict)
    activity: str = ""
    report: wire.TrainerReport = field(default_factory=wire.TrainerReport)
    wrong_lines: int = 0
    waits: dict[str, TrainerWait] = field(default_factory=dict)
    leaving: set[int] = field(default_factory=set)
    finished: bool = False
    returns: bool = False
    fenced: str = ""
    pace: Pace = field(default_factory=Pace)
    preempted_after: int | None = None
    late: int = 0
    placed: bool = False
    kept_bytes: int = 0

    @property
    def word(self) -> str:
        """Its state as ``pserver status`` shows it."""
        if self.preempted_after is not None:
            return "preempted"
        joined = self.state is MemberState.JOINED
        return "finished" if self.finished and joined else self.state.value

    @property
    def absent(self) -> bool:
        """Whether it is gone before the job's end."""
        lost = self.state is MemberState.LOST
        return self.preempted_after is not None or lost or bool(self.leaving)

    def goodbye(self, reason: str) -> str:
        """A sentence about its leaving.

        Args:
            reason: why the job cannot continue; "": it can.
        """
        if self.preempted_after is not None:
            return f"trainer {self.trainer} was preempted after step {self.preempted_after}"
        return f"trainer {self.trainer} left" + (f": {reason}" if reason else "")

    @property
    def steps_under_way(self) -> bool:
        """Whether it has a step that has arrived and is not applied."""
        return any(each.taking > each.applied for each in self.watermarks.values())

    def watermark(self, lane: int) -> Watermark:
        """Its watermark in a lane."""
        return self.watermarks.setdefault(lane, Watermark())

    def step(self, lane: int) -> int:
        """The last step of a lane that was applied; 0 before the first."""
        return self.watermarks[lane].applied if lane in self.watermarks else 0

    @property
    def waiting(self) -> str:
        """The wait that it is in ("step 12", "barrier 'epoch'"), "" while it computes."""
        return " and ".join(wait.what for wait in self.waits.values())


class Membership:
    """The trainers of one job.

    Args:
        expected: how many trainers the plan has.
        since: when the job began, in seconds of the job's clock.
        began: when the trainer that began it was first heard; None: then, too.
        least: the number of trainers with which the job begins, whichever they are; more may join
            later. 0: all of the plan.
        clock: of the waits: seconds that never go back.

    [Note: kept places]  Steps that need all trainers wait for a while when one is lost: another
    process may take its place.  So its place is kept, up to a time.  The same holds for a process
    that has been admitted and has not arrived yet: the record of its joining stands, so the other
    trainers' steps wait for its first one.  Then all have the same values, as of the same step.

    Attributes:
        by_trainer: the members; of each number the last one.
        reserved: places of lost trainers that are kept, by trainer: until when, in seconds of
            the job's clock.
        arriving: the same for processes that have been admitted and have not arrived yet.
        held: processes that wait for admission, while the others train.
        fenced: processes that were lost, whether they had joined here or not.
        preempted: the trainers that were, with the last step that each has taken.
        changes: the number of joins, and of ends before the job's.
        away: live trainers of the job that have not joined this server since it was started again;
            with their processes.
        counted: by process and lane, the steps that were decided before that, and the rows that
            these have changed.
        waits: of trainers for one another; server 0's counts.
    """

    def __init__(
        self,
        expected: int,
        since: float,
        began: float | None = None,
        least: int = 0,
        clock: Callable[[], float] = RUNNING,
    ) -> None:
        self.waits = WaitTable(clock)
        self.expected, self.least = expected, min(least, expected)
        self.since, self.began = since, since if began is None else began
        self.by_trainer: dict[int, Member] = {}
        self.fenced: set[Process] = set()
        self._lost: list[Member] = []
        self._begin_at: dict[int, tuple[int, ...]] = {}  # by trainer: steps by lane
        self._loaded: Watermarks = {}  # read from files, for trainers that have not joined yet
        self.preempted: Mapping[int, int] = {}  # replaced, never changed
        self.changes = 0
        self.reserved: dict[int, float] = {}
        self.arriving: dict[int, float] = {}
        self.held: set[Process] = set()
        self.away: dict[int, Process] = {}
        self.counted: dict[Process, Sequence[Applied]] = {}

    def add(self, member: Member, steps: Sequence[int] = (), late: bool = False) -> None:
        """Adds a trainer, with the watermarks that were saved of its incarnation.

        Args:
            steps: by lane, the last ones before it begins; none: those in files.
            late: the others train already.
        """
        self.by_trainer[member.trainer] = member
        self.waits.drop(member.trainer)
        self.reserved.pop(member.trainer, None)
        self.arriving.pop(member.trainer, None)
        self.away.pop(member.trainer, None)
        self.preempted = {t: s for t, s in self.preempted.items() if t != member.trainer}
        self.changes, member.late = self.changes + 1, (self.changes + 1) * late
        for lane, step in enumerate(steps or self._begin_at.get(member.trainer, ())):
            member.watermark(lane).applied = step
        process = Process(member.trainer, member.incarnation)
        for lane, counted in enumerate(self.counted.get(process, ())):
            member.watermark(lane).rows = counted.rows
        self._restore(member)

    def watermarks(self) -> Watermarks:
        """The watermarks of all members, to be saved with the slices; of those that are unreachable
        the steps that this server has counted.
        """
        found = {
            str(member.trainer): {
                "incarnation": member.incarnation,
                "lanes": {
                    str(lane): watermark.saved()
                    for lane, watermark in sorted(member.watermarks.items())
                },
            }
            for _, member in sorted(self.by_trainer.items())
        }
        for trainer, process in sorted(self.away.items()):
            known = map(Watermark.of, self.counted[process])
            lanes = {str(lane): each.saved() for lane, each in enumerate(known)}
            found[str(trainer)] = {"incarnation": process.incarnation, "lanes": lanes}
        return found

    def steps(self, lanes: int) -> dict[int, tuple[int, ...]]:
        """The last step that was applied of each lane, by trainer."""
        return {
            trainer: tuple(member.step(lane) for lane in range(lanes))
            for trainer, member in sorted(self.by_trainer.items())
        }

    def begin_at(self, steps: Mapping[int, Sequence[int]]) -> None:
        """Makes joining trainers continue from these steps, whatever processes they are; see [Note:
        a server's file] in job/program.py.

        Args:
            steps: as :meth:`steps` gives them.
        """
        self._begin_at = {trainer: tuple(each) for trainer, each in steps.items()}

    def load_watermarks(self, saved: Watermarks) -> None:
        """Takes over saved watermarks, for members and for trainers that join later.

        See [Note: exactly once] in :class:`Watermark` for whose they are.
        """
        self._loaded = dict(saved)
        for member in self.by_trainer.values():
            self._restore(member)

    def _restore(self, member: Member) -> None:
        saved = self._loaded.get(str(member.trainer))
        if saved is not None and saved["incarnation"] == member.incarnation:
            for lane, values in saved["lanes"].items():
                member.watermark(int(lane)).restore(values)

    def joined(self) -> list[Member]:
        """The live trainers, by number."""
        return [
            member
            for _, member in sorted(self.by_trainer.items())
            if member.state is MemberState.JOINED
        ]

    def of_session(self, session: str) -> Member:
        """The member that holds a session.

        Raises:
            UnknownSession: there is none.
        """
        for member in (*self.by_trainer.values(), *self._lost):
            if secrets.compare_digest(member.session.encode(), session.encode()):
                return member
        raise UnknownSession(
            "this session is not known here: join first (has the server been restarted?)"
        )

    @property
    def run(self) -> str:
        """Names this run of the job: this start of trainer 0; "" before it has joined."""
        first = self.by_trainer.get(0)
        return "" if first is None else public_name(first.incarnation)

    def step(self, trainer: int, lane: int) -> int:
        """The last applied step of a trainer; 0 for one that has not joined."""
        member = self.by_trainer.get(trainer)
        return 0 if member is None else member.step(lane)

    def awaited(self, lane: int | None = None) -> list[int]:
        """The trainers that a sync step or a barrier needs: all of the plan but those that have
        finished or left or are lost, or that leave after a step that has arrived.

        Args:
            lane: of the step; None: of any, as a barrier asks.
        """
        done = {
            trainer
            for trainer, member in self.by_trainer.items()
            if member.finished
            or member.state is not MemberState.JOINED
            or (member.leaving if lane is None else lane in member.leaving)
        }
        return [trainer for trainer in self._needed() if trainer not in done]

    def awaited_together(self, lane: int) -> list[int]:
        """The trainers that a step of all needs: :meth:`awaited`, and those whose places are kept.

        Args:
            lane: of the step.
        """
        return sorted({*self.awaited(lane), *self.reserved, *self.arriving})

    def expire(self, now: float) -> list[int]:
        """Gives up the places whose time is over; see [Note: kept places].

        Returns:
            Those that are kept no more.
        """
        over = set()
        for places in (self.reserved, self.arriving):
            for trainer in [each for each, until in places.items() if now >= until]:
                del places[trainer]
                over.add(trainer)
        return sorted(over)

    def preempt(self, member: Member, step: int) -> None:
        """Notes that a trainer leaves because its host takes it away.

        Args:
            step: the last one that it has taken, as its script counts.
        """
        if member.state is MemberState.JOINED:
            member.preempted_after = step
            self.preempted = {**self.preempted, member.trainer: step}
            self.changes += 1

    def leave(self, process: Process, preempted_after: int | None) -> None:
        """Notes that a process has left, as the log has it.  One that is still here, and was not
        preempted, has finished: its own call, or its silence, ends its membership.

        Args:
            preempted_after: its host was taken away, after this step; None: it was not.
        """
        here = self.away.get(process.trainer) != process
        if not here:
            gone = Member(process.trainer, process.incarnation, "", self.since)
            self.add(gone, [each.step for each in self.counted.get(process, ())])
        member = self.by_trainer.get(process.trainer)
        if member is None or member.incarnation != process.incarnation:
            return
        if member.state is not MemberState.JOINED:
            return
        if preempted_after is not None:
            self.preempt(member, preempted_after)
        if here and preempted_after is None:
            member.finished = True
        else:
            member.state = MemberState.LEFT

    @property
    def first(self) -> int:
        """The leader: the lowest-ranked trainer that is not absent; of late ones, if there are no
        others, the earliest.  It may be read without the job's lock.
        """
        late = {t: m.late for t, m in dict(self.by_trainer).items()}
        there = set(range(self.expected)).difference(self.absent)
        return min(there, key=lambda trainer: (late.get(trainer, 0), trainer), default=0)

    def first_of(self, which: Callable[[Member], bool]) -> int | None:
        """The first of the live trainers that ``which`` accepts: the lowest-ranked; late ones
        follow in order.
        """
        there = sorted((each.late, each.trainer) for each in self.joined() if which(each))
        return there[0][1] if there else None

    @property
    def absent(self) -> list[int]:
        """The trainers that are gone before the job's end: preempted, lost, or leaving after a step
        that has arrived; and the free places of a job that has begun with fewer.
        """
        needed, members = self._needed(), dict(self.by_trainer)
        return [
            trainer
            for trainer in range(self.expected)
            if (members[trainer].absent if trainer in members else trainer not in needed)
        ]

    @property
    def undone(self) -> bool:
        """Whether every trainer was preempted before it had done its part."""
        members = self.by_trainer.values()
        return self.over and all(m.preempted_after is not None and not m.finished for m in members)

    def unfinished(self) -> list[int]:
        """The trainers of the plan that have not finished."""
        done = {
            trainer
            for trainer, member in self.by_trainer.items()
            if member.finished or member.state is not MemberState.JOINED
        }
        return [trainer for trainer in self._needed() if trainer not in done]

    def _needed(self) -> Sequence[int]:
        """The trainers of the plan; of a job that has begun with fewer those that have joined."""
        known = {*self.by_trainer, *self.away}
        if self.least and len(known) >= self.least:
            return sorted(known)
        return range(self.expected)

    # ---- timeouts ----

    def silent(self, now: float, timeout: float) -> list[tuple[Member, str]]:
        """The members that have sent nothing for longer than the heartbeat timeout.

        Args:
            now: in seconds of the job's clock.
            timeout: in seconds.

        Returns:
            Each of them, with a sentence for the others.
        """
        found = []
        for member in self.joined():
            silence = now - member.last_heard
            if silence > timeout:
                doing = member.waiting or member.activity
                text = (
                    f"trainer {member.trainer} has sent no heartbeat for {silence:.1f} s "
                    f"(heartbeat timeout {timeout:g} s)"
                    + (f", last known activity: {doing}" if doing else "")
                )
                found.append((member, text))
        return found

    def not_back(self, now: float, timeout: float) -> list[Process]:
        """The processes that have been unreachable for longer than the heartbeat timeout.

        Args:
            now: in seconds of the job's clock.
            timeout: in seconds.
        """
        return list(self.away.values()) if now - self.since > timeout else []

    def fence(self, process: Process, text: str) -> Member | None:
        """Fences a lost trainer: nothing that it sends counts any more.

        Args:
            text: why; a sentence.

        Returns:
            The member, which may have joined another server only; None where another process has
            its place here.
        """
        self.fenced.add(process)
        if self.away.get(process.trainer) == process:
            del self.away[process.trainer]
        member = self.by_trainer.get(process.trainer)
        if member is None:  # so that no trainer waits for it
            member = Member(process.trainer, process.incarnation, "", self.since)
            member.watermarks.update(enumerate(map(Watermark.of, self.counted.get(process, ()))))
            self.by_trainer[process.trainer] = member
        elif member.incarnation != process.incarnation:
            return None
        member.state, member.fenced = MemberState.LOST, text
        self.waits.drop(process.trainer)
        self.changes += 1
        self._lost.append(member)
        return member

    def missing(self, now: float, timeout: float) -> list[int]:
        """The trainers that have not joined although the start timeout is over."""
        if now - self.since <= timeout:
            return []
        return self.not_joined()

    def not_joined(self) -> list[int]:
        """The trainers that the job needs, and that have not joined."""
        return [trainer for trainer in self._needed() if trainer not in self.by_trainer]

    @property
    def ending(self) -> bool:
        """Whether a trainer has left, and was not preempted."""
        return any(
            member.state is MemberState.LEFT and member.preempted_after is None
            for member in self.by_trainer.values()
        )

    @property
    def over(self) -> bool:
        """Whether the job has ended: every expected trainer has joined, and none is live."""
        enough = len(self.by_trainer) >= (self.least or self.expected)
        return enough and not (self.joined() or self.away)

    @property
    def returning(self) -> bool:
        """Whether a trainer has left to join again, with another plan."""
        return any(member.returns for member in self.by_trainer.values())

    @property
    def deserted(self) -> bool:
        """Whether trainers have joined, and none is live."""
        return bool(self.by_trainer) and not (self.joined() or self.away)


# ---- blocking waits ----
#
# Waits of one trainer for the others, under the job's lock.
#
# A wait ends when the job ends.  One that lasts long is logged, with the trainers that are missing.


BARRIER = "barrier"  # the place of such a wait
ROUND = "round"  # likewise


def wait_until_done(
    job: Lifecycle,
    members: Membership,
    wait: TrainerWait,
    missing: Callable[[], list[int]],
    event: WaitEvent | None = None,
) -> None:
    """Blocks until ``wait`` is done.  The caller holds the job's lock, which is free meanwhile.

    Args:
        missing: the trainers that are waited for, for the log.
        event: notifies when it may be done; None: that of control calls.

    Raises:
        PServerError: what ended the job meanwhile.
    """
    if wait.done():
        return

    def waiting() -> str:
        for_whom = ", ".join(map(str, missing()))
        return f"trainer {wait.member.trainer} waits at {wait.what} for trainer {for_whom}"

    def check() -> None:
        job.check_running()
        _check_deadlock(job, members)

    wait.member.waits[wait.place] = wait
    try:
        job.waits.wait(event or job.changed, wait.done, waiting, wait.deadline, check)
    finally:
        # the same step may have arrived again over another stream, with a wait of its own
        if wait.member.waits.get(wait.place) is wait:
            del wait.member.waits[wait.place]


def _check_deadlock(job: Lifecycle, members: Membership) -> None:
    """See [Note: trainers that wait for each other]."""
    if not any(BARRIER in member.waits for member in members.by_trainer.values()):
        return
    joined = {member.trainer: member for member in members.joined()}
    awaited = members.awaited()
    blocked = [
        joined[trainer] for trainer in awaited if trainer in joined and joined[trainer].waits
    ]
    waits = [wait for member in blocked for wait in member.waits.values()]
    if any(wait.place == ROUND or wait.apart for wait in waits):
        return
    if len(blocked) < len(awaited) or any(wait.done() for wait in waits):
        return
    barriers = {wait.what for wait in waits if wait.place == BARRIER}
    at_barrier = [BARRIER in member.waits for member in blocked]
    if any(at_barrier) and (not all(at_barrier) or len(barriers) > 1):
        said = ", ".join(f"trainer {each.trainer} waits at {each.waiting}" for each in blocked)
        job.fail(
            JobFailed(
                f"the trainers wait for one another ({said}): they have taken different numbers "
                "of steps, or only some of them save, load, meet at a barrier or ask for values of "
                "all trainers"
            )
        )
        job.check_running()


# ---- reports ----
#
# Heartbeats: what a server keeps of what a trainer says of itself, and what it answers.


ACTIVITY_LENGTH = 200  # characters of what a trainer says that it does
VALUES = 64  # numbers of a script
SETTINGS = 16  # of a script, each of up to so many characters:
SETTING_LENGTH = 1000
LANES = 256


def bounded_report(
    request: wire.HeartbeatRequest, limits: Limits
) -> tuple[str, wire.TrainerReport]:
    """A heartbeat's activity and report, cut to the kept part: the first 64 values by name, each
    name to the bytes that a name may have.
    """
    said = request.report
    report = wire.TrainerReport(
        samples=said.samples,
        values={
            _cut(name, limits.name_bytes): said.values[name]
            for name in sorted(said.values)[:VALUES]
        },
        memory_bytes=said.memory_bytes,
        lanes=said.lanes[:LANES],
        bytes_in=said.bytes_in,
        bytes_out=said.bytes_out,
        reconnects=said.reconnects,
        saves=said.saves,
        since_save_seconds=said.since_save_seconds,
        passes=said.passes,
        batch=said.batch,
        batches=said.batches,
        settings={
            _cut(name, limits.name_bytes): said.settings[name][:SETTING_LENGTH]
            for name in sorted(said.settings)[:SETTINGS]
        },
        wrong_lines=said.wrong_lines,
    )
    return request.activity[:ACTIVITY_LENGTH], report


def heartbeat_reply(
    failure: PServerError | None,
    members: Membership,
    position_asked: int = 0,
    waits: Iterable[Wait] = (),
) -> wire.HeartbeatReply:
    """The answer to a trainer's heartbeat.

    Args:
        failure: what has ended the job; None: nothing has.
        members: the job's trainers.
        position_asked: the number of a question that this trainer is to answer.
        waits: of this trainer, those that have lasted for a while.
    """
    told = wire.HeartbeatReply(
        clock_ns=clock_ns(),
        roll=roll(members),
        position_asked=position_asked,
        waits=wait_statuses(waits, members.waits.now),
    )
    if failure is not None:
        told.failure, told.error = str(failure), type(failure).__name__
    return told


def roll(members: Membership) -> wire.Roll:
    """The roll of the trainers.  The caller holds the job's lock."""
    return wire.Roll(
        changes=members.changes,
        absent=members.absent,
        preempted=dict(members.preempted),
        first=members.first,
    )


def wait_statuses(waits: Iterable[Wait], now: float) -> list[wire.WaitStatus]:
    """Waits, as they travel.

    Args:
        now: by the table's clock.
    """
    return [
        wire.WaitStatus(
            trainer_id=wait.trainer,
            kind=wait.kind.value,
            what=wait.what,
            number=wait.number,
            seconds=max(0.0, now - wait.since),
            for_whom=sorted(wait.for_whom),
        )
        for wait in waits
    ]


def _cut(name: str, most: int) -> str:
    return name.encode()[:most].decode(errors="ignore")
