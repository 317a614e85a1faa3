"""For whom a lane's steps wait: for all trainers of a sync round, or for the slowest one."""

from __future__ import annotations

from collections.abc import Callable

from pserver.job.blocking_waits import wait_until_done
from pserver.job.lifecycle import Lifecycle
from pserver.job.membership import Member, Membership, Wait
from pserver.job.sync_round import SyncRound
from pserver.job.waits import Event
from pserver.metrics.job_steps import LaneSteps


class LaneWaits:
    """The waits of trainers for one another in one lane.  The caller holds the job's lock.

    Args:
        index: of the lane.
        members: the job's trainers.
        job: for its lock and its end.
        steps: what is measured of them.
    """

    def __init__(self, index: int, members: Membership, job: Lifecycle, steps: LaneSteps) -> None:
        self._index, self._members, self._job, self._steps = index, members, job, steps
        self._nearer = job.waits.event()  # the slowest trainer has taken a step
        # a round's record stands, or it is merged, or updated
        self.moved = job.waits.event()

    def slowest(self) -> int:
        """The least step among the trainers that have not left; one that has not joined yet has
        taken none.
        """
        steps = [
            self._members.step(trainer, self._index)
            for trainer in self._members.awaited(self._index)
        ]
        return min(steps, default=2**63)

    def wait_for_slowest(self, member: Member, step: int, staleness: int) -> None:
        """Waits until no trainer is more steps behind than that; the log says for whom when that
        takes long.

        Raises:
            PServerError: what ended the job meanwhile.
        """

        def missing() -> list[int]:
            awaited = self._members.awaited(self._index)
            return [
                trainer for trainer in awaited if self._members.step(trainer, self._index) < step
            ]

        least = step - staleness
        self._wait(member, step, lambda: self.slowest() >= least, missing, self._nearer)

    def took(self, step: int) -> None:
        """A trainer has taken a step: perhaps it was the slowest one."""
        if self._nearer.standing and self.slowest() >= step:
            self._nearer.tell()

    def wait_for_record(self, member: Member, step: int, current: SyncRound) -> None:
        """Waits until a round's record stands, or the trainer is lost, as
        :meth:`wait_for_slowest` does.
        """

        def missing() -> list[int]:
            needed = self._members.awaited_together(self._index)
            return [trainer for trainer in needed if trainer not in current.contributions]

        self._wait(member, step, lambda: bool(current.time or member.fenced), missing, self.moved)

    def wait_for_leader(self, current: SyncRound, done: Callable[[], bool]) -> None:
        """Waits for the thread that leads a round.

        Raises:
            PServerError: what ended the job before the round's update began.
        """

        def check() -> None:
            if current.task is None:  # otherwise it ends, or has failed
                self._job.check_running()

        self._job.waits.wait(self.moved, done, check=check)

    def _wait(
        self,
        member: Member,
        step: int,
        done: Callable[[], bool],
        missing: Callable[[], list[int]],
        event: Event,
    ) -> None:
        since = self._steps.traced_since
        wait = Wait(member, f"lane {self._index}", f"step {step}", done, missing=missing)
        wait_until_done(self._job, self._members, wait, missing, event)
        self._steps.waited(member.trainer, step, since)
