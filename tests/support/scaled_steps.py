"""Steps with a GradScaler and planted overflows: the course of the scale."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_

from tests.support.hybrid_nets import strategy_of
from trainer import DataParallel, group_sharded_parallel, hybrid_optimizer, hybrid_parallel

STEPS = 9
OVERFLOWS = {2: (0,), 3: (1,), 5: (0, 1), 8: (1,)}  # by step, on which trainers


def scaler_of(kind: Any = torch.amp.GradScaler) -> Any:
    return kind("cpu", init_scale=64.0, growth_interval=2)


def course(
    model: nn.Module, optimizer: Any, scaler: Any, trainers: tuple[int, ...], clip: bool = False
) -> list[float]:
    """The scale after each step of a process that stands for these trainers."""
    scales = []
    for number in range(STEPS):
        optimizer.zero_grad()
        bad = set(trainers) & set(OVERFLOWS.get(number, ()))
        loss = model(torch.ones(2, 4)).sum() * (float("inf") if bad else 1.0)
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def alone(clip: bool = False) -> list[float]:
    """One process's, which has every overflow."""
    model = nn.Linear(4, 2)
    return course(model, torch.optim.SGD(model.parameters(), lr=0.1), scaler_of(), (0, 1), clip)


def course_on_ranks(kind: str) -> None:
    """Without servers: DataParallel, a level of sharding, or a hybrid direction."""
    torch.manual_seed(0)
    model, scaler = nn.Linear(4, 2), scaler_of()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "ddp":
        model = DataParallel(copy.deepcopy(model))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    elif kind == "hybrid":
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        model = hybrid_parallel(model, strategy_of(dp=1, sharding=2))
        optimizer = hybrid_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        scaler = scaler_of(ShardedGradScaler)
    else:
        options: Any = {"segment_size": 1} if kind == "p_g_os" else {}
        model, optimizer, scaler = group_sharded_parallel(
            model, optimizer, kind, scaler=scaler, **options
        )
    assert course(model, optimizer, scaler, (dist.get_rank(),)) == alone()
