"""The model and the data of the scenes of ``two_trainers.py``, and the same job alone, in plain
torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]


def net(seed: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 2))


def batches(trainer: int, count: int = 6, seed: int = 1) -> list[Batch]:
    """The data of one trainer."""
    generator = torch.Generator().manual_seed(100 * seed + trainer)
    return [
        (torch.randn(8, 6, generator=generator), torch.randint(0, 2, (8,), generator=generator))
        for _ in range(count)
    ]


def adam(model: nn.Module, lr: float = 0.01) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=lr)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: Sequence[Batch]) -> None:
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def train_for_all(
    model: nn.Module, optimizer: torch.optim.Optimizer, rounds: Sequence[Sequence[Batch]]
) -> None:
    """Plain torch doing a sync job's steps: in each, the mean of the gradients of those who take
    part, in trainer order.
    """
    for batches_of_a_round in rounds:
        total: dict[str, torch.Tensor] = {}
        for x, y in batches_of_a_round:
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    total[name] = (
                        total[name] + parameter.grad if name in total else parameter.grad.clone()
                    )
        for name, parameter in model.named_parameters():
            parameter.grad = (
                total[name] * (1.0 / len(batches_of_a_round)) if name in total else None
            )
        optimizer.step()


def assert_equal(model: nn.Module, reference: nn.Module) -> None:
    theirs = reference.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, theirs[name]), (
            f"{name}: {(tensor.double() - theirs[name].double()).abs().max()}"
        )


@torch.no_grad()
def loss(model: nn.Module, data: Sequence[Batch]) -> float:
    return sum(F.cross_entropy(model(x), y).item() for x, y in data)
