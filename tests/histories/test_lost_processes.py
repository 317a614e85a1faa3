"""Trainers that are lost and replaced, in this process: with real servers, and with wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pserver.job_log.coordinator import Coordinator
from pserver.lane.independent import IndependentSteps
from pserver.membership.members import Member
from tests.checker.losses import Loss, play
from tests.support.tiers import RARE


@pytest.mark.parametrize("seed", [*range(25), *(RARE(seed) for seed in range(25, 100))])
def test_a_step_of_a_lost_trainer_counts_everywhere_or_nowhere(seed: int) -> None:
    """And the others' steps, and its successor's, all count."""
    assert play(Loss(seed)) == ""


def on_one_server(patch: pytest.MonkeyPatch) -> None:
    """A step is decided when one server has it."""
    patch.setattr(Coordinator, "_everywhere", lambda *arguments: True)


def without_its_record(patch: pytest.MonkeyPatch) -> None:
    """A server applies what it has staged, and waits for nobody."""

    def at_once(steps: IndependentSteps, member: Member, step: Any) -> None:
        steps._staged.pop(member.trainer, None)

    patch.setattr(IndependentSteps, "_wait_for_turn", at_once)
    patch.setattr(IndependentSteps, "decide", lambda *arguments: {})


@pytest.mark.parametrize("wrong", [on_one_server, without_its_record])
def test_a_wrong_decision_is_caught(
    wrong: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the seeds of make test."""
    wrong(monkeypatch)

    halves = [seed for seed in range(40) if 0 < Loss(seed).commits < Loss(seed).servers]
    assert any(play(Loss(seed)) for seed in halves)
