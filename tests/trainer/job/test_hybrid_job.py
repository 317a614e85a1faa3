"""Jobs in which trainers average some gradients among themselves, beside tables and parameters on
servers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from pserver.config import ServerConfig
from pserver.errors import TrainerLost
from pserver.service.server import Server
from trainer import DistributedEmbedding, Uniform, fleet
from trainer.environment.environment import Role, RoleMaker
from trainer.job.job import Job
from trainer.optimizer import DistributedOptimizer
from transpiler import DistributedStrategy

Servers = Callable[[int], str]
MODES = {"emb": "sync", "*": "collective"}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.emb = DistributedEmbedding(4, num_embeddings=30, init=Uniform(-1, 1))
        self.fc = nn.Linear(4, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc(self.emb(ids))
        return out


def strategy(modes: dict[str, str], lost_trainer: str = "wait") -> DistributedStrategy:
    made = DistributedStrategy()
    made.a_sync_configs = {"modes": modes, "lost_trainer": lost_trainer}
    return made


def data(steps: int, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [
        (
            torch.randint(0, 30, (size,), generator=generator),
            torch.randint(0, 3, (size,), generator=generator),
        )
        for _ in range(steps)
    ]


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor, y: torch.Tensor
) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(ids), y).backward()
    optimizer.step()


def distributed(
    model: Model, endpoints: str, rank: int, trainers: int, lost_trainer: str = "wait"
) -> DistributedOptimizer:
    """The optimizer of one trainer, whose job is not the one of this process."""
    role = RoleMaker(Role.TRAINER, rank, trainers, tuple(endpoints.split(",")))
    job = Job(role, strategy(MODES, lost_trainer))
    job.models.append(model)
    return job.join(torch.optim.Adam(model.parameters(), lr=0.05))


def trainer(model: Model, endpoints: str, rank: int, trainers: int, share: Any) -> Model:
    """One trainer in a thread of its own: what fleet would make, without its one job a process."""
    optimizer = distributed(model, endpoints, rank, trainers)
    for ids, y in share:
        step(model, optimizer, ids, y)
    optimizer.barrier("end")
    with torch.no_grad():
        model.rows = model.emb(torch.arange(30))
    optimizer.close()
    return model


@pytest.mark.parametrize("trainers", [1, 2])
def test_a_mixed_job_in_sync_mode_equals_a_single_node(servers: Servers, trainers: int) -> None:
    """Rows on servers, dense gradients averaged by the trainers: within 1e-6 of plain torch on the
    concatenated batches.
    """
    endpoints, joint = servers(2), data(8, 12)
    shares = [
        [(ids.chunk(trainers)[rank], y.chunk(trainers)[rank]) for ids, y in joint]
        for rank in range(trainers)
    ]
    made = [Model() for _ in range(trainers)]  # one after the other: they draw random numbers
    with ThreadPoolExecutor(trainers) as pool:
        models = list(
            pool.map(
                lambda rank: trainer(made[rank], endpoints, rank, trainers, shares[rank]),
                range(trainers),
            )
        )
    reference = Model()
    optimizer = torch.optim.Adam(reference.parameters(), lr=0.05)
    for ids, y in joint:
        step(reference, optimizer, ids, y)
    rows = reference.emb(torch.arange(30)).detach()

    for model in models:
        assert (model.fc.weight - reference.fc.weight).abs().max() <= 1e-6
        assert (model.rows - rows).abs().max() <= 1e-6
        assert torch.equal(model.fc.weight, models[0].fc.weight) and torch.equal(
            model.unused.weight, reference.unused.weight
        )


def test_the_heartbeat_timeout_holds_among_the_trainers_of_a_mixed_job() -> None:
    """A trainer that falls silent is lost to the other after the servers' heartbeat timeout; here
    in a job that stops then.
    """
    over = threading.Event()

    def silent_after_joining(rank: int) -> str:
        optimizer = distributed(Model(), endpoints, rank, 2, "stop")
        assert (
            optimizer.communicator is not None
            and optimizer.communicator.dense_allreduce is not None
        )
        groups = optimizer.communicator.dense_allreduce.groups
        assert groups is not None and groups.peers.membership is not None
        try:
            if rank == 0:
                groups.wait(Endless(), "a wait", torch.device("cpu"))
            with groups.peers.membership._sending:  # no beat leaves
                assert over.wait(30.0)
        except TrainerLost as error:
            return str(error)
        finally:
            over.set()
            optimizer.close()
        return ""

    config = ServerConfig(heartbeat_timeout_seconds=1.0)
    with Server(config) as server, ThreadPoolExecutor(2) as pool:
        endpoints = server.endpoint
        said = list(pool.map(silent_after_joining, range(2)))

    assert said[0].startswith("trainer 1 is lost (silent for 1 s), and trainer 0 is in a wait")


class Endless(dist.Work):
    """An operation that never ends."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        time.sleep(timeout.total_seconds())
        raise RuntimeError("timed out")

    def is_completed(self) -> bool:
        return False


def test_a_table_is_not_averaged_and_servers_are_not_left_without_work(servers: Servers) -> None:
    """Each is refused, and named."""
    fleet.init(fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=servers(1).split(",")))
    model = fleet.distributed_model(Model())
    optimizer = torch.optim.Adam(model.parameters())
    try:
        with pytest.raises(ValueError, match="table 'emb' is in mode collective"):
            fleet.distributed_optimizer(optimizer, strategy({"*": "collective"}))
    finally:
        fleet.finish()
