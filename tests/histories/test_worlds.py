"""Jobs whose trainers come and go and whose links break: every law of their histories holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checker import tally, trials
from tests.checker.__main__ import check
from tests.checker.trials import numbered
from tests.checker.worlds import EVENTS, MODES
from tests.support.stories import OFTEN, WORLDS


@pytest.mark.timeout(600)
def test_every_law_holds_whatever_befalls_a_job(tmp_path: Path) -> None:
    """And these trials have had every mode, every transport, and all that can befall a job."""
    record = tmp_path / "history.jsonl"
    turns = {seed: OFTEN[seed // len(MODES) % len(OFTEN)] for seed in WORLDS}
    played = [numbered(s, "world", transport=each) for s, each in turns.items()]
    results = check(played, record)

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
    first = [numbered(seed) for seed in range(64)]

    assert [str(each.settings) for each in first] == [
        str(numbered(each.seed).settings) for each in first
    ]
    assert {each.kind for each in first} == {"network", "losses", "world"}
    assert len({str(each.settings) for each in first}) == len(first)


def test_an_asked_mode_is_played_or_refused() -> None:
    """By every kind that has it; a mode that no kind has is an error."""
    for kind, modes in trials.MODES.items():
        for mode in modes:
            played = [numbered(seed, kind, mode, "grpc").settings for seed in range(3)]
            assert {(each.mode, each.transport) for each in played} == {(mode, "grpc")}
    drawn = {numbered(seed, mode="geo").settings.mode for seed in range(64)}
    assert drawn == {"geo", *trials.MODES["losses"]}, "losses have no such mode, and draw their own"
    with pytest.raises(ValueError, match="expected a mode of losses, got 'geo': one of .'async'"):
        numbered(0, "losses", "geo")
