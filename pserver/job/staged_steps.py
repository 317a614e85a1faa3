"""The staged steps of one lane whose updates come one by one: each waits for its record, and for
its turn.

[Note: turns]  Two servers that apply the same records hold the same bits.  So the updates of a lane
begin in the order of the log, and none begins a batch before the one before it is done; a thread
that waits for an earlier update helps with it (update_task.py).  A staged step always has a thread
that waits here, so every turn is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pserver.errors import PServerError, TrainerLost
from pserver.job.decided_steps import DecidedSteps
from pserver.job.lifecycle import Lifecycle
from pserver.job.membership import Member, Membership
from pserver.job.sync_round import Contribution, SyncRound
from pserver.job.waits import Event
from pserver.job.watermark import Watermark
from pserver.job_log.records import Process, ProcessStep


@dataclass(slots=True)
class StagedStep:
    """One trainer's step that has come whole.

    Attributes:
        event: that its turn has come, or it is applied.
        time: of its record, in seconds since 1970.
        record: the record's number.
        turn: its place among the lane's updates; -1: it has no record.
        dropped: its trainer was lost before it had one.
    """

    member: Member
    step: int
    contribution: Contribution
    event: Event
    time: float = 0.0
    record: int = 0
    turn: int = -1
    dropped: bool = False

    def decided(self, lane: int) -> DecidedSteps:
        """It and its record, as an update of its own."""
        process = Process(self.member.trainer, self.member.incarnation)
        return DecidedSteps(
            lane,
            self.record,
            self.time,
            (ProcessStep(process, self.step),),
            {self.member.trainer: self.contribution},
        )


class StagedSteps:
    """The staged steps of one lane.  The caller holds the job's lock.  See [Note: turns].

    Args:
        job: for its lock and its end.
    """

    def __init__(self, job: Lifecycle) -> None:
        self._job = job
        self._waiting: dict[int, StagedStep] = {}  # by trainer
        self._deciding: dict[int, StagedStep] = {}  # by trainer: with a record, and not applied
        self._turns: dict[int, StagedStep] = {}  # with a record, and not begun
        self._decided = self._begun = 0  # updates
        # one that waits until another may be staged
        self.placed = job.waits.event()

    def __len__(self) -> int:
        return len(self._waiting)

    def check(self, member: Member) -> None:
        """Returns if a trainer's step can count.

        Raises:
            TrainerLost: the trainer was lost.
            PServerError: what has ended the job.
        """
        self._job.check_running()
        if member.fenced:
            raise TrainerLost(member.fenced)

    def add(self, member: Member, step: int, contribution: Contribution) -> StagedStep:
        """A step has come; before its record can."""
        staged = StagedStep(member, step, contribution, self._job.waits.event())
        self._waiting[member.trainer] = staged
        return staged

    def decide(
        self, steps: Iterable[ProcessStep], time: float, record: int
    ) -> dict[int, Contribution]:
        """The record of these steps stands.

        Returns:
            Them, by trainer.
        """
        found = {}
        for step in steps:
            staged = self._waiting.pop(step.process.trainer)
            staged.time, staged.record, staged.turn = time, record, self._decided
            self._turns[self._decided] = staged
            self._decided += 1
            self._deciding[staged.member.trainer] = staged
            found[staged.member.trainer] = staged.contribution
        self._tell_next()
        return found

    def _tell_next(self) -> None:
        if (following := self._turns.get(self._begun)) is not None:
            following.event.tell()

    @property
    def waiting(self) -> list[tuple[Member, int, int]]:
        """The steps that have no record: trainer, number, and rows of tables that they change."""
        return [(s.member, s.step, s.contribution.rows) for s in self._waiting.values()]

    @property
    def unapplied(self) -> dict[int, Contribution]:
        """By trainer, the step that has its record and is not applied."""
        return {trainer: each.contribution for trainer, each in self._deciding.items()}

    def have_applied(self, record: int) -> bool:
        """Whether each step is applied whose record stands before this one."""
        return all(each.record > record for each in self._deciding.values())

    def applied(self, staged: StagedStep) -> None:
        """A step has been applied."""
        del self._deciding[staged.member.trainer]
        staged.event.tell()

    def drop(self, member: Member) -> bool:
        """A trainer is lost; what it has staged never counts.

        Returns:
            Whether it had staged a step.
        """
        staged = self._waiting.get(member.trainer)
        if staged is not None and staged.member is member:
            del self._waiting[member.trainer]
            staged.dropped = True
            return True
        return False

    def wait_for_turn(self, staged: StagedStep) -> None:
        """Waits until a step has its record, and the lane's earlier updates have begun.

        Raises:
            TrainerLost: its trainer was lost before.
            PServerError: what ended the job meanwhile.
        """
        self._wait(staged.event, staged.member, lambda: staged.turn == self._begun, staged)

    def wait_until_applied(self, member: Member, step: int, watermark: Watermark) -> None:
        """Waits for a step that runs in another thread, from an earlier stream.

        Args:
            watermark: of the trainer, in this lane.

        Raises:
            TrainerLost, PServerError: as :meth:`wait_for_turn`.
        """
        trainer = member.trainer
        staged = self._waiting.get(trainer) or self._deciding.get(trainer)
        event = self._job.changed if staged is None else staged.event
        self._wait(event, member, lambda: watermark.applied >= step)

    def wait_for_place(
        self, member: Member, watermark: Watermark, again: bool, done: Callable[[], bool]
    ) -> None:
        """Waits until a step may be staged: one who has just joined may be here before the round of
        the others is applied.

        Args:
            watermark: of the trainer, in this lane.
            again: it is staged already.
            done: whether another one may be.

        Raises:
            TrainerLost: the trainer was lost, and its step has come after the record of that:
                nothing of it stays, so that another process may take its number.
            PServerError: what ended the job meanwhile.
        """
        try:
            self._wait(self.placed, member, lambda: again or done())
            if member.fenced and not again:
                raise TrainerLost(member.fenced)
        except PServerError:
            watermark.taking = watermark.applied
            raise

    def _wait(
        self,
        event: Event,
        member: Member,
        done: Callable[[], bool],
        staged: StagedStep | None = None,
    ) -> None:
        """Waits until ``done``, for a trainer.

        Args:
            staged: what has its record is done whatever happens to its trainer.

        Raises:
            TrainerLost: the trainer was lost before.
            PServerError: what ended the job meanwhile.
        """

        def check() -> None:
            if member.fenced and (staged is None or staged.dropped):
                raise TrainerLost(member.fenced)
            self._job.check_running()

        self._job.waits.wait(event, done, check=check)

    def begin(self) -> None:
        """The update whose turn it is has begun."""
        del self._turns[self._begun]
        self._begun += 1
        self._tell_next()


def waiting(current: SyncRound, members: Membership, lane: int) -> list[tuple[Member, int, int]]:
    """What :attr:`StagedSteps.waiting` is in other lanes, of a round of all trainers' steps."""
    found = {} if current.time else current.contributions
    staged = [(members.by_trainer[trainer], each.rows) for trainer, each in found.items()]
    return [(member, member.watermark(lane).taking, rows) for member, rows in staged]
