"""Rows that trainers step by themselves: a checkpoint has their states, as it has dense ones."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.eager_jobs import Servers
from tests.support.eager_modes import strategy_of
from trainer import DistributedEmbedding, Normal, fleet
from transpiler import DistributedStrategy

STEPS = 4  # of each half


class Ranker(nn.Module):
    """A row for each id, and one layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.rows = DistributedEmbedding(4, num_embeddings=20, init=Normal(0, 0.3), seed=1)
        self.out = nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        score: torch.Tensor = self.out(self.rows(ids))
        return score


def batches() -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(2)
    return [torch.randint(0, 20, (6,), generator=made) for _ in range(2 * STEPS)]


def train(model: nn.Module, optimizer: Any, data: list[torch.Tensor]) -> None:
    for ids in data:
        optimizer.zero_grad()
        model(ids).square().mean().backward()
        optimizer.step()


def joined(endpoints: str, model: nn.Module, strategy: DistributedStrategy | None) -> Any:
    role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=endpoints.split(","))
    fleet.init(role, strategy=strategy)
    model = fleet.distributed_model(model)
    return fleet.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1))


def scores(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(20))
        return found


@pytest.mark.parametrize("resumed", ["geo", "sync"])
def test_states_of_rows_go_on_in_a_geo_job(servers: Servers, tmp_path: Path, resumed: str) -> None:
    """Saved on 2 servers and resumed on 3 the rows train as if nothing had been; a job in another
    mode takes the values, with states that begin anew.
    """
    model, again, path = Ranker(), Ranker(), str(tmp_path / "checkpoint")
    reference = copy.deepcopy(model)
    geo = strategy_of(k_steps=2)
    train(model, joined(servers(2), model, geo), batches()[:STEPS])
    fleet.save(path)
    fleet.finish()

    optimizer = joined(servers(3), again, geo if resumed == "geo" else None)
    assert fleet.load(path) == STEPS
    plain = torch.optim.Adagrad(reference.parameters(), lr=0.1)
    train(reference, plain, batches()[:STEPS])
    assert (scores(again) - scores(reference)).abs().max() <= 1e-6
    train(again, optimizer, batches()[STEPS:])
    optimizer.flush()
    train(reference, plain, batches()[STEPS:])
    apart = float((scores(again) - scores(reference)).abs().max())
    assert apart <= (1e-6 if resumed == "geo" else 0.2)
    fleet.finish()


def test_states_of_both_optimizers_go_on_in_a_diloco_job(servers: Servers, tmp_path: Path) -> None:
    """Saved on 2 servers and resumed on 3: those of the outer optimizer and of the trainer's."""
    path = str(tmp_path / "checkpoint")
    outer = {"type": "nesterov", "lr": 0.5, "momentum": 0.5}
    diloco = strategy_of(k_steps=2, outer_optimizer=outer)
    whole, model, again = Ranker(), Ranker(), Ranker()
    for each in (whole, model, again):
        each.out.requires_grad_(False)
    train(whole, joined(servers(2), whole, diloco), batches())
    expected = scores(whole)
    fleet.finish()
    train(model, joined(servers(2), model, diloco), batches()[:STEPS])
    fleet.save(path)
    fleet.finish()

    optimizer = joined(servers(3), again, diloco)
    assert fleet.load(path) == STEPS
    train(again, optimizer, batches()[STEPS:])
    assert (scores(again) - expected).abs().max() <= 1e-6
    fleet.finish()


def test_rows_of_another_outer_optimizer_are_refused(servers: Servers, tmp_path: Path) -> None:
    """Their states would mean something else."""
    path, model, again = str(tmp_path / "checkpoint"), Ranker(), Ranker()
    sgd, adam = (
        strategy_of(k_steps=2, outer_optimizer={"type": kind, "lr": 0.5})
        for kind in ("sgd", "adam")
    )
    train(model, joined(servers(2), model, sgd), batches()[:STEPS])
    fleet.save(path)
    fleet.finish()
    joined(servers(2), again, adam)
    with pytest.raises(ValueError, match="table 'rows': expected rows that were trained by .*adam"):
        fleet.load(path)
    fleet.finish()
