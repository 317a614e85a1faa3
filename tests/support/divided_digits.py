"""The digits of scikit-learn, two trainers, and a strategy that divides their model."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainer import fleet
from trainer.sharding.units import whole_of
from transpiler import DistributedStrategy

BATCH = 32  # of all trainers together
# Adam divides by the size of a gradient, and so makes rounding errors visible
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10)
    )


def digits(steps: int) -> list[tuple[Tensor, Tensor]]:
    found = load_digits()
    x = torch.tensor(found.data / 16, dtype=torch.float32)
    y = torch.tensor(found.target)
    return [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, steps * BATCH, BATCH)]


def mine(batch: tuple[Tensor, Tensor], parts: int = 2) -> list[Tensor]:
    """This rank's samples, where there are so many parts."""
    return [tensor.chunk(parts)[dist.get_rank() % parts] for tensor in batch]


def strategy_of(**values: Any) -> DistributedStrategy:
    strategy = DistributedStrategy()
    for name, value in values.items():
        setattr(strategy, name, value)
    return strategy


def begun(model: nn.Module | None = None, rule: Any = MOMENTUM, **values: Any) -> Any:
    """The model and optimizer of a job by a strategy; ``hybrid`` are distributed_model's own."""
    hybrid = values.pop("hybrid", {})
    fleet.finish()  # a job whose test failed
    fleet.init(is_collective=True, strategy=strategy_of(**values))
    made = fleet.distributed_model(net() if model is None else model, **hybrid)
    return made, fleet.distributed_optimizer(rule(made.parameters()))


def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def alone(steps: int, rule: Any = MOMENTUM) -> nn.Module:
    """One process's model after as many steps on the whole batches."""
    model = net()
    optimizer = rule(model.parameters())
    for x, y in digits(steps):
        step(model, optimizer, x, y)
    return model


def assert_equal_to(model: nn.Module, reference: nn.Module) -> None:
    theirs = dict(reference.named_parameters())
    for name, value in model.named_parameters():
        torch.testing.assert_close(
            whole_of(value.detach()), theirs[name].detach(), rtol=0, atol=1e-6, msg=name
        )


def collectives(work: Any) -> dict[str, int]:
    """The collectives that a call of ``work`` makes, by name."""
    with _Counted() as counted:
        work()
    return dict(counted.found)


class _Counted(TorchDispatchMode):
    """Counts the calls of torch.distributed's ops."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.found[func._schema.name.partition("::")[2]] += 1
        return func(*args, **(kwargs or {}))
