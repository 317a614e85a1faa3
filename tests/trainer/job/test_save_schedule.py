"""When the trainers of a job save."""

from __future__ import annotations

import json
import random

import pytest

from trainer.job.save_schedule import SaveSchedule


class Clock:
    """Seconds, moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Said:
    """What the first trainer said about each topic."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def agree(self, topic: str, text: str) -> str:
        return self.texts.setdefault(topic, text)


def saves(schedule: SaveSchedule, clock: Clock, steps: int, seconds: float) -> list[int]:
    """The steps after which it saves, where each takes so long."""
    found = []
    for step in range(1, steps + 1):
        clock.now += seconds
        if schedule.due(step):
            found.append(step)
            schedule.saved()
    return found


@pytest.mark.parametrize(("seconds", "every"), [(0.01, 10.0), (1.0, 60.0), (0.5, 0.5), (3.0, 1.0)])
def test_saves_are_as_far_apart_as_they_should_be(seconds: float, every: float) -> None:
    """About ``every`` seconds, or a step where that takes longer."""
    clock, said = Clock(), Said()
    schedule = SaveSchedule(every, said.agree, clock)
    schedule.begin(0)
    steps = int(20 * max(every, seconds) / seconds)
    found = saves(schedule, clock, steps, seconds)
    distances = [(b - a) * seconds for a, b in zip(found, found[1:], strict=False)]

    assert len(distances) >= 15
    assert all(0.85 * every <= distance <= 1.2 * max(every, seconds) for distance in distances)
    assert len(said.texts) <= 2 * len(found) + 10  # few questions


def test_steps_that_become_slow_do_not_put_it_off_for_long() -> None:
    """What a thousand times slower steps cost is one interval of a few times the length."""
    clock = Clock()
    schedule = SaveSchedule(10.0, Said().agree, clock)
    schedule.begin(0)
    saves(schedule, clock, 5_000, 0.001)
    before, step = clock.now, 5_000
    while True:
        step, clock.now = step + 1, clock.now + 0.01
        if schedule.due(step):
            break
    assert clock.now - before <= 101


@pytest.mark.parametrize("seed", range(20))
def test_all_trainers_save_after_the_same_steps(seed: int) -> None:
    """Whoever is fast, and whatever their clocks say."""
    draw, said = random.Random(seed), Said()
    clocks = [Clock() for _ in range(3)]
    team = [SaveSchedule(5.0, said.agree, clock) for clock in clocks]
    found: list[list[int]] = [[] for _ in team]
    for schedule in team:
        schedule.begin(7)
    steps = [7] * len(team)
    for _ in range(3000):
        who = draw.randrange(len(team))
        clocks[who].now += draw.expovariate(2.0 + who)
        steps[who] += 1
        if team[who].due(steps[who]):
            found[who].append(steps[who])
            team[who].saved()
    shortest = min(map(len, found))

    assert shortest >= 20
    assert len({tuple(each[:shortest]) for each in found}) == 1
    assert all(
        json.loads(text)["next"] > int(topic.split()[-1]) for topic, text in said.texts.items()
    )


def test_a_job_that_goes_on_does_not_save_at_once() -> None:
    """What it has just read is there already."""
    clock = Clock()
    schedule = SaveSchedule(5.0, Said().agree, clock)
    clock.now += 1000
    schedule.begin(300)

    assert not schedule.due(300) and not schedule.due(301)
