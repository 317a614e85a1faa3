"""What a trainer is told whose step is applied, and comes again because an answer was lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from pserver.job_log.records import Process, ProcessStep
from pserver.lane.leases import JobLeases
from pserver.lane.rounds import Clipping, SyncRound
from pserver.lane.step import Step
from pserver.lane.together import AppliedRounds
from pserver.membership.lifecycle import Lifecycle
from pserver.membership.members import Member, Membership
from pserver.telemetry.metrics import JobSteps

NORMS = {"w": 4.0}


def applied(norms: dict[str, float]) -> tuple[AppliedRounds, Member]:
    """One round of one trainer that is applied."""
    members, job = Membership(1, 0.0), Lifecycle()
    member = Member(0, "first", "tcp", 0.0)
    members.add(member)
    member.watermark(0).begin(1, 0)
    leases, measured = JobLeases(members, job), JobSteps().lane(0)
    state = SimpleNamespace(index=0, members=members, leases=leases, measured=measured)
    rounds, process = AppliedRounds(cast(Any, state)), Process(0, "first")
    current = SyncRound(norms=norms, decided=(ProcessStep(process, 1),))
    current.add(Step(process, 1, {}, {}))
    rounds.add(current)
    return rounds, member


def test_the_norms_of_the_last_round_are_told_again() -> None:
    """Otherwise the trainer would tell other servers a coefficient of their norms alone."""
    rounds, member = applied(NORMS)
    again = rounds.again(member, 1)

    assert isinstance(again, Clipping)
    assert again.scaled and again.norms == NORMS
    assert member.step(0) == 1


def test_nothing_is_told_of_another_step_or_where_nothing_clips() -> None:
    """It is answered as it is."""
    rounds, member = applied(NORMS)
    assert not isinstance(rounds.again(member, 0), Clipping)

    rounds, member = applied({})
    assert not isinstance(rounds.again(member, 1), Clipping)
