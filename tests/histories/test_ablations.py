"""Jobs that lack one rule of exactly-once, of the log, of fences, leases, cuts or waits: each shows
in some history.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from tests.checker import world_trial
from tests.checker.ablations import (
    ABLATIONS,
    CUTS,
    FENCES,
    LEASES,
    LOG,
    ONCE,
    WAITS,
    Ablation,
)
from tests.checker.world_trial import play_world
from tests.checker.worlds import world_of
from tests.support.matrix import crossed

WITHIN = 500  # seeds
AGAIN = 3  # times those that have shown it before are played: threads race
GIVEN_UP_SECONDS = 6.0
# of a job that stands still: so long that one that is merely slow has gone on meanwhile
STANDS_SECONDS, QUIET_SECONDS = 12.0, 9.0
# what a right job may come to on a busy machine
SLOW = (
    "did not end",
    "TimedOut",
    "heartbeat",
    "has not come back",
    "was not fenced everywhere",
    "streams have broken for",
    "no transport in common",
)
WRONG = ("AttributeError", "TypeError", "NameError")  # of an ablation that fits the product no more
MISFITS = 6  # of these failures, from which on it does not
SHOWN = 120  # characters of what broke
# those that show soonest, of each kind: make test takes them
SOON = [
    "a trainer numbers its calls",
    "a lost process does not join again",
    "what a lost trainer had leased is dealt out again",
]


def failure(ablation: Ablation, seed: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """The law that a job breaks without a rule, in the world of a seed; "": it breaks none."""
    seconds = STANDS_SECONDS if ablation.stands else GIVEN_UP_SECONDS
    with monkeypatch.context() as patch:
        patch.setattr(world_trial, "TIMEOUT_SECONDS", seconds)
        ablation.remove(patch)
        found = play_world(world_of(seed))
    if ablation.stands and found.quiet_seconds > QUIET_SECONDS:
        return f"nothing happens for {QUIET_SECONDS:g} s"
    return "" if any(each in found.failure for each in SLOW) else found.failure


def shown(ablation: Ablation, monkeypatch: pytest.MonkeyPatch) -> str:
    """The first world that shows the lack of a rule, and in which every law holds with it."""
    torch.manual_seed(0)
    misfits = 0
    for seed in (*ablation.seeds * AGAIN, *range(WITHIN)):
        found = failure(ablation, seed, monkeypatch)
        if any(each in found for each in WRONG):
            misfits += 1
            assert misfits < MISFITS, f"the ablation does not fit the product: {found}"
            continue
        if found and not play_world(world_of(seed)).failure:
            text = re.sub(r" at \S+:\d+|\w+: (?=server)|\s*\n\s*|\|", " ", found)
            return f"seed {seed}: {text[:SHOWN]}"
    return ""


def rules(area: int) -> pytest.MarkDecorator:
    """Parametrizes a test with the rules of an area."""
    own = [r for r, each in ABLATIONS.items() if each.area == area and not each.held_by]
    soon = [(rule,) for rule in own if rule in SOON]
    return crossed("ablations", diagonal=False, rows=soon, rule=own)


Record = Callable[[str, object], None]


def check(rule: str, monkeypatch: pytest.MonkeyPatch, record_property: Record) -> None:
    """The world that has shown it before does so, or another one of the first 500."""
    found = shown(ABLATIONS[rule], monkeypatch)
    record_property("result", found)
    assert found


@pytest.mark.timeout(1800)
@rules(ONCE)
def test_exactly_once_needs(
    rule: str, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    """Without the rule a step, a call or a message counts twice, or is lost."""
    check(rule, monkeypatch, record_property)


@pytest.mark.timeout(1800)
@rules(LOG)
def test_the_log_needs(rule: str, monkeypatch: pytest.MonkeyPatch, record_property: Record) -> None:
    """Without it servers hold different things, or decide on different ones."""
    check(rule, monkeypatch, record_property)


@pytest.mark.timeout(1800)
@rules(FENCES)
def test_fences_need(rule: str, monkeypatch: pytest.MonkeyPatch, record_property: Record) -> None:
    """Without it a process or a stream that was lost goes on."""
    check(rule, monkeypatch, record_property)


@pytest.mark.timeout(1800)
@rules(LEASES)
def test_leases_need(rule: str, monkeypatch: pytest.MonkeyPatch, record_property: Record) -> None:
    """Without it a sample is in two decided steps, or in none."""
    check(rule, monkeypatch, record_property)


@pytest.mark.timeout(1800)
@rules(CUTS)
def test_cuts_need(rule: str, monkeypatch: pytest.MonkeyPatch, record_property: Record) -> None:
    """Without it a save is of no one moment."""
    check(rule, monkeypatch, record_property)


@pytest.mark.timeout(1800)
@rules(WAITS)
def test_waits_need(rule: str, monkeypatch: pytest.MonkeyPatch, record_property: Record) -> None:
    """Without it a thread waits for ever, or not long enough."""
    check(rule, monkeypatch, record_property)


@crossed(
    "ablations", diagonal=False, rule=[rule for rule, each in ABLATIONS.items() if each.held_by]
)
def test_other_rules_keep(
    rule: str, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    """A job of the checker does without it: nothing shows in worlds that would be the first to.
    Without such worlds the table has the reason alone.
    """
    ablation = ABLATIONS[rule]
    found = [failure(ablation, seed, monkeypatch) for seed in ablation.seeds]
    record_property("result", ablation.held_by)
    if not found:
        pytest.skip(ablation.held_by)

    assert not any(found)
