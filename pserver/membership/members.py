"""Who takes part in a server's job: joining, heartbeats, leaving, being lost, and waiting for one
another.

No locks and no clock: time is an argument, and the caller holds the job's lock.

A member's states::

    (absent) --join--> JOINED --leave----------------> LEFT
                          `----heartbeat timeout-----> LOST
"""

from __future__ import annotations

import enum
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pserver import wire_pb2 as wire
from pserver.errors import UnknownSession
from pserver.job.stragglers import Pace
from pserver.job.wait_table import WaitTable
from pserver.job.watermark import Watermark
from pserver.job_log.records import Process
from pserver.job_log.standing import Applied
from pserver.metrics.labels import public_name
from pserver.running_clock import RUNNING


class MemberState(enum.Enum):
    """Whether a trainer takes part."""

    JOINED = "joined"
    LEFT = "left"
    LOST = "lost"


# As JSON: {"0": {"incarnation": "...", "lanes": {"0": [applied, committed, overflow, rows]}}}
Watermarks = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait of a trainer for the others.

    Attributes:
        member: the trainer that waits.
        place: where: "lane 0", "barrier".
        what: for messages: "step 12", "barrier 'epoch'".
        done: whether the wait is over.
        apart: trainers that wait at another barrier come to this one, too.
        deadline: the longest, by :func:`time.monotonic`.
        missing: gives the trainers that have not come.
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
        state: whether it takes part.
        watermarks: by lane.
        activity: what it says that it does ("step 12", "saving").
        report: what it says of its training.
        waits: what it waits for, by place; see blocking_waits.py.
        leaving: the lanes of which its last step has come; it leaves when all are applied.
        finished: it takes no further step, and waits for the others to say the same.
        returns: it has left to join again, with another plan.
        fenced: why it was lost, a sentence; "" while it is not.
        pace: how long its own part of a step takes.
        preempted_after: it has left because its host takes it away, after this step of its script;
            None: it has not.
        late: the others trained already when it joined; which change of the members that was.  0:
            it was there from the beginning.
        placed: it has been told where they are.
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
    waits: dict[str, Wait] = field(default_factory=dict)
    leaving: set[int] = field(default_factory=set)
    finished: bool = False
    returns: bool = False
    fenced: str = ""
    pace: Pace = field(default_factory=Pace)
    preempted_after: int | None = None
    late: int = 0
    placed: bool = False

    @property
    def word(self) -> str:
        """Its state as ``pserver status`` shows it."""
        if self.preempted_after is not None:
            return "preempted"
        joined = self.state is MemberState.JOINED
        return "finished" if self.finished and joined else self.state.value

    @property
    def absent(self) -> bool:
        """Whether it is not there before the job's end."""
        lost = self.state is MemberState.LOST
        return self.preempted_after is not None or lost or bool(self.leaving)

    def goodbye(self, reason: str) -> str:
        """That it has left, as a sentence.

        Args:
            reason: why the job cannot go on; "": it can.
        """
        if self.preempted_after is not None:
            return f"trainer {self.trainer} was preempted after step {self.preempted_after}"
        return f"trainer {self.trainer} left" + (f": {reason}" if reason else "")

    @property
    def steps_under_way(self) -> bool:
        """Whether a step of it that has come is not applied."""
        return any(each.taking > each.applied for each in self.watermarks.values())

    def watermark(self, lane: int) -> Watermark:
        """How far it has come in a lane."""
        return self.watermarks.setdefault(lane, Watermark())

    def step(self, lane: int) -> int:
        """The last step of a lane that was applied; 0 before the first."""
        return self.watermarks[lane].applied if lane in self.watermarks else 0

    @property
    def waiting(self) -> str:
        """What it waits for ("step 12", "barrier 'epoch'"), "" while it computes."""
        return " and ".join(wait.what for wait in self.waits.values())


