"""What follows when a process of a job has failed: a pure decision, from what ``launch`` knows.

::

                        | servers say that    | restarts are | what follows
                        | the job goes on     | left         |
    --------------------+---------------------+--------------+----------------------------------
    a trainer           | yes, and it left in | -            | WITHOUT: the others go on
                        | order (preempted)   |              |
                        | yes                 | yes          | ALONE: it is started again
                        | yes                 | no           | WITHOUT
                        | no                  | yes          | WHOLE: the job is started again
    a server            | yes, and it has     | yes          | ALONE: it is started again, and goes
                        | saved               |              | on from its last save
                        | no                  | yes          | WHOLE
    any of them         | no                  | no           | FAIL

Without servers nothing goes on, and each start has new ranks.  So a place that does not come back
may be left empty then: FEWER.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

EARLY_SECONDS = 60.0  # a trainer that lives for less has died at its start


class Next(enum.Enum):
    """What ``launch`` does when a process has failed."""

    WITHOUT = "the others go on without it"
    ALONE = "it is started again, and the others go on"
    WHOLE = "the job is started again"
    FEWER = "the job is started again on the trainers that are left"
    FAIL = "the job has failed"


@dataclass(frozen=True, slots=True)
class Ended:
    """A process that has failed, or has left before its job's end.

    Attributes:
        trainer: its number; None: a server.
        lived_seconds: for how long it ran.
        goes_on: all servers say that the job goes on without it; of a server: that they wait for
            it to go on from its last save.
        preempted: it has left in order, because somebody asked it to.
    """

    trainer: int | None
    lived_seconds: float
    goes_on: bool = False
    preempted: bool = False


@dataclass
class RestartPolicy:
    """Decides, and counts restarts.

    Attributes:
        most: how many restarts there may be, of single trainers and of the job.
        whole: this launch has started all processes of the job, and so can start them again.
        least: without servers: with how many trainers the job may go on as soon as it has lost one;
            0: it goes on with fewer where one has died at its start twice in a row.
        used: restarts until now.

    Example:
        >>> policy = RestartPolicy(most=1, whole=True)
        >>> policy.after(Ended(trainer=1, lived_seconds=90.0, goes_on=True))
        <Next.ALONE: 'it is started again, and the others go on'>
        >>> policy.after(Ended(trainer=None, lived_seconds=95.0))
        <Next.FAIL: 'the job has failed'>
    """

    most: int
    whole: bool
    least: int = 0
    used: int = 0
    _early: int | None = None  # the trainer that has died at the last start

    @property
    def left(self) -> int:
        """How many restarts are left."""
        return self.most - self.used

    @property
    def replaces(self) -> bool:
        """Whether a trainer without which the job goes on is started again."""
        return self.left > 0

    @property
    def counted(self) -> str:
        """Which restart the last one was, in words."""
        return f"restart {self.used} of {self.most}"

    def after(self, ended: Ended) -> Next:
        """What follows in a job with servers."""
        if ended.trainer is None and ended.goes_on and self.left:
            self.used += 1
            return Next.ALONE
        if ended.trainer is None:
            return self._whole()
        if ended.goes_on:
            if ended.preempted or not self.replaces:
                return Next.WITHOUT
            self.used += 1
            return Next.ALONE
        return self._whole()

    def after_collective(self, ended: Ended, trainers: int) -> Next:
        """What follows in a job without servers.

        Args:
            trainers: with how many the job was started last.
        """
        early = ended.trainer if ended.lived_seconds < EARLY_SECONDS else None
        again = early is not None and early == self._early
        self._early = early
        what = self._whole()
        may = trainers > self.least if self.least else again and trainers > 1
        if what is Next.FAIL or ended.trainer is None or not may:
            return what
        self._early = None  # the places have other numbers from here on
        return Next.FEWER

    def _whole(self) -> Next:
        if not self.whole or not self.left:
            return Next.FAIL
        self.used += 1
        return Next.WHOLE
