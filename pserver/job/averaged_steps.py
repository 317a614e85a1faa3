"""Steps of lost trainers that count in the trainers' averages and not on servers, or the reverse.

[Note: averages of a lost trainer]  Where tables are in an async mode and dense gradients are
averaged, a trainer's rows count by its own step's record, and its dense gradients with the average
of all.  A lost trainer may have contributed to more averages than it has decided steps, or to one
less: where it alone had the last one, the others compute that again without it.  The others report
at each meeting round how many averages there were; a process was in all of those between the round
in which it came and the one in which it is missed.  After an overflow no trainer updates dense
parameters, and it is not known whose overflow it was, so its rows may count or not.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from pserver.errors import Refused
from pserver.job_log.records import Process
from pserver.membership.lifecycle import EventLog, Events
from pserver.membership.members import Member
from pserver.onlookers import onlooker
from pserver.telemetry.counts import TrainerCounts
from transpiler.plan.plan import Plan

MOST = 2**48  # averages that a job may have: their sums travel

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Averages:
    """The numbers of averages.

    Attributes:
        applied: that trainers have stepped by.
        overflows: further ones, of steps that overflowed on some trainer.

    Raises:
        Refused: no job has so many.
    """

    applied: int = 0
    overflows: int = 0

    def __post_init__(self) -> None:
        if max(self.applied, self.overflows) >= MOST:
            raise Refused(f"averages: expected fewer than {MOST}, got {self}")


@dataclass(frozen=True, slots=True)
class Averaging:
    """A process that contributes to the averages.

    Attributes:
        member: of the job.
        since: the averages before it joined.
    """

    member: Member
    since: Averages


class AveragedSteps:
    """Counts the steps of lost trainers that count in averages only, or on servers only; see [Note:
    averages of a lost trainer].  The caller holds the job's lock.

    Args:
        plan: of the job.
        counted: the counts of the job's trainers.
        events: of the job.
    """

    def __init__(self, plan: Plan, counted: TrainerCounts, events: Events) -> None:
        # of several optimizers it is unknown whose averages they are
        self._counts = len({lane.optimizer for lane in plan.lanes}) == 1
        self._counted, self._log = counted, EventLog(log, events)
        self._there: dict[Process, Averaging] = {}

    @onlooker("the count of partial steps")
    def gathered(self, told: Mapping[Process, tuple[Member, Averages]]) -> None:
        """Takes a completed meeting round.

        Args:
            told: by process that was there: its member, and the averages as far as it knows.
        """
        there = self._there
        known = [averages for process, (_, averages) in told.items() if process in there]
        now = max(known, key=lambda each: each.applied + each.overflows, default=Averages())
        for process in there.keys() - told.keys() if self._counts else ():
            averaged, served = parts_alone(there[process], now)
            if steps := averaged or served:
                self._counted.count(process.trainer, "partial", steps)
                where = "in what trainers average, and in no lane" if averaged else "in lanes only"
                self._log.log(
                    f"averaged {process.trainer}", f"{steps} steps of {process} count {where}"
                )
        self._there = {
            process: there.get(process, Averaging(member, now))
            for process, (member, _) in told.items()
        }


def parts_alone(lost: Averaging, now: Averages) -> tuple[int, int]:
    """The numbers of a lost trainer's steps that count in averages and in no lane, and in all lanes
    and in no average.

    Args:
        lost: the trainer.
        now: the averages, as the others know them.
    """
    applied = now.applied - lost.since.applied
    overflows = now.overflows - lost.since.overflows
    decided = [mark.script_steps for mark in lost.member.watermarks.values()] or [0]
    return max(0, applied - max(decided)), max(0, min(decided) - applied - overflows)
