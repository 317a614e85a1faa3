"""A small model that is trained on any device, and what it is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trainer import fleet

Servers = Callable[[int], str]


STEPS = 10


cuda = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


on_gpu = pytest.param("cuda:0", marks=cuda)


def net(device: str = "cpu") -> nn.Module:
    """Without a bias before the normalization, which would subtract it again: its gradient is what
    rounding leaves, of which Adam makes steps.
    """
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(288, 10),
    ).to(device)


def batches(size: int = 8, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, 1, 8, 8, generator=generator),
            torch.randint(0, 10, (size,), generator=generator),
        )
        for _ in range(STEPS)
    ]


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """With an eps above what rounding leaves of a gradient that is nearly 0."""
    return torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-5)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: Any) -> nn.Module:
    device = next(model.parameters()).device
    for x, y in data:
        optimizer.zero_grad()
        loss_of(model, x.to(device), y.to(device)).backward()
        optimizer.step()
    return model


def joined(
    endpoints: str, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any
) -> Any:
    fleet.init(fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=endpoints.split(",")))
    fleet.distributed_model(model)
    return fleet.distributed_optimizer(optimizer or adam(model), **options)


def assert_near(model: nn.Module, reference: nn.Module) -> None:
    """Every variable within 1e-4 of the reference's, relative to its norm."""
    theirs = reference.state_dict()
    for name, tensor in model.state_dict().items():
        mine, other = tensor.detach().cpu().double(), theirs[name].detach().cpu().double()
        assert (mine - other).norm() <= 1e-4 * max(1.0, float(other.norm())), name
