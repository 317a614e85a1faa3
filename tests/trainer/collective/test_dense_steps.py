"""Averages among trainers that come and go: three of them in threads, over a real server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from pserver.config import ServerConfig
from pserver.errors import TrainerLost
from pserver.service.server import Server
from pserver.wire_pb2 import AnnounceRequest
from trainer import Constant, DistributedEmbedding, row_optimizers
from trainer.collective.elastic_means import DenseSteps
from trainer.environment.environment import Role, RoleMaker
from trainer.job.job import Job
from trainer.optimizer import DistributedOptimizer
from transpiler import DistributedStrategy

LOST = 2  # which trainer dies
STEPS = 4


class Net(nn.Module):
    """Rows on servers, and a dense layer of which every element moves alike."""

    def __init__(self) -> None:
        super().__init__()
        rows = row_optimizers.SGD(lr=1.0)
        self.rows = DistributedEmbedding(2, optimizer=rows, init=Constant(0.0))
        self.dense = nn.Linear(3, 1, bias=False)
        nn.init.zeros_(self.dense.weight)

    def forward(self) -> torch.Tensor:
        total: torch.Tensor = self.rows(torch.arange(4)).sum() + self.dense.weight.sum()
        return total


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(ServerConfig(heartbeat_timeout_seconds=20.0)) as running:
        yield running


class Player:
    """One trainer of three."""

    def __init__(self, server: Server, number: int, mode: str, policy: str = "go_on") -> None:
        strategy = DistributedStrategy()
        modes = {"rows": mode, "*": "collective"}
        strategy.a_sync_configs = {"modes": modes, "lost_trainer": policy}
        self.server, self.number = server, number
        self.job = Job(RoleMaker(Role.TRAINER, number, 3, (server.endpoint,)), strategy)
        self.model = Net()
        self.job.models.append(self.model)

    def join(self) -> DistributedOptimizer:
        """Comes to the others."""
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.5)
        self.optimizer = self.job.join(sgd)
        return self.optimizer

    @property
    def steps(self) -> DenseSteps:
        """Its averages."""
        assert self.job.communicator is not None
        found = self.job.communicator.dense_allreduce
        assert isinstance(found, DenseSteps)
        return found

    def step(self) -> None:
        """A gradient of its number and one."""
        self.optimizer.zero_grad()
        (self.model() * (self.number + 1)).backward()
        self.optimizer.step()

    def dies(self) -> None:
        """Who has started it says so, as launch does."""
        because = AnnounceRequest(trainer_id=self.number, failure="killed", unreplaced=True)
        self.server.job.announce(because)

    def ends(self) -> list[float]:
        """Its dense layer, at the job's end."""
        self.job.finish()
        return self.model.dense.weight.unique().tolist()


def reference(*means: float) -> list[float]:
    """The dense layer as one process steps it by these mean gradients."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.5)
    for mean in means:
        weight.grad = torch.tensor([mean])
        optimizer.step()
    return weight.tolist()


class Killed(Exception):
    """What ends the thread of a trainer that dies."""


def fail_once(steps: DenseSteps) -> None:
    """The next average has ended for the others, and fails here."""
    sums = steps._sums
    assert sums is not None
    made = sums.average

    def failing(*arguments: Any, **named: Any) -> Any:
        sums.average = made  # type: ignore[method-assign]
        made(*arguments, **named)
        raise TrainerLost("the connection broke")

    sums.average = failing  # type: ignore[method-assign]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_one_survivor_has_an_average_and_the_other_has_not(server: Server, mode: str) -> None:
    """Trainer 2 dies in the third step, when its average has ended.  Trainer 0 has it, trainer 1
    has not.  In async mode it counts, and trainer 1 gets it; in sync mode the servers have nothing
    of trainer 2's step, and the two others average without it.
    """

    def play(number: int) -> list[float]:
        player = players[number]
        player.join()
        for step in range(STEPS):
            if step == 2 and number == 1:
                fail_once(player.steps)
            if step == 2 and number == LOST:
                player.steps._settled = dead  # type: ignore[method-assign]
                player.job.communicator.close_step = dead  # type: ignore[union-attr, method-assign]
                if mode == "async":
                    del player.job.communicator.close_step  # type: ignore[union-attr]
            try:
                player.step()
            except Killed:
                player.dies()
                return []
        return player.ends()

    def dead(*arguments: Any) -> Any:
        raise Killed

    players = [Player(server, number, mode) for number in range(3)]
    with ThreadPoolExecutor(3) as pool:
        first, second, _ = pool.map(play, range(3))

    assert first == second == reference(2.0, 2.0, 2.0 if mode == "async" else 1.5, 1.5)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_another_process_gets_values_and_states(server: Server, mode: str) -> None:
    """Trainer 2 dies before its third step, and another process takes its place: the dense layer is
    that of a job without a loss.
    """
    died = threading.Event()

    def play(number: int) -> list[float]:
        player = players[number]
        player.join()
        for _ in range(STEPS):
            if number == LOST and player.optimizer.steps == 2:
                player.dies()
                died.set()
                return []
            player.step()
        return player.ends()

    def take_the_place() -> list[float]:
        assert died.wait(30.0)
        another = Player(server, LOST, mode, "wait")
        another.join()
        while another.optimizer.steps < STEPS:
            another.step()
        return another.ends()

    players = [Player(server, number, mode, "wait") for number in range(3)]
    unreplaced = AnnounceRequest(trainer_id=LOST, failure="killed")
    players[LOST].dies = lambda: server.job.announce(unreplaced)  # type: ignore[method-assign]
    with ThreadPoolExecutor(4) as pool:
        ends = [pool.submit(play, number) for number in range(3)]
        another = pool.submit(take_the_place)
        found = [each.result(60.0) for each in (another, *ends[:2])]

    assert found == [reference(2.0, 2.0, 2.0, 2.0)] * 3


def test_a_death_in_the_last_average_counts_alike_on_all(server: Server) -> None:
    """In async mode trainer 0 has it and takes no further step; it still tells trainer 1."""

    def play(number: int) -> list[float]:
        player = players[number]
        player.join()
        for step in range(2):
            if step == 1 and number == 1:
                fail_once(player.steps)
            player.step()
            if step == 1 and number == LOST:
                player.dies()
                return []
        return player.ends()

    players = [Player(server, number, "async") for number in range(3)]
    with ThreadPoolExecutor(3) as pool:
        first, second, _ = pool.map(play, range(3))

    assert first == second == reference(2.0, 2.0)


def test_who_is_left_alone_goes_on_alone(server: Server) -> None:
    """Two of three die at once."""

    def play(number: int) -> list[float]:
        player = players[number]
        player.join()
        for step in range(STEPS):
            if step == 2 and number:
                player.dies()
                return []
            player.step()
        return player.ends()

    players = [Player(server, number, "sync") for number in range(3)]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(play, range(3)))

    assert found[0] == reference(2.0, 2.0, 1.0, 1.0)


def test_who_cannot_leave_the_others_has_no_grace_period(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a job that stops with a trainer; it says why, before it joins."""
    monkeypatch.setenv("PSERVER_GRACE", "30")
    why = "expected 0 where trainers average gradients among themselves"
    player = Player(server, 0, "sync", "stop")
    with pytest.raises(ValueError, match=f"PSERVER_GRACE: {why}"):
        player.join()
    player.job.finish()
