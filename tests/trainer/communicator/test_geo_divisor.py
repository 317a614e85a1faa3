"""By how many trainers a geo message divides its changes."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from tests.support.table_trainers import Servers
from trainer import Constant, DistributedEmbedding, fleet
from trainer.job.job import Job
from trainer.senders.live_trainers import LiveTrainers
from transpiler import DistributedStrategy

ROWS = 8192  # of two numbers: the parameter has a slice on each of two servers
CHANGE = 840.0  # which many numbers divide


class Net(nn.Module):
    """A parameter of two slices, and two tables."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(ROWS, 2))
        self.first = DistributedEmbedding(2, init=Constant(0.0))
        self.second = DistributedEmbedding(2, init=Constant(0.0))

    def forward(self) -> torch.Tensor:
        ids = torch.arange(4)
        total: torch.Tensor = self.w.sum() + self.first(ids).sum() + self.second(ids).sum()
        return total


def test_all_of_a_message_is_divided_by_one_number(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All slices and tables, also where trainers come and go while it is made."""
    role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=servers(2).split(","))
    strategy = DistributedStrategy()
    strategy.a_sync_configs = {"k_steps": 1}
    job = Job(role, strategy)
    model = Net()
    job.models.append(model)
    optimizer = job.join(torch.optim.SGD(model.parameters(), lr=1.0))
    assert job.communicator is not None and job.communicator.lookups is not None
    (-CHANGE * model()).backward()
    counts = itertools.count(2)
    with monkeypatch.context() as patch:
        patch.setattr(LiveTrainers, "count", property(lambda live: next(counts)))
        optimizer.step()
    job.communicator.lanes[0].wait_for_replies()  # type: ignore[attr-defined]  # of geo

    pull = job.communicator.lookups.pull
    rows = [pull(table, torch.arange(4)) for table in ("first", "second")]
    served = torch.cat([job.communicator.served()["w"], *rows])
    (each,) = served.unique().tolist()
    assert each in [CHANGE / count for count in range(2, 8)]
    job.finish()
