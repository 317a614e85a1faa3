"""Small models, captured and transpiled in every way that has an op order of its own: what the
transcripts of programs show.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from trainer import DistributedEmbedding, row_optimizers
from transpiler import (
    ClipGradByGlobalNorm,
    DistributeTranspiler,
    DistributeTranspilerConfig,
    capture,
    program_guard,
)
from transpiler.program import Program

Pair = tuple[Program, Program]
SERVERS, TRAINERS = "a:6174,b:6174", "a:1,b:1"


class Dense(nn.Module):
    """A weight that is sliced, a bias, running statistics and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(self.fc(x)) * self.frozen
        return result


class Tables(nn.Module):
    """Two lookups of one table, a table with two rules by columns, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        rules = row_optimizers.Segments(
            [(1, row_optimizers.Ftrl(lr=0.1)), (3, row_optimizers.RowwiseAdagrad(lr=0.1))]
        )
        self.emb = DistributedEmbedding(4)
        self.own = DistributedEmbedding(4, num_embeddings=9, optimizer=rules, padding_idx=0)
        self.fc = nn.Linear(12, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = [self.emb(ids[:, 0]), self.emb(ids[:, 1]), self.own(ids[:, 2])]
        result: torch.Tensor = self.fc(torch.cat(rows, 1))
        return result


def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The training step of both."""
    return F.cross_entropy(model(x), y)


def captured(model: nn.Module, grad_clip: Any = None) -> Pair:
    """The single-node programs, under SGD with momentum."""
    torch.manual_seed(0)
    tables = isinstance(model, Tables)
    x = torch.arange(12).reshape(4, 3) % 9 if tables else torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.0 if tables else 0.9)
    with program_guard(Program(()), Program(())):
        return capture(model, step, optimizer, (x, torch.tensor([0, 1, 0, 1])), grad_clip=grad_clip)


def deployed(pair: Pair, **settings: Any) -> dict[str, Program]:
    """Every program of a job of 2 trainers and 2 servers (or of 2 trainers alone), as trainer 1 has
    them.
    """
    alone = settings.get("mode", "pserver") != "pserver"
    settings = settings if alone else {"min_block_size": 8, **settings}
    transpiler = DistributeTranspiler(DistributeTranspilerConfig(**settings))
    where: dict[str, Any] = (
        {"trainers": TRAINERS} if alone else {"pservers": SERVERS, "trainers": 2}
    )
    transpiler.transpile(1, pair[0], startup_program=pair[1], **where)
    programs = {
        "trainer": transpiler.get_trainer_program(),
        "trainer startup": transpiler.get_startup_program(),
    }
    for endpoint in () if alone else SERVERS.split(","):
        main, startup = transpiler.get_pserver_programs(endpoint)
        programs |= {f"pserver {endpoint}": main, f"pserver {endpoint} startup": startup}
    return programs


ASYNC: dict[str, Any] = {"sync_mode": False}
COLLECTIVE: dict[str, Any] = {"mode": "collective"}
DEPLOYMENTS: dict[str, Callable[[], dict[str, Program]]] = {
    "sync": lambda: deployed(captured(Dense())),
    "sync_whole": lambda: deployed(captured(Dense()), slice_var_up=False),
    "sync_clipped": lambda: deployed(captured(Dense(), ClipGradByGlobalNorm(1.0))),
    "async": lambda: deployed(captured(Dense()), **ASYNC),
    "async_runtime_split_send_recv": lambda: deployed(
        captured(Dense()), **ASYNC, runtime_split_send_recv=True
    ),
    "half_async": lambda: deployed(captured(Dense()), **ASYNC, half_async=True),
    "delay_compensated": lambda: deployed(captured(Dense()), enable_dc_asgd=True),
    "geo": lambda: deployed(captured(Dense()), geo_sgd_mode=True),
    "nccl2": lambda: deployed(captured(Dense()), mode="nccl2"),
    "grad_allreduce": lambda: deployed(
        captured(Dense()), **COLLECTIVE, collective_mode="grad_allreduce", nccl_comm_num=2
    ),
    "local_sgd": lambda: deployed(captured(Dense()), **COLLECTIVE, collective_mode="local_sgd"),
    "tables_sync": lambda: deployed(captured(Tables())),
    "tables_async": lambda: deployed(captured(Tables()), **ASYNC),
    "tables_async_runtime_split_send_recv": lambda: deployed(
        captured(Tables()), **ASYNC, runtime_split_send_recv=True
    ),
    "tables_geo": lambda: deployed(captured(Tables()), geo_sgd_mode=True),
}
