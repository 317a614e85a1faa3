"""Scripts of several trainers in threads of one process: what ``fleet`` does, for each of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from pserver import wire_pb2 as wire
from pserver.service.server import Server
from trainer import fleet
from trainer.job.automatic_saves import AutomaticSaves
from trainer.job.checkpoint_settings import CheckpointSettings
from trainer.job.followed_passes import FollowedPasses
from trainer.job.job import Job
from trainer.samplers.saved_batches import SavedBatches
from trainer.samplers.shard import shard
from transpiler import DistributedStrategy

SAMPLES = 24


class Script:
    """One trainer's script, up to its first batch.

    Args:
        servers: of the job.
        number, trainers: which trainer, and of how many.
        checkpoint: where the job saves by itself; "": it does not.
        every: seconds between two saves.
        settings: of the strategy.
    """

    def __init__(
        self,
        servers: list[Server],
        number: int,
        trainers: int = 2,
        checkpoint: str = "",
        every: float = 1e-6,
        **settings: Any,
    ) -> None:
        strategy = DistributedStrategy()
        for name, value in settings.items():
            setattr(strategy, name, value)
        endpoints = [server.endpoint for server in servers]
        role = fleet.UserDefinedRoleMaker(number, worker_num=trainers, server_endpoints=endpoints)
        self.number, self.job = number, Job(role, strategy)
        self.saves = self.job.saves = (
            AutomaticSaves(self.job, CheckpointSettings(checkpoint, every, 3))
            if checkpoint
            else FollowedPasses(self.job)
        )
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        self.job.models.append(self.model)
        self.optimizer = self.job.join(torch.optim.SGD(self.model.parameters(), lr=1.0))
        self.saves.joined()
        self.loader = DataLoader(torch.arange(SAMPLES), 2, shuffle=True)  # type: ignore[arg-type]  # it has a length
        self.seen: list[list[int]] = []  # by pass: samples of the steps that it has taken

    def shard(self, name: str = "samples", loader: Any = None) -> Iterable[Any]:
        """What ``fleet.shard`` gives, at a line of the script."""
        job, strategy = self.job, self.job.strategy
        place, parts = job.place_in_data()
        mine = shard(
            self.loader if loader is None else loader,
            parts,
            place,
            None,
            job.passes,
            "",
            lambda: job.samples.leases(job.communicator, strategy, job.saves),
        )
        return SavedBatches(mine, name, self.saves)

    def step(self) -> None:
        """Adds the learning rate to the weight."""
        self.optimizer.zero_grad()
        (-self.model(torch.ones(1, 1))).sum().backward()
        self.optimizer.step()

    def meet(self, name: str, text: str = "") -> dict[int, str]:
        """A joint call."""
        return self.optimizer.barrier(name, text)

    @property
    def rate(self) -> float:
        """The learning rate."""
        return float(self.optimizer.param_groups[0]["lr"])

    def finish(self) -> None:
        """The end of the script."""
        self.job.finish()
        self.job.restore()


def kill(servers: list[Server], script: Script) -> None:
    """Its process has ended, as ``launch`` tells the servers; of what it sends nothing counts."""
    for server in servers:
        server.job.announce(wire.AnnounceRequest(trainer_id=script.number, failure="killed"))
    communicator = script.job.communicator
    assert communicator is not None, "it has joined"
    communicator.leave("killed")
    script.job.restore()
