"""Small programs to be run in the ways that strategies ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.collective_trainers import GRAD, ports
from transpiler import (
    BuildStrategy,
    DistributedStrategy,
    DistributeTranspiler,
    DistributeTranspilerConfig,
    ExecutionStrategy,
    Program,
    capture,
    program_guard,
)

Batch = tuple[Tensor, Tensor]


def net() -> nn.Module:
    torch.manual_seed(3)
    last = nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *last)


def captured(
    rule: Any = torch.optim.SGD, model: nn.Module | None = None, **settings: Any
) -> tuple[nn.Module, Program, Program]:
    """A model with its main and its startup program."""
    model = net() if model is None else model
    optimizer = rule(model.parameters(), lr=0.1, **settings)
    with program_guard(Program(()), Program(())):
        main, startup = capture(
            model, lambda model, x, y: F.cross_entropy(model(x), y), optimizer, batches(1)[0]
        )
    return model, main, startup


def batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator))
        for _ in range(count)
    ]


def build(**settings: Any) -> BuildStrategy:
    made = BuildStrategy()
    for name, value in settings.items():
        setattr(made, name, value)
    return made


def execution(**settings: Any) -> ExecutionStrategy:
    made = ExecutionStrategy()
    for name, value in settings.items():
        setattr(made, name, value)
    return made


def transpiled(
    main: Program,
    startup: Program,
    strategy: DistributedStrategy,
    endpoints: Sequence[str] = (),
    rank: int = 0,
) -> tuple[Program, Program]:
    """The programs of a trainer, the only one unless others are given, of a job without servers."""
    endpoints = endpoints or ports(1)
    transpiler = DistributeTranspiler(DistributeTranspilerConfig(**GRAD))
    transpiler.transpile(
        rank,
        main,
        trainers=",".join(endpoints),
        startup_program=startup,
        current_endpoint=endpoints[rank],
        strategy=strategy,
    )
    return transpiler.get_trainer_program(), transpiler.get_startup_program()


def values(model: nn.Module) -> list[Tensor]:
    return [each.detach().clone() for each in model.parameters()]
