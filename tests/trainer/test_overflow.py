"""With GradScaler an overflow on one trainer lowers the scale on all, in step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.scaled_steps import alone, course, course_on_ranks, scaler_of
from tests.support.standing_ranks import StandingRanks
from tests.support.table_trainers import Net, Servers, Trainer
from tests.support.threads import at_once


class WithTable(Net):
    """A table, and a dense parameter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.emb(torch.tensor([1, 2])) + self.w * x


JOBS: dict[str, tuple[Any, dict[str, Any]]] = {
    "servers": (lambda: nn.Linear(4, 2), {}),
    "two lanes": (lambda: nn.Linear(4, 2), {"modes": {"weight": "sync", "*": "async"}}),
    "all-reduce": (lambda: nn.Linear(4, 2), {"modes": {"weight": "collective", "*": "sync"}}),
    "table": (WithTable, {}),
}


def joined(endpoints: str, make: Any, configs: dict[str, Any]) -> list[Trainer]:
    """Two trainers; those that average gradients wait for one another as they come."""

    def join(number: int, model: nn.Module) -> Trainer:
        return Trainer(endpoints, number, 2, model, **configs)

    models = [make() for _ in range(2)]
    return at_once(lambda: join(0, models[0]), lambda: join(1, models[1]))


def played(jobs: list[Trainer], play: Any) -> list[Any]:
    """What each trainer gives; both leave."""
    try:
        return at_once(lambda: play(0), lambda: play(1))
    finally:
        at_once(*(job.optimizer.close for job in jobs))


@pytest.mark.parametrize("clip", [False, True], ids=["", "unscaled"])
@pytest.mark.parametrize("kind", JOBS)
def test_an_overflow_on_one_trainer_lowers_the_scale_on_all(
    servers: Servers, kind: str, clip: bool
) -> None:
    """The scale's course is the same on both trainers, and one process's; also where the script
    unscales and clips.
    """
    make, configs = JOBS[kind]
    jobs = joined(servers(2), make, configs)

    def play(number: int) -> list[float]:
        job = jobs[number]
        return course(job.model, job.optimizer, scaler_of(), (number,), clip)

    found = played(jobs, play)

    assert found[0] == found[1] == alone(clip)
    assert len(set(found[0])) > 2
    assert jobs[0].optimizer.steps == jobs[1].optimizer.steps == 5


@pytest.mark.parametrize("mode", ["async", "geo"])
def test_where_steps_are_not_taken_together_each_trainer_has_its_own_scale(
    servers: Servers, mode: str
) -> None:
    """An overflow is the step of one trainer only."""
    configs: dict[str, Any] = {"modes": {"*": "async"}} if mode == "async" else {"k_steps": 2}
    jobs = joined(servers(1), lambda: nn.Linear(4, 2), configs)

    def play(number: int) -> list[float]:
        model = nn.Linear(4, 2)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        expected = course(model, plain, scaler_of(), (number,))
        found = course(jobs[number].model, jobs[number].optimizer, scaler_of(), (number,))
        assert found == expected
        return found

    found = played(jobs, play)
    assert found[0] != found[1]


@pytest.fixture(scope="module")
def ranks() -> Iterator[StandingRanks]:
    """Two."""
    standing = StandingRanks(2)
    yield standing
    standing.close()


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["ddp", "os", "os_g", "p_g_os", "hybrid"])
def test_scales_stay_in_step_without_servers(ranks: StandingRanks, kind: str) -> None:
    """By averaged gradients, and by the scaler that ``group_sharded_parallel`` returns."""
    ranks.run(course_on_ranks, kind)


@pytest.mark.processes
def test_a_hybrid_model_and_a_data_parallel_one_do_not_mix(ranks: StandingRanks) -> None:
    """What ranks say to one another about the one is not taken for what they say of the other."""
    for kind in ("hybrid", "ddp"):
        ranks.run(course_on_ranks, kind)