class Membership:
    """The trainers of one job.

    Args:
        expected: how many trainers the plan has.
        since: when the job began, in seconds of the job's clock.
        began: when the trainer that began it was there; None: then, too.
        least: with how many trainers the job begins, whichever they are; more may join later.  0:
            with all of the plan.
        clock: of the waits: seconds that never go back.

    [Note: kept places]  Steps that need all trainers wait for a while when one is lost: another
    process may take its place.  So its place is kept, up to a time.  The same holds for a process
    that has been let in and is not here yet: the record of its joining stands, so the other
    trainers' steps wait for its first one.  Then all have the same values, as of the same step.

    Attributes:
        by_trainer: the members; of each number the last one.
        kept: places of lost trainers that are kept, by trainer: until when, in seconds of the job's
            clock.
        arriving: the same of processes that have been let in and are not here yet.
        held: processes that wait to be let in, while the others train.
        fenced: processes that were lost, whether they had joined here or not.
        preempted: the trainers that were, with the last step that each has taken.
        changes: how often trainers have joined, and gone before the job's end.
        away: trainers that take part in the job, and have not come to this server since it was
            started again; with their processes.
        counted: by process and lane, the steps that were decided before that, and the rows that
            these have changed.
        waits: who waits for whom; server 0's counts.
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
        self.kept: dict[int, float] = {}
        self.arriving: dict[int, float] = {}
        self.held: set[Process] = set()
        self.away: dict[int, Process] = {}
        self.counted: dict[Process, Sequence[Applied]] = {}

    def add(self, member: Member, steps: Sequence[int] = (), late: bool = False) -> None:
        """A trainer joins; it gets the watermarks that were saved of its incarnation.

        Args:
            steps: by lane, where it begins; none: where files say.
            late: the others train already.
        """
        self.by_trainer[member.trainer] = member
        self.waits.drop(member.trainer)
        self.kept.pop(member.trainer, None)
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
        """The watermarks of all members, to be saved with the slices; of those that are away what
        this server has counted as theirs.
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

    def left(self) -> dict[Process, int | None]:
        """Those who have left, with the step after which they were preempted."""
        return {
            Process(member.trainer, member.incarnation): member.preempted_after
            for member in self.by_trainer.values()
            if member.state is MemberState.LEFT
        }

    def begin_at(self, steps: Mapping[int, Sequence[int]]) -> None:
        """Trainers that join go on from these steps, whatever processes they are; see [Note: a
        server's file] in held_values.py.

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
        """Those who take part now, by trainer number."""
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
        finished or left or are lost, or that leave after a step which has come.

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
        return sorted({*self.awaited(lane), *self.kept, *self.arriving})

    def expire(self, now: float) -> list[int]:
        """Ends the time of places; see [Note: kept places].

        Returns:
            Those that are kept no more.
        """
        over = set()
        for places in (self.kept, self.arriving):
            for trainer in [each for each, until in places.items() if now >= until]:
                del places[trainer]
                over.add(trainer)
        return sorted(over)

    def preempt(self, member: Member, step: int) -> None:
        """A trainer leaves because its host takes it away.

        Args:
            step: the last one that it has taken, as its script counts.
        """
        if member.state is MemberState.JOINED:
            member.preempted_after = step
            self.preempted = {**self.preempted, member.trainer: step}
            self.changes += 1

    @property
    def first(self) -> int:
        """The least trainer that is not absent, of those that have joined late the earliest one,
        if no other is there: it does what one trainer does for all.  It may be asked without the
        job's lock.
        """
        late = {t: m.late for t, m in dict(self.by_trainer).items()}
        there = set(range(self.expected)).difference(self.absent)
        return min(there, key=lambda trainer: (late.get(trainer, 0), trainer), default=0)

    def first_of(self, which: Callable[[Member], bool]) -> int | None:
        """The trainer that stands first among those that take part and are ``which``."""
        there = sorted((each.late, each.trainer) for each in self.joined() if which(each))
        return there[0][1] if there else None

    @property
    def absent(self) -> list[int]:
        """The trainers that are not there before the job's end: preempted, lost, or leaving after a
        step which has come; and the free places of a job that has begun with fewer.
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
        """The trainers of the plan that have not said that they take no further step."""
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
            Each of them, with what the others are to be told.
        """
        found = []
        for member in self.joined():
            silence = now - member.last_heard
            if silence > timeout:
                doing = member.waiting or member.activity
                text = (
                    f"trainer {member.trainer} has shown no heartbeat for {silence:.1f} s "
                    f"(heartbeat timeout {timeout:g} s)"
                    + (f", last heard at {doing}" if doing else "")
                )
                found.append((member, text))
        return found

    def not_back(self, now: float, timeout: float) -> list[Process]:
        """Those that are away for longer than the heartbeat timeout.

        Args:
            now: in seconds of the job's clock.
            timeout: in seconds.
        """
        return list(self.away.values()) if now - self.since > timeout else []

    def fence(self, process: Process, text: str) -> Member | None:
        """A trainer is lost: nothing that it sends counts any more.

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
        if member is None:  # so that nobody waits for it
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
        """Whether the job has ended: every expected trainer has joined, and none takes part now."""
        enough = len(self.by_trainer) >= (self.least or self.expected)
        return enough and not (self.joined() or self.away)

    @property
    def returning(self) -> bool:
        """Whether a trainer has left to join again, with another plan."""
        return any(member.returns for member in self.by_trainer.values())

    @property
    def deserted(self) -> bool:
        """Whether trainers have joined, and none takes part now."""
        return bool(self.by_trainer) and not (self.joined() or self.away)
