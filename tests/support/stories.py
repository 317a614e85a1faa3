"""Stories that the tests of exactly-once play: how many, and one of each mode."""

from __future__ import annotations

from tests.checker.scenario import Scenario

SEEDS = 50
LARGE = 22  # with large steps; all kinds together are 200 seeds
# of trainers that come and go: the first ones, and those that have all that can befall a job
WORLDS = (*range(12), 27, 32, 42, 52, 59, 61, 62, 63)
# by turns of eight worlds, which have all modes: the other two take twice as long
OFTEN = ("tcp", "inprocess", "tcp", "shm", "inprocess", "tcp", "grpc", "inprocess")


ROW_MODES = ("sync", "async", "half_async", "staleness", "geo")


def story(mode: str, transport: str = "inprocess") -> Scenario:
    """Of 8 steps, at least two messages of each trainer, and no overflow in the second."""
    seeds = (
        Scenario(seed, mode, transport, servers=1, trainers=2, steps=8, rate=0.0)
        for seed in range(100)
    )
    return next(scenario for scenario in seeds if all(step != 2 for _, step in scenario.overflows))
