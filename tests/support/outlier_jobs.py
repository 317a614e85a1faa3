"""Jobs in which one push is far beyond its history."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from pserver.membership.watermark import WARM_UP
from tests.support.every_mode import with_every_mode
from tests.support.table_trainers import Trainer

MODES: dict[str, dict[str, Any]] = with_every_mode(
    {
        "sync": {"modes": {"*": "sync"}},
        "async": {},
        "half-async": {"half_async": True},
        "staleness": {"staleness": 3},
        "delay compensation": {"dc_asgd": 0.5},
        "geo": {"k_steps": 1},
        "diloco": {"k_steps": 1, "outer_optimizer": {"type": "sgd", "lr": 1.0}},
    },
    dict,
)
PLANTED = WARM_UP + 2  # the step in which it comes
STEPS = PLANTED + 2
HUGE = 1e6


class Halves(nn.Module):
    """A parameter that is cut in two slices, so that two servers share it, and a small one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(20_000))
        self.v = nn.Parameter(torch.randn(3))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def optimizer_of(mode: str) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Where trainers step by themselves one without states, which nobody could take back."""
    return plain if "k_steps" in MODES[mode] else adam


def trainer(endpoints: str, mode: str, number: int = 0, trainers: int = 1, **keys: Any) -> Trainer:
    configs = {**MODES[mode], **keys}
    return Trainer(endpoints, number, trainers, Halves(), optimizer_of(mode), **configs)


def step(each: Trainer, number: int, planted: bool = False) -> None:
    """A step whose gradients follow from its number; the huge element is at the end of ``w``."""
    generator = torch.Generator().manual_seed(number)
    for p in (each.model.w, each.model.v):
        p.grad = torch.randn(p.shape, generator=generator)
    if planted:
        each.model.w.grad[-1] = HUGE
    each.optimizer.step()
    each.optimizer.flush()


def play(each: Trainer, steps: Iterable[int] = range(1, STEPS + 1), planted: int = 0) -> None:
    for number in steps:
        step(each, number, number == planted)


def values(each: Trainer) -> dict[str, list[float]]:
    """The parameters as the servers have them, and as the trainer has them."""
    own = {name: p.detach() for name, p in each.model.named_parameters()}
    served = own | each.job.served()  # of which a sync job has none of its own
    both = {**own, **{f"served {name}": served[name] for name in own}}
    return {name: value.tolist() for name, value in both.items()}


def refused(each: Trainer) -> float:
    assert each.job.communicator is not None
    return each.job.communicator.metrics()["steps_refused_outlier"]
