"""Who takes part in a server's job: joining, heartbeats, leaving, being lost, and waiting for one
another.  No locks, no clock: time is an argument, and the job's lock is held by whoever calls.

A member's states::

    (absent) --join--> JOINED --leave--> LEFT
                          `--silence--> LOST
"""

from __future__ import annotations

import enum
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pserver.errors import Refused


class State(enum.Enum):
    """Where a trainer stands; the values are the words that ``status`` shows."""

    JOINED = "joined"
    LEFT = "left"
    LOST = "lost"


@dataclass(slots=True)
class Watermark:
    """How far a trainer has come in one lane.  There is one for each trainer and lane, however many
    steps they take.

    [Note: exactly once]  A trainer numbers its steps from 1 and sends one until it has been
    answered, so a step that comes is the next one, the one being taken, or one that was applied: it
    is taken, joined, or only answered.  Marks move with the table, while nobody sees it between two
    steps (quiesce.py), and are saved with it.  A mark belongs to one start of a trainer's process, its
    incarnation: another one counts its steps from 1 anew.

    Attributes:
        applied: the last step that was applied.
        committed, overflow: what came of it, for when it is asked again.
        taking: the step that is being taken, from its COMMIT until it is applied.
        uploaded: the last upload that was loaded, by its request's number.
        stream: the number of the stream that counts: the latest.
        end_stream: breaks it.
        loading: a part of an upload is being copied into the table.
    """

    applied: int = 0
    committed: int = 0
    overflow: bool = False
    taking: int = 0
    uploaded: int = 0
    stream: int = 0
    end_stream: Callable[[], None] | None = None
    loading: bool = False

    def apply(self, committed: int, overflow: bool) -> None:
        """The step that is being taken has been applied."""
        self.applied, self.committed, self.overflow = self.taking, committed, overflow

    def saved(self) -> list[int]:
        """What a saved table keeps of it."""
        return [self.applied, self.committed, int(self.overflow)]

    def restore(self, saved: Sequence[int]) -> None:
        """Takes over what was saved, unless more has been applied since: a step's number is never
        used again.
        """
        applied, committed, overflow = saved
        if applied > self.applied:
            self.applied, self.committed, self.overflow = applied, committed, bool(overflow)


# as JSON holds them: trainer -> {"incarnation": ..., "lanes": {lane: Mark.saved()}}
Watermarks = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Wait:
    """One trainer's wait: where ("lane 0", "barrier"), for what ("step 12"), and whether it is
    over.
    """

    member: Member
    place: str
    what: str
    done: Callable[[], bool]


@dataclass(slots=True)
class Member:
    """One trainer, as one server sees it.

    Attributes:
        session: the secret that its calls and its stream repeat.
        marks: by lane.
        heard: when it last gave a sign of life, in seconds of the job's clock.
        waits: what it waits for, by place; see blocking_waits.py.
    """

    trainer: int
    incarnation: str
    transport: str
    heard: float
    session: str = field(default_factory=lambda: secrets.token_hex(16))
    state: State = State.JOINED
    marks: dict[int, Watermark] = field(default_factory=dict)
    activity: str = ""
    waits: dict[str, Wait] = field(default_factory=dict)

    def mark(self, lane: int) -> Watermark:
        """How far it has come in a lane."""
        return self.marks.setdefault(lane, Watermark())

    def step(self, lane: int) -> int:
        """The last step of a lane that was applied; 0 before the first."""
        return self.marks[lane].applied if lane in self.marks else 0

    @property
    def waiting(self) -> str:
        """What it waits for ("step 12", "barrier 'epoch'"), "" while it computes."""
        return " and ".join(wait.what for wait in self.waits.values())


class Membership:
    """The trainers of one job, ``expected`` in number once the plan is known."""

    def __init__(self, expected: int, since: float) -> None:
        self.expected = expected
        self.since = since  # when the job began
        self.by_trainer: dict[int, Member] = {}
        self._saved: Watermarks = {}  # of trainers that have not joined since they were loaded

    def add(self, member: Member) -> None:
        """A trainer joins, and has the marks that were saved of the same start of its process."""
        self.by_trainer[member.trainer] = member
        self._restore(member)

    def saved(self) -> Watermarks:
        """The marks of everybody, for whoever saves the table."""
        return {
            str(member.trainer): {
                "incarnation": member.incarnation,
                "lanes": {str(lane): mark.saved() for lane, mark in sorted(member.marks.items())},
            }
            for _, member in sorted(self.by_trainer.items())
        }

    def load(self, saved: Watermarks) -> None:
        """Takes over saved marks.  See [Note: exactly once] in :class:`Watermark` for whose they are."""
        self._saved = dict(saved)
        for member in self.by_trainer.values():
            self._restore(member)

    def _restore(self, member: Member) -> None:
        saved = self._saved.get(str(member.trainer))
        if saved is not None and saved["incarnation"] == member.incarnation:
            for lane, mark in saved["lanes"].items():
                member.mark(int(lane)).restore(mark)

    def joined(self) -> list[Member]:
        """Those who take part now, by trainer number."""
        return [
            member for _, member in sorted(self.by_trainer.items()) if member.state is State.JOINED
        ]

    def of_session(self, session: str) -> Member:
        """The member that holds a session.

        Raises:
            Refused: there is none.
        """
        for member in self.by_trainer.values():
            if secrets.compare_digest(member.session.encode(), session.encode()):
                return member
        raise Refused("this session is not known here: join first (has the server been restarted?)")

    def step(self, trainer: int, lane: int) -> int:
        """The last applied step of a trainer; 0 for one that has not joined."""
        member = self.by_trainer.get(trainer)
        return 0 if member is None else member.step(lane)

    def awaited(self) -> list[int]:
        """The trainers whom a sync step or a barrier needs: all of the plan but those who have
        left.
        """
        gone = {
            trainer for trainer, member in self.by_trainer.items() if member.state is State.LEFT
        }
        return [trainer for trainer in range(self.expected) if trainer not in gone]

    def silent(self, now: float, deadline: float) -> list[Member]:
        """Those who take part and have given no sign of life for longer than the deadline."""
        return [member for member in self.joined() if now - member.heard > deadline]

    def missing(self, now: float, start_deadline: float) -> list[int]:
        """The trainers who have not joined although the start-up time is over."""
        if now - self.since <= start_deadline:
            return []
        return [trainer for trainer in range(self.expected) if trainer not in self.by_trainer]

    @property
    def over(self) -> bool:
        """Whether the job has ended: somebody has been here, everybody expected has been, and
        nobody is left.
        """
        return len(self.by_trainer) >= self.expected and not self.joined()
