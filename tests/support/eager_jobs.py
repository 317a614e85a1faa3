"""The eager path with one trainer: a model, its batches, the calls of a script."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from trainer import fleet

Servers = Callable[[int], str]


def net(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 2))


def batches(count: int, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(8, 6, generator=generator), torch.randint(0, 2, (8,), generator=generator))
        for _ in range(count)
    ]


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: Any, scheduler: Any = None
) -> None:
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def joined(
    endpoints: str, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any
) -> Any:
    fleet.init(fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=endpoints.split(",")))
    fleet.distributed_model(model)
    return fleet.distributed_optimizer(optimizer, **options)


def assert_same(mine: Any, theirs: Any, where: str = "") -> None:
    """Two state_dicts are equal, tensors to the bit."""
    assert type(mine) is type(theirs) or {type(mine), type(theirs)} <= {list, tuple}, where
    if isinstance(mine, dict):
        assert mine.keys() == theirs.keys(), where
        for key in mine:
            assert_same(mine[key], theirs[key], f"{where}/{key}")
    elif isinstance(mine, list | tuple):
        for index, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            assert_same(one, other, f"{where}/{index}")
    elif torch.is_tensor(mine):
        assert torch.equal(mine, theirs), where
    else:
        assert mine == theirs, where
