"""Jobs that train one table of plain numbers: its model, and trainers of one job in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trainer import Constant, DistributedEmbedding, fleet
from trainer.embedding.conversion import moved
from trainer.job.job import Job
from transpiler import DistributedStrategy

Servers = Callable[[int], str]


DIM = 4


class Net(nn.Module):
    """One table, of zeros at first unless said otherwise, and one dense parameter of as many
    numbers as a row has.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.emb = DistributedEmbedding(DIM, **{"init": Constant(0.0), **options})
        self.w = nn.Parameter(torch.zeros(DIM))

    def add(
        self, ids: list[int], change: float, dense: float | None = None, **statistics: Any
    ) -> None:
        """A backward after which a step of SGD(lr=1) adds ``change`` to every id's row, once for
        each time it is there.
        """
        loss = -change * self.emb(torch.tensor(ids, dtype=torch.int64), **statistics).sum()
        if dense is not None:
            loss = loss - dense * self.w.sum()
        loss.backward()

    def row(self, id_: int) -> float:
        """A row whose numbers are equal."""
        with torch.no_grad():
            row = self.emb(torch.tensor([id_]))[0]
        assert bool((row == row[0]).all())
        return float(row[0])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


class Trainer:
    """One of a job's trainers: what ``fleet`` does, for a process that has several."""

    def __init__(
        self,
        endpoints: str,
        number: int,
        trainers: int,
        model: nn.Module,
        optimizer: Callable[[nn.Module], Any] = sgd,
        strategy: DistributedStrategy | None = None,
        **configs: Any,
    ) -> None:
        if configs:
            strategy = DistributedStrategy()
            strategy.a_sync, strategy.a_sync_configs = True, configs
        role = fleet.UserDefinedRoleMaker(
            number, worker_num=trainers, server_endpoints=endpoints.split(",")
        )
        self.job = Job(role, strategy)
        self.model: Any = moved(model, ())
        self.job.models.append(self.model)
        self.optimizer = self.job.join(optimizer(self.model))

    def add(
        self, ids: list[int] | None, change: float, dense: float | None = None, **statistics: Any
    ) -> None:
        """A step; of no ids at all where they are None."""
        self.optimizer.zero_grad()
        if ids is not None:
            self.model.add(ids, change, dense, **statistics)
        self.optimizer.step()

    @property
    def bytes(self) -> dict[str, int]:
        """Of the table, on the wire."""
        assert self.job.communicator is not None
        return self.job.communicator.variable_bytes()["emb"]
