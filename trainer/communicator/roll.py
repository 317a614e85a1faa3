"""Which trainers of a job are still there, as server 0 tells it.

A trainer that was preempted, or lost, takes no further step.  Those that are left do without it
what all of them share: the divisor of a geo lane's changes, and what one trainer does for all.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

from pserver.client.replies import Absences
from trainer.environment.environment import Connection
from transpiler.plan.plan import Plan

log = logging.getLogger(__name__)


class Roll:
    """One trainer's view of it.  Any thread may call it.

    Args:
        trainers: of the plan.
        own: this trainer's number.
        may_leave: trainers leave when they are preempted, or are lost and the others go on, so that
            another one may have to do what trainer 0 did.

    Attributes:
        trainers, own, may_leave: as given.

    Example::

        roll = Roll(3, own=1)
        roll.learn(Absences(1, frozenset({0}), {0: 57}))
        roll.is_first, roll.count    # True, 2
    """

    def __init__(self, trainers: int, own: int, may_leave: bool = False) -> None:
        self.trainers, self.own, self.may_leave = trainers, own, may_leave
        self._known = Absences()  # replaced, never changed
        self._lock = threading.Lock()  # of who replaces it

    @property
    def count(self) -> int:
        """How many trainers are there."""
        return max(1, self.trainers - len(self._known.absent))

    @property
    def changes(self) -> int:
        """How often trainers have joined, and gone, as far as this one has heard."""
        return self._known.changes

    @property
    def absent(self) -> frozenset[int]:
        """Those that are not there: lost, preempted, or not come yet in a job that began with
        fewer.
        """
        return self._known.absent

    @property
    def first(self) -> int:
        """The one that does what one trainer does for all: trainer 0, while it is there; then the
        least of those that have been there from the beginning.
        """
        absent, said = self._known.absent, self._known.first
        if said is not None and said not in absent:
            return said
        return next((trainer for trainer in range(self.trainers) if trainer not in absent), 0)

    @property
    def is_first(self) -> bool:
        """Whether that is this one."""
        return self.first == self.own

    def learn(self, said: Absences) -> None:
        """Takes up what server 0 says, and logs who was preempted.  Answers may come in another
        order than they were given in.
        """
        with self._lock:
            before = self._known
            if said.changes < before.changes:
                return
            if said.changes == before.changes:  # who leaves is no change yet
                said = replace(said, absent=said.absent | before.absent)
            self._known = said
        for trainer, step in sorted(said.preempted.items()):
            if trainer not in before.preempted and trainer != self.own:
                log.warning(
                    "trainer %d was preempted after step %d; %d of %d trainers go on%s",
                    *(trainer, step, self.count, self.trainers),
                    f", and trainer {self.first} stands in for it" if trainer < self.first else "",
                )


def roll_of(plan: Plan, trainer: int, connection: Connection) -> Roll:
    """The roll of a job that begins.

    Raises:
        ValueError: a trainer is to leave when it is preempted, and the others could not go on.
    """
    if plan.averaged and plan.trainers > 1 and not plan.outlives_trainers:
        connection.check_no_grace(
            "where trainers average gradients among themselves, and the job stops with one: "
            f"they do so for {plan.averaged[0]!r}"
        )
    may_leave = connection.grace_seconds > 0 or plan.outlives_trainers
    return Roll(plan.trainers, trainer, may_leave)
