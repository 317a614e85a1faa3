"""The live trainers of a job, as server 0 reports them, and their leader.

A trainer that was preempted, or lost, takes no further step.  The live trainers do the shared work
without it: they divide a geo lane's changes by their own number, and one of them is the leader.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

from pserver.client.replies import Absences
from trainer.environment.environment import Connection
from transpiler.plan.plan import Plan

log = logging.getLogger(__name__)


class LiveTrainers:
    """One trainer's view of the live trainers.  Any thread may call it.

    Args:
        trainers: the plan's number of trainers.
        own: this trainer's number.
        may_leave: whether the job continues without a preempted or lost trainer, so that another
            trainer may become the leader.

    Attributes:
        trainers, own, may_leave: as given.

    Example::

        live = LiveTrainers(3, own=1)
        live.learn(Absences(1, frozenset({0}), {0: 57}))
        live.is_leader, live.count    # True, 2
    """

    def __init__(self, trainers: int, own: int, may_leave: bool = False) -> None:
        self.trainers, self.own, self.may_leave = trainers, own, may_leave
        self._known = Absences()  # replaced, never changed
        self._lock = threading.Lock()  # held to replace _known

    @property
    def count(self) -> int:
        """The number of live trainers, at least 1."""
        return max(1, self.trainers - len(self._known.absent))

    @property
    def changes(self) -> int:
        """The number of times that trainers have joined or gone, as known to this trainer."""
        return self._known.changes

    @property
    def absent(self) -> frozenset[int]:
        """The trainers that are not live: lost, preempted, or not yet joined in a job that began
        with fewer.
        """
        return self._known.absent

    @property
    def leader(self) -> int:
        """The leader: trainer 0 while it is live, then the lowest-ranked live trainer of those that
        are in the job from the start.
        """
        absent, said = self._known.absent, self._known.first
        if said is not None and said not in absent:
            return said
        return next((trainer for trainer in range(self.trainers) if trainer not in absent), 0)

    @property
    def is_leader(self) -> bool:
        """Whether this trainer is the leader."""
        return self.leader == self.own

    def learn(self, said: Absences) -> None:
        """Takes over the news from server 0, and logs preempted trainers.  Answers may arrive in
        another order than the server gave them in.
        """
        with self._lock:
            before = self._known
            if said.changes < before.changes:
                return
            if said.changes == before.changes:  # leaving is no change yet
                said = replace(said, absent=said.absent | before.absent)
            self._known = said
        for trainer, step in sorted(said.preempted.items()):
            if trainer not in before.preempted and trainer != self.own:
                log.warning(
                    "trainer %d was preempted after step %d; %d of %d trainers continue%s",
                    *(trainer, step, self.count, self.trainers),
                    f", and trainer {self.leader} is now the leader"
                    if trainer < self.leader
                    else "",
                )


def live_trainers_of(plan: Plan, trainer: int, connection: Connection) -> LiveTrainers:
    """The live trainers at the start of a job.

    Raises:
        ValueError: a grace period is set, and the others could not continue without a preempted
            trainer.
    """
    if plan.averaged and plan.trainers > 1 and not plan.outlives_trainers:
        connection.check_no_grace(
            "where trainers average gradients among themselves, and the job stops with one: "
            f"they do so for {plan.averaged[0]!r}"
        )
    may_leave = connection.grace_seconds > 0 or plan.outlives_trainers
    return LiveTrainers(plan.trainers, trainer, may_leave)
