"""Jobs whose trainers come and go and whose links break: every law of their histories holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checker import tally
from tests.checker.__main__ import check
from tests.checker.trials import numbered
from tests.checker.worlds import EVENTS, MODES
from tests.support.stories import OFTEN, WORLDS


@pytest.mark.timeout(600)
def test_every_law_holds_whatever_befalls_a_job(tmp_path: Path) -> None:
    """And these trials have had every mode, every transport, and all that can befall a job."""
    record = tmp_path / "history.jsonl"
    turns = {seed: OFTEN[seed // len(MODES) % len(OFTEN)] for seed in WORLDS}
    trials = [numbered(s, "world", transport=each) for s, each in turns.items()]
    results = check(trials, record)

    failed = [f"seed {each.seed}: {each.failure}" for each in results if each.failure]
    assert not failed, failed[0]
    assert {each.mode for each in results} == {*MODES}
    assert {each.transport for each in results} == {*OFTEN}
    befell = {name for each in results for name in each.events}
    assert befell == {*EVENTS}
    assert tally.kept(record) == results
    assert all(f"| {name} |" in tally.markdown(results) for name in EVENTS)


def test_a_seed_means_the_same_trial_each_time() -> None:
    """By turns there are all kinds."""
    trials = [numbered(seed) for seed in range(64)]

    assert [str(each.settings) for each in trials] == [
        str(numbered(each.seed).settings) for each in trials
    ]
    assert {each.kind for each in trials} == {"network", "losses", "world"}
    assert len({str(each.settings) for each in trials}) == len(trials)
