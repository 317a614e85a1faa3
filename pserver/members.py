"""Who takes part in a server's job: joining, heartbeats, leaving, being lost, and waiting for one another.  No locks, no clock:
time is an argument, and the job's lock is held by whoever calls.

A member's states::

    (absent) --join--> JOINED --leave--> LEFT
                          `--silence--> LOST
"""

from __future__ import annotations

import enum
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pserver.errors import Refused

if TYPE_CHECKING:
    from pserver.waits import Wait


class State(enum.Enum):
    """Where a trainer stands; the values are the words that ``status`` shows."""

    JOINED = "joined"
    LEFT = "left"
    LOST = "lost"


@dataclass(slots=True)
class Member:
    """One trainer, as one server sees it.

    Attributes:
        session: the secret that its calls and its stream repeat.
        steps: the last of its steps that was applied, by lane.
        heard: when it last gave a sign of life, in seconds of the job's clock.
        waits: what it waits for, by place; see waits.py.
        taking: the step that is being taken, by lane, from its COMMIT until it is applied.
    """

    trainer: int
    incarnation: str
    carrier: str
    heard: float
    session: str = field(default_factory=lambda: secrets.token_hex(16))
    state: State = State.JOINED
    steps: dict[int, int] = field(default_factory=dict)
    activity: str = ""
    waits: dict[str, Wait] = field(default_factory=dict)
    taking: dict[int, int] = field(default_factory=dict)

    def step(self, lane: int) -> int:
        """The last step of a lane that was applied; 0 before the first."""
        return self.steps.get(lane, 0)

    def applied(self, lane: int) -> None:
        """The step that is being taken has been applied."""
        self.steps[lane] = self.taking[lane]

    @property
    def waiting(self) -> str:
        """What it waits for ("step 12", "barrier 'epoch'"), "" while it computes."""
        return " and ".join(wait.what for wait in self.waits.values())


class Members:
    """The trainers of one job, ``expected`` in number once the plan is known."""

    def __init__(self, expected: int, since: float) -> None:
        self.expected = expected
        self.since = since  # when the job began
        self.by_trainer: dict[int, Member] = {}

    def joined(self) -> list[Member]:
        """Those who take part now, by trainer number."""
        return [member for _, member in sorted(self.by_trainer.items()) if member.state is State.JOINED]

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
        """The trainers whom a sync step or a barrier needs: all of the plan but those who have left."""
        gone = {trainer for trainer, member in self.by_trainer.items() if member.state is State.LEFT}
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
        """Whether the job has ended: somebody has been here, everybody expected has been, and nobody is left."""
        return len(self.by_trainer) >= self.expected and not self.joined()
