"""The sync rounds of one lane that are applied: what they leave behind, and what a trainer is told
that asks again.
"""

from __future__ import annotations

from pserver.job.decisions import process_of
from pserver.job.job_leases import JobLeases
from pserver.job.membership import Member, Membership
from pserver.job.sync_round import Clipping, SyncRound
from pserver.job.update_task import UpdateTask
from pserver.job_log.records import ProcessStep
from pserver.metrics.job_steps import LaneSteps


class AppliedRounds:
    """The caller holds the job's lock.

    [Note: norms again]  Where norms clip, each trainer gets every server's part of them, and tells
    all servers the coefficient.  A server that has it from one trainer applies the round, while
    another one may have lost its connection before it heard the norms.  So the last round's are
    told again: a coefficient of some servers' norms alone would be another one, and the rest of the
    servers might hear it first.

    Args:
        index: of the lane.
        members: the job's trainers.
        leases: of the samples that steps consume.
        steps: what is measured of the lane's.
    """

    def __init__(
        self, index: int, members: Membership, leases: JobLeases, steps: LaneSteps
    ) -> None:
        self._index, self._members, self._leases, self._steps = index, members, leases, steps
        self._clipped: Clipping | None = None

    def add(self, current: SyncRound) -> None:
        """A round has been applied: moves the watermark of every trainer in it."""
        for trainer, contribution in current.contributions.items():
            member = self._members.by_trainer[trainer]
            refuses = current.refuses(trainer)
            self._steps.pushed(refused=refuses or current.overflow)
            member.watermark(self._index).apply(
                current.committed, current.overflow, refuses, current.nonfinite, current.outliers
            )
            self._leases.decided(trainer, member.incarnation, contribution.leases)
        done = SyncRound(steps=current.steps)
        self._clipped = Clipping(done, current.norms, scaled=True) if current.norms else None

    def again(self, member: Member, step: int) -> UpdateTask | Clipping:
        """For a trainer whose step has been applied, and comes again."""
        self._steps.repeated()
        clipped, this = self._clipped, ProcessStep(process_of(member), step)
        return clipped if clipped is not None and this in clipped.round.steps else UpdateTask()
