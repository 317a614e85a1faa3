"""Who is named as slow: pure numbers."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from statistics import median

import pytest

from pserver import wire_pb2 as wire
from pserver.config import ServerConfig
from pserver.membership.members import LEAST_SECONDS, Pace, news, ratios, stragglers


@dataclass
class Member:
    """A trainer that takes part."""

    trainer: int
    pace: Pace = field(default_factory=Pace)


def report(steps: int, seconds: float, blocked: float = 0.0) -> wire.TrainerReport:
    """Running totals of one lane."""
    lane = wire.LaneReport(steps=steps, step_seconds=seconds, blocked_seconds=blocked)
    return wire.TrainerReport(lanes=[lane])


def members(*seconds: float) -> list[Member]:
    """Trainers whose own part of a step takes so long."""
    found = [Member(number) for number in range(len(seconds))]
    for member, each in zip(found, seconds, strict=True):
        for steps in (1, 5) if each else ():
            member.pace.record(report(steps, steps * each))
    return found


def test_what_a_trainer_waits_is_not_its_own() -> None:
    """The one for which the others wait is slow, though all steps take equally long."""
    waits, computes = Pace(), Pace()
    for steps in (10, 20):
        waits.record(report(steps, steps * 1.0, blocked=steps * 0.9))
        computes.record(report(steps, steps * 1.0))

    assert waits.seconds == pytest.approx(0.1) and computes.seconds == pytest.approx(1.0)


def test_a_pace_is_that_of_the_last_reports() -> None:
    """A long step of long ago counts no more; heartbeats without a step change nothing."""
    pace = Pace()
    pace.record(report(0, 0.0))
    assert pace.seconds == 0.0
    pace.record(report(1, 60.0))
    for steps in range(2, 12):
        for _ in range(3):
            pace.record(report(steps, 60.0 + 0.1 * steps))

    assert pace.seconds == pytest.approx(0.1)


def test_the_lane_that_takes_most_of_the_time_counts() -> None:
    """Lanes of one script step side by side."""
    pace = Pace()
    for steps in (1, 2):
        quick = wire.LaneReport(steps=steps, step_seconds=0.1 * steps)
        slow = wire.LaneReport(steps=steps, step_seconds=0.7 * steps)
        pace.record(wire.TrainerReport(lanes=[quick, slow]))

    assert pace.seconds == pytest.approx(0.7)


def test_a_ratio_is_over_the_median_of_the_others() -> None:
    """As computed one by one, for many numbers of trainers."""
    chance = random.Random(1)
    for count in range(1, 12):
        for _ in range(20):
            seconds = {n: chance.choice([0.1, 0.2, 0.2, 0.5, 3.0]) for n in range(count)}
            others = {n: [s for other, s in seconds.items() if other != n] for n in seconds}
            expected = {n: seconds[n] / median(others[n]) for n in seconds if others[n]}

            assert ratios(seconds) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("seconds", "factor", "named"),
    [
        ((0.1, 0.1, 0.31), 3.0, [2]),
        ((0.1, 0.1, 0.29), 3.0, []),
        ((0.1, 0.4), 3.0, [1]),
        ((0.1, 0.1, 0.9), 0.0, []),
        ((0.0, 0.0, 0.9), 3.0, []),  # nothing is known of the others
        ((0.9,), 3.0, []),
        ((LEAST_SECONDS / 100, LEAST_SECONDS / 100, LEAST_SECONDS), 3.0, []),  # noise
        ((0.5, 0.5, 0.1, 0.1, 0.1), 3.0, [0, 1]),
    ],
)
def test_a_trainer_is_named_from_a_factor_on(
    seconds: tuple[float, ...], factor: float, named: list[int]
) -> None:
    """0 names nobody."""
    assert sorted(stragglers(members(*seconds), factor)) == named


def test_a_straggler_is_told_once() -> None:
    """In a sentence that says how slow it is."""
    all_of_them = members(0.1, 0.1, 0.5)

    assert list(news(all_of_them, 3.0)) == [
        (2, "trainer 2 is slow: it computes 0.5 s a step, 5.0 times the median of the others")
    ]
    assert not list(news(all_of_them, 3.0))


@pytest.mark.parametrize("factor", [1.0, -3.0, float("nan"), float("inf"), True, "soon"])
def test_a_factor_is_0_or_above_1(factor: object) -> None:
    """The message names the setting."""
    with pytest.raises(ValueError, match="straggler_factor: expected a number above 1, or 0"):
        ServerConfig(straggler_factor=factor)  # type: ignore[arg-type]
