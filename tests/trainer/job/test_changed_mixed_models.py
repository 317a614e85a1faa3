"""Trainers that average some gradients among themselves, beside rows on a server, and whose script
changes its model in the middle.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.changed_models import KINDS, Change, batches, net
from tests.support.load import result
from trainer import Constant, DistributedEmbedding, row_optimizers
from trainer.environment.environment import Role, RoleMaker
from trainer.job.job import Job
from transpiler import DistributedStrategy

Servers = Callable[[int], str]
SECONDS = 60.0
ROWS = 16
MODES: dict[str, tuple[dict[str, Any], bool]] = {
    "sync": ({"modes": {"rows*": "sync", "*": "collective"}}, False),
    "async": ({"modes": {"rows*": "async", "*": "collective"}}, True),
}


class Net(nn.Module):
    """Layers behind rows that learn, too."""

    def __init__(self, layers: nn.Module, rows: nn.Module) -> None:
        super().__init__()
        self.rows, self.layers = rows, layers

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x + self.rows(ids).to(x.dtype))
        return out


def trained(model: Net, change: Change, optimizer: Any, place: slice = slice(None)) -> None:
    """Trains it on its share of the joint batches."""
    for step, (x, y) in enumerate(batches()):
        change.before(step, optimizer.add_param_group)
        dtype = next(change.model.parameters()).dtype
        ids = torch.arange(8) + step
        optimizer.zero_grad()
        out = model(ids[place] % ROWS, x[place].to(dtype))
        F.mse_loss(out, y[place].to(dtype)).backward()
        optimizer.step()


def plain(kind: str) -> nn.Sequential:
    """The layers as one process trains them."""
    rows = nn.Embedding(ROWS, 8)
    nn.init.zeros_(rows.weight)
    change = KINDS[kind](net(0))
    groups = [*change.groups(), {"params": list(rows.parameters())}]
    trained(Net(change.model, rows), change, torch.optim.SGD(groups, lr=0.1))
    return change.model


def trainer(change: Change, mode: str, number: int, endpoints: str) -> nn.Sequential:
    """The layers as one trainer of two has them."""
    strategy = DistributedStrategy()
    configs, strategy.a_sync = MODES[mode]
    strategy.a_sync_configs = configs
    job = Job(RoleMaker(Role.TRAINER, number, 2, tuple(endpoints.split(","))), strategy)
    learned = row_optimizers.SGD(lr=0.1)
    rows = DistributedEmbedding(8, num_embeddings=ROWS, optimizer=learned, init=Constant(0.0))
    model = Net(change.model, rows)
    job.models.append(model)
    groups = [*change.groups(), {"params": list(rows.parameters())}]
    try:
        optimizer = job.join(torch.optim.SGD(groups, lr=0.1))
        trained(model, change, optimizer, slice(4 * number, 4 * number + 4))
    finally:
        job.finish()
    return change.model


@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_model_trains_as_plain_torch_or_both_trainers_refuse_it(
    kind: str, mode: str, servers: Servers
) -> None:
    """They never go apart, also where rows in async mode make them differ from plain torch."""
    endpoints = servers(1)
    found, refusals = [], []
    with ThreadPoolExecutor(2) as pool:
        changes = [KINDS[kind](net(0)) for _ in range(2)]  # threads would share the seed
        running = [
            pool.submit(trainer, change, mode, number, endpoints)
            for number, change in enumerate(changes)
        ]
        for each in running:
            try:
                found.append(dict(result(each, SECONDS).named_parameters()))
            except ValueError as error:
                refusals.append(f"{error}")
    if refusals:
        assert kind in ("Added", "Replaced", "Injected")
        assert len(refusals) == 2
        assert all(each.startswith("add_param_group: expected before") for each in refusals)
        return
    close = {"rtol": 0.1, "atol": 0.02} if kind == "Half" else {"rtol": 1e-4, "atol": 1e-5}
    for name, value in plain(kind).named_parameters():
        own, other = (each[name] for each in found)
        assert torch.equal(own, other), name
        if mode == "sync":
            torch.testing.assert_close(own, value, **close)
