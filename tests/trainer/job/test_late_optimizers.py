"""A trainer that comes late to a job of several optimizers, or of groups that were added: its
script has made only the first of them when it asks to join.

The rate is a power of two and gradients are ones, so the parameters say how many steps of both
trainers are in them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from pserver.config import ServerConfig
from pserver.errors import PartialPlan, Refused
from pserver.service.server import Server
from tests.support.threaded_scripts import kill
from tests.support.threads import at_once
from trainer import fleet
from trainer.job.followed_passes import FollowedPasses
from trainer.job.job import Job
from trainer.optimizer import DistributedOptimizer
from transpiler import DistributedStrategy

BEFORE, LATER, RATE = 3, 12, 0.5  # steps: before a trainer is lost, and of each in the end

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def nobody_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """These scripts have no passes, and never say where they are."""
    monkeypatch.setattr("pserver.client.client.REPORT_SECONDS", 1.0)


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    with Server(ServerConfig()) as one, Server(ServerConfig()) as other:
        yield [one, other]


class Player:
    """One of two trainers, with the first of its optimizers or groups."""

    def __init__(self, servers: list[Server], number: int, a_sync: bool) -> None:
        strategy = DistributedStrategy()
        strategy.a_sync = a_sync
        if a_sync:  # each step waits for its own result
            strategy.a_sync_configs = {"send_queue_size": 1}
        endpoints = [server.endpoint for server in servers]
        role = fleet.UserDefinedRoleMaker(number, worker_num=2, server_endpoints=endpoints)
        self.number, self.job = number, Job(role, strategy)
        self.job.saves = FollowedPasses(self.job)
        self.models = [nn.Linear(64, 400, bias=False) for _ in range(2)]
        for model in self.models:
            nn.init.zeros_(model.weight)
            self.job.models.append(model)
        self.optimizers = [self._joined(0)]

    def _joined(self, number: int) -> DistributedOptimizer:
        return self.job.join(torch.optim.SGD(self.models[number].parameters(), lr=RATE))

    def make_all(self, further: str) -> None:
        """Those that are missing."""
        if further == "optimizer":
            self.optimizers.append(self._joined(1))
        else:
            parameters = list(self.models[1].parameters())
            self.optimizers[0].add_param_group({"params": parameters, "lr": RATE})

    @property
    def steps(self) -> int:
        """That it has taken, with those before it came."""
        return self.optimizers[0].steps

    def step(self) -> None:
        """One iteration."""
        for model in self.models:
            model(torch.ones(1, 64)).sum().backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def moved(self) -> list[float]:
        """The number of steps in the parameters."""
        assert self.job.communicator is not None
        self.job.communicator.pull()
        return sum(((-each.weight / RATE).unique().tolist() for each in self.models), [])


def pair(servers: list[Server], further: str, a_sync: bool) -> list[Player]:
    """Two trainers after some steps, of whom the second one is lost."""

    def begun(number: int) -> Player:
        player = Player(servers, number, a_sync)
        player.make_all(further)
        for _ in range(BEFORE):
            player.step()
        player.optimizers[0].flush()
        return player

    found: list[Player] = at_once(lambda: begun(0), lambda: begun(1))
    kill(servers, found[1])
    return found


@pytest.mark.parametrize("further", ["optimizer", "group"])
def test_it_joins_when_it_has_made_all_of_them(servers: list[Server], further: str) -> None:
    """Until then a joint call says why there is none; the steps of the lost one, and of the one in
    its place, all count.
    """
    (left, _), placed = pair(servers, further, a_sync=True), threading.Event()

    def goes_on() -> None:
        while not placed.is_set():
            left.step()

    def comes() -> tuple[Player, int]:
        try:
            late = Player(servers, 1, True)
            with pytest.raises(PartialPlan, match="distributed 1 of the job's 2 parameter groups"):
                late.optimizers[0].barrier("early")
            late.make_all(further)
            begins = late.steps
            while late.steps < begins + LATER:
                late.step()
            late.optimizers[0].flush()
            return late, begins
        finally:
            placed.set()

    _, (late, begins) = at_once(goes_on, comes)
    left.optimizers[0].flush()

    assert begins >= BEFORE
    assert left.moved() == late.moved() == [float(left.steps + BEFORE + LATER)] * 2
    at_once(left.job.finish, late.job.finish)


def test_trainers_that_take_the_steps_together_let_nobody_in(servers: list[Server]) -> None:
    """The others may stand between two steps of an iteration that it would begin: they go on
    without it at once, and it is told so.
    """
    left, _ = pair(servers, "optimizer", a_sync=False)

    def goes_on() -> None:
        while left.steps < LATER:
            left.step()

    def comes() -> None:
        with pytest.raises(Refused, match="trainer 1 cannot join: .* after training has started"):
            Player(servers, 1, False).make_all("optimizer")

    at_once(goes_on, comes)

    assert left.moved() == [LATER] * 2
    left.job.finish()
