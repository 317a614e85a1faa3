"""Worlds in which trainers wait for one another: the rule breaks their rings, and without it they
stand still.
"""

from __future__ import annotations

import pytest

from pserver.job.rings import Rings
from trainer.checker import world_trial
from trainer.checker.processes import Process
from trainer.checker.world_trial import Trial, play_world
from trainer.checker.worlds import world_of

# in them a trainer waits for samples while the others wait for it in a save of the job's own
SEEDS = (13, 2, 15, 7, 11, 5)
GIVEN_UP_SECONDS = 12.0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_without_the_rule_a_world_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers that look for no save while they wait for samples: with the rule their saves are
    put off, and every law holds; without it the trial does not end.
    """
    monkeypatch.setattr(Process, "_waits", lambda process: None)
    put_off: list[int] = []
    right = Trial.end

    def end(trial: Trial, failure: str) -> None:
        put_off.append(sum(each.put_off for each in trial.starts))
        right(trial, failure)

    monkeypatch.setattr(Trial, "end", end)
    for seed in SEEDS:
        failure = play_world(world_of(seed)).failure
        assert not failure, failure
        if put_off[-1]:
            break
    assert put_off[-1], "no ring was broken"

    monkeypatch.setattr(world_trial, "TIMEOUT_SECONDS", GIVEN_UP_SECONDS)
    monkeypatch.setattr(Rings, "tick", lambda rings, timeout: None)
    failures = (play_world(world_of(each)).failure for each in (seed, *SEEDS))
    assert any("did not end" in failure for failure in failures)
