"""Buffers of captured programs, by ``DistributeTranspilerConfig.buffers``: batch norm's running
statistics of trainers that see different data.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.eager_jobs import Servers
from tests.support.normed_jobs import data, same, statistics
from tests.support.seeded import seeded
from tests.support.threads import at_once
from trainer import Executor
from transpiler import DistributeTranspiler, DistributeTranspilerConfig, capture

MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"sync_mode": False},
    "half-async": {"half_async": True},
    "geo": {"geo_sgd_mode": True, "geo_sgd_need_push_nums": 1},
}


def net() -> nn.Module:
    with seeded(5):
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = model(x)
    return y.square().mean()


def trained(endpoints: str, **fields: Any) -> tuple[list[nn.Module], list[dict[str, Tensor]]]:
    """The models of a job of two trainers after three steps of rate 0; and what each trainer's
    forwards alone make of its buffers.
    """
    models, after = [net(), net()], [net(), net()]

    transpilers = []
    for trainer, model in enumerate(models):  # tracing is for one thread
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        main, startup = capture(model, _loss, optimizer, (data(trainer, 0),))
        transpiler = DistributeTranspiler(DistributeTranspilerConfig(**fields))
        transpiler.transpile(trainer, main, endpoints, 2, startup_program=startup)
        transpilers.append(transpiler)

    def play(trainer: int) -> None:
        program = transpilers[trainer].get_trainer_program()
        with Executor() as executor:
            executor.run(transpilers[trainer].get_startup_program())
            for step in range(3):
                executor.run(program, feed=(data(trainer, step),))

    at_once(lambda: play(0), lambda: play(1))
    for trainer, model in enumerate(after):
        for step in range(3):
            model(data(trainer, step))
    return models, [statistics(model) for model in after]


@pytest.mark.parametrize("mode", MODES)
def test_programs_share_trainer_0s_buffers(servers: Servers, mode: str) -> None:
    """By default, in every mode that programs have."""
    models, own = trained(servers(2), **MODES[mode])
    assert same(statistics(models[0]), own[0])
    assert same(statistics(models[1]), own[0])


@pytest.mark.parametrize("mode", MODES)
def test_programs_keep_their_own_buffers(servers: Servers, mode: str) -> None:
    """With "own" nothing travels."""
    models, own = trained(servers(1), **MODES[mode], buffers="own")
    assert [same(statistics(model), own[t]) for t, model in enumerate(models)] == [True, True]


def test_programs_average_buffers(servers: Servers) -> None:
    """With "mean", in sync mode: running statistics are linear in what each step brings, so that
    the mean after each step is that of the trainers' own.
    """
    models, own = trained(servers(1), buffers="mean")
    assert same(statistics(models[0]), statistics(models[1]))
    for name, value in statistics(models[0]).items():
        expected = (
            torch.stack([each[name] for each in own]).mean(0)
            if value.is_floating_point()
            else own[0][name]
        )
        torch.testing.assert_close(value, expected)
