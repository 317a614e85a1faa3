"""A small model, captured, and its programs in the modes without servers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from transpiler import (
    DistributedStrategy,
    DistributeTranspiler,
    DistributeTranspilerConfig,
    capture,
    program_guard,
)
from transpiler.ir.graph import Op
from transpiler.program import Program

TWO, FOUR = "h:1,h:2", "a:1,a:2,b:1,b:2"
GRAD: dict[str, Any] = {"mode": "collective", "collective_mode": "grad_allreduce"}
LOCAL: dict[str, Any] = {"mode": "collective", "collective_mode": "local_sgd"}
Single = tuple[Program, Program]


class Net(nn.Module):
    """Two layers, running statistics and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)


def step(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model.out(F.relu(model.norm(model.fc(x)))) * model.frozen, y)


def captured(clip: Any = None) -> Single:
    torch.manual_seed(0)
    model = Net()
    with program_guard(Program(()), Program(())):
        batch = (torch.randn(4, 6), torch.randint(0, 3, (4,)))
        return capture(
            model, step, torch.optim.SGD(model.parameters(), lr=0.1), batch, grad_clip=clip
        )


def strategy_of(**switches: Any) -> DistributedStrategy:
    strategy = DistributedStrategy()
    for name, value in switches.items():
        setattr(strategy, name, value)
    return strategy


def transpiled(
    single: Single,
    trainers: str = TWO,
    trainer_id: int = 0,
    strategy: DistributedStrategy | None = None,
    **settings: Any,
) -> DistributeTranspiler:
    """By a configuration of these settings."""
    transpiler = DistributeTranspiler(DistributeTranspilerConfig(**settings))
    transpiler.transpile(
        trainer_id,
        single[0],
        trainers=trainers,
        startup_program=single[1],
        strategy=strategy,
    )
    return transpiler


def pair(single: Single, trainers: str = TWO, trainer_id: int = 0, **settings: Any) -> Single:
    transpiler = transpiled(single, trainers, trainer_id, **settings)
    return transpiler.get_trainer_program(), transpiler.get_startup_program()


def types(program: Program) -> list[str]:
    return [op.type for op in program.main.ops]


def of_type(program: Program, *names: str) -> list[Op]:
    return [op for op in program.main.ops if op.type in names]


def adaptive() -> DistributedStrategy:
    """Local SGD whose windows follow the loss."""
    strategy = DistributedStrategy()
    strategy.adaptive_localsgd = True
    strategy.adaptive_localsgd_configs = {"init_k_steps": 3, "begin_step": 2}
    return strategy


KINDS: dict[str, dict[str, Any]] = {
    "nccl2": {"mode": "nccl2", "nccl_comm_num": 2},
    "grad_allreduce": GRAD,
    "float16": {
        **GRAD,
        "strategy": strategy_of(
            fp16_allreduce=True, fuse_grad_size_in_num=2, sync_nccl_allreduce=True
        ),
    },
    "local_sgd": {
        **LOCAL,
        "use_hierarchical_allreduce": True,
        "hierarchical_allreduce_inter_nranks": 2,
    },
    "adaptive": {"mode": "collective", "strategy": adaptive()},
}
