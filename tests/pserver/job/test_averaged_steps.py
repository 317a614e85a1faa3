"""What a lost trainer has in the averages of the others, and not on servers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pserver.errors import Refused
from pserver.job.averaged_steps import AveragedSteps, Averages
from pserver.job_log.records import Process
from pserver.membership.lifecycle import Events
from pserver.membership.members import Member
from pserver.telemetry.counts import TrainerCounts
from tests.support.job_frames import plan_of
from transpiler.plan.plan import Plan

PLAN = plan_of(3, "async")


class Trainers:
    """Meeting rounds of some trainers, by number.

    Args:
        plan: of the job.
    """

    def __init__(self, plan: Plan = PLAN) -> None:
        self.counts, self.events = TrainerCounts(), Events()
        self._counted = AveragedSteps(plan, self.counts, self.events)
        self._members: dict[Process, Member] = {}

    def member(self, trainer: int, incarnation: str = "a") -> Member:
        process = Process(trainer, incarnation)
        return self._members.setdefault(process, Member(trainer, incarnation, "tcp", 0.0))

    def decide(self, steps: int, trainer: int, incarnation: str = "a") -> None:
        """So many steps of a trainer's script are decided."""
        self.member(trainer, incarnation).watermark(0).script_steps += steps

    def gather(self, told: dict[int, int], incarnation: str = "a", overflows: int = 0) -> None:
        """Each tells how many averages count, and how many overflowed; trainer 2 in this
        incarnation.
        """
        named = {t: Process(t, incarnation if t == 2 else "a") for t in told}
        self._counted.gathered(
            {
                named[t]: (self.member(t, named[t].incarnation), Averages(told[t], overflows))
                for t in told
            }
        )


@pytest.mark.parametrize(("decided", "partial"), [(5, 0), (4, 1), (1, 4)])
def test_averages_beyond_the_decided_steps_are_partial(decided: int, partial: int) -> None:
    """Of those that are left some may know of one average more than the others."""
    job = Trainers()
    job.gather({0: 0, 1: 0, 2: 0})
    for trainer in (0, 1):
        job.decide(5, trainer)
    job.decide(decided, 2)

    job.gather({0: 5, 1: 4})

    assert job.counts.of(2).get("partial", 0) == partial
    said = [each.text for each in job.events.all() if each.kind == "averaged"]
    expected = f"{partial} steps of trainer 2 count in what trainers average, and in no lane"
    assert said == ([expected] if partial else [])
    job.gather({0: 9, 1: 9})  # it counts once
    assert job.counts.of(2).get("partial", 0) == partial


def test_a_step_that_the_others_have_averaged_without_it_is_partial() -> None:
    """It had the result, and committed; nobody else had it, so the average was made again."""
    job = Trainers()
    job.gather({0: 0, 2: 0})
    job.decide(4, 2)
    job.gather({0: 3})
    assert job.counts.of(2).get("partial", 0) == 1
    assert [each.text for each in job.events.all()] == ["1 steps of trainer 2 count in lanes only"]


@pytest.mark.parametrize(("decided", "partial"), [(2, 1), (3, 0), (5, 0), (6, 1)])
def test_steps_that_overflowed_may_have_rows_or_not(decided: int, partial: int) -> None:
    """Of three averages that count and two that overflowed: nobody says whose overflow it was."""
    job = Trainers()
    job.gather({0: 0, 2: 0})
    job.decide(decided, 2)
    job.gather({0: 3}, overflows=2)
    assert job.counts.of(2).get("partial", 0) == partial


def test_no_job_has_so_many_averages() -> None:
    """Their sums travel in 64 bits."""
    for numbers in ((2**64 - 1, 0), (0, 2**48)):
        with pytest.raises(Refused, match="averages: expected fewer than"):
            Averages(*numbers)


def test_a_process_that_comes_later_counts_from_there() -> None:
    """It is in the averages that follow; the one before it, in none of those."""
    job = Trainers()
    job.gather({0: 0, 1: 0})
    job.gather({0: 7, 1: 7, 2: 0}, "late")
    job.decide(2, 2, "late")
    job.gather({0: 10, 1: 10})
    assert job.counts.of(2).get("partial", 0) == 1


def test_of_several_optimizers_none_is_counted() -> None:
    """Nobody says whose averages they are."""
    lanes = (*PLAN.lanes, replace(PLAN.lanes[0], optimizer=1))
    job = Trainers(replace(PLAN, lanes=lanes))
    job.gather({0: 0, 2: 0})
    job.gather({0: 5})
    assert job.counts.of(2).get("partial", 0) == 0
