"""For whom a lane's steps wait: for all trainers of a sync round, or for the slowest one."""

from __future__ import annotations

from collections.abc import Callable

from pserver.job.blocking_waits import wait_until_done
from pserver.job.lifecycle import Lifecycle
from pserver.job.membership import Member, Membership, Wait
from pserver.job.sync_round import SyncRound
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

    def slowest(self) -> int:
        """The least step among the trainers that have not left; one that has not joined yet has
        taken none.
        """
        steps = [
            self._members.step(trainer, self._index)
            for trainer in self._members.awaited(self._index)
        ]
        return min(steps, default=2**63)

    def wait(
        self, member: Member, step: int, done: Callable[[], bool], current: SyncRound | None = None
    ) -> None:
        """Waits until ``done``; the log says for whom when that takes long.

        Args:
            current: the sync round whose trainers are missing; None: those behind the step are.

        Raises:
            PServerError: what ended the job meanwhile.
        """

        def missing() -> list[int]:
            if current is not None:
                needed = self._members.awaited_together(self._index)
                return [trainer for trainer in needed if trainer not in current.contributions]
            awaited = self._members.awaited(self._index)
            return [
                trainer for trainer in awaited if self._members.step(trainer, self._index) < step
            ]

        since = self._steps.traced_since
        wait_until_done(
            self._job,
            self._members,
            Wait(member, f"lane {self._index}", f"step {step}", done),
            missing,
        )
        self._steps.waited(member.trainer, step, since)
