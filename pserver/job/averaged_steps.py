"""Steps of lost trainers that the others have averaged, and that servers have not.

[Note: averages of a lost trainer]  Where tables are in an async mode and dense gradients are
averaged, a trainer's rows count by its own step's record, and its dense gradients with the average
of all.  One that dies may have had a part in more averages than it has decided steps, or in one
less.  The others say at each gathering how many averages count; a process was in all of those
between the gathering in which it came and the one in which it is missed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from pserver.job.events import EventLog, Events
from pserver.job.membership import Member
from pserver.job_log.records import Process
from pserver.metrics.job_steps import JobSteps
from transpiler.plan.plan import Plan

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Averaging:
    """A process that takes part in the averages.

    Attributes:
        member: of the job.
        since: how many averages counted when it came.
    """

    member: Member
    since: int


class AveragedSteps:
    """Counts what lost trainers have in averages only; see [Note: averages of a lost trainer].  The
    caller holds the job's lock.

    Args:
        plan: of the job.
        steps: what is measured of them.
        events: of the job.
    """

    def __init__(self, plan: Plan, steps: JobSteps, events: Events) -> None:
        # of several optimizers nobody says whose averages they are
        self._counts = len({lane.optimizer for lane in plan.lanes}) == 1
        self._steps, self._log = steps, EventLog(log, events)
        self._there: dict[Process, Averaging] = {}

    def gathered(self, told: Mapping[Process, tuple[Member, int]]) -> None:
        """A gathering is over.

        Args:
            told: by process that was there: its member, and how many averages count as far as it
                knows.
        """
        there = self._there
        known = [averages for process, (_, averages) in told.items() if process in there]
        count = max(known, default=0)
        for process in there.keys() - told.keys() if self._counts else ():
            steps = averaged_alone(there[process], count)
            where = "in what trainers average, and in no lane" if steps > 0 else "in lanes only"
            if steps:
                self._steps.partial(abs(steps))
                said = f"{abs(steps)} steps of {process} count {where}"
                self._log.say(f"averaged {process.trainer}", said)
        self._there = {
            process: there.get(process, Averaging(member, count))
            for process, (member, _) in told.items()
        }


def averaged_alone(lost: Averaging, count: int) -> int:
    """How many steps of a lost trainer count in averages, and in no lane; or, below 0, in all lanes
    and in no average: it had the last one, and the others made that again without it.

    Args:
        lost: the trainer.
        count: how many averages count.
    """
    averages = count - lost.since
    decided = [mark.script_steps for mark in lost.member.watermarks.values()] or [0]
    return max(0, averages - max(decided)) or min(0, averages - min(decided))
