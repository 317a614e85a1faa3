"""A model with three sparse tables, captured, and the programs of its jobs in every mode."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from trainer import DistributedEmbedding, row_optimizers
from transpiler import DistributeTranspiler, DistributeTranspilerConfig, capture
from transpiler.program import Program

ENDPOINTS = "127.0.0.1:6174,127.0.0.1:6175"


class Net(nn.Module):
    """A shared table with two lookups, one with an optimizer of its own for two segments, a weight
    of torch's.
    """

    def __init__(self) -> None:
        super().__init__()
        rules = row_optimizers.Segments(
            [(1, row_optimizers.Ftrl(lr=0.1)), (3, row_optimizers.RowwiseAdagrad(lr=0.1))]
        )
        self.emb = DistributedEmbedding(4)
        self.own = DistributedEmbedding(4, num_embeddings=9, optimizer=rules, padding_idx=0)
        self.word = nn.Embedding(9, 3, sparse=True)
        self.fc = nn.Linear(15, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        first = self.emb(ids[:, 0]).relu()
        out: torch.Tensor = self.fc(
            torch.cat([first, self.emb(ids[:, 1]), self.own(ids[:, 2]), self.word(ids[:, 0])], 1)
        )
        return out


def step(model: nn.Module, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids), y)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(12).reshape(4, 3) % 9, torch.tensor([0, 1, 0, 1])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@functools.cache
def captured() -> tuple[Program, Program]:
    model = Net()
    return capture(model, step, sgd(model), batch())


MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"sync_mode": False},
    "run time": {"sync_mode": False, "runtime_split_send_recv": True},
    "delay-compensated": {"sync_mode": False, "enable_dc_asgd": True},
    "diloco": {"k_steps": 3, "outer_optimizer": {"type": "nesterov", "lr": 0.5, "momentum": 0.9}},
    "geo": {"sync_mode": False, "geo_sgd_mode": True, "geo_sgd_need_push_nums": 3},
}


@functools.cache
def job(mode: str = "sync") -> dict[str, Program]:
    """The programs of a job of two trainers and two servers."""
    config = DistributeTranspilerConfig()
    for name, value in MODES[mode].items():
        setattr(config, name, value)
    main, startup = captured()
    transpiler = DistributeTranspiler(config)
    transpiler.transpile(0, main, pservers=ENDPOINTS, trainers=2, startup_program=startup)
    server, server_startup = transpiler.get_pserver_programs(ENDPOINTS.split(",")[0])
    return {
        "trainer": transpiler.get_trainer_program(),
        "startup": transpiler.get_startup_program(),
        "server": server,
        "server startup": server_startup,
    }


def types(program: Program, *wanted: str) -> list[str]:
    return [op.type for op in program.main.ops if not wanted or op.type in wanted]
