"""Values that a trainer of the same host reads where they are, while others' steps change them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from pserver.client.client import Client, Identity
from pserver.config import ServerConfig
from pserver.dense.update import SliceUpdate
from pserver.service.server import Server
from pserver.transport import zones
from pserver.transport.stream import MISSED
from transpiler.distribute import plan_parameters, pserver_program
from transpiler.ir.rules import Rule
from transpiler.plan.plan import Deployment, Plan

SECONDS = 20.0
NUMBERS = {"lr": 1.0, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}
SHAPES = {"large": 1_500_000, "one": 100_000, "small": 10}  # of two frames, of one, without a zone
STEPS = 15


def plan(mode: str, trainers: int) -> Plan:
    return plan_parameters(
        [(name, (size,), "float32", 0) for name, size in SHAPES.items()],
        [Rule("sgd", NUMBERS, {})],
        mode=mode,
        trainers=trainers,
        servers=1,
    )


class Trainer:
    """One of several, over shared memory; all elements of a tensor are alike."""

    def __init__(self, endpoint: str, mode: str, number: int, trainers: int) -> None:
        self.values = {name: torch.zeros(size) for name, size in SHAPES.items()}
        own = plan(mode, trainers)
        identity = Identity(number, f"t{number}", own.fingerprint(), own.manifest(), ("shm",))
        self.client = Client(endpoint, 0, identity, SECONDS, SECONDS, 1)
        if self.client.join().install:
            self.client.install(pserver_program(Deployment(own, (endpoint,), server_index=0)))
            self.client.channels[0].load(self.values.items()).result(timeout=SECONDS)

    def destination(self, name: str, blank: object) -> torch.Tensor:
        return self.values[name]

    def steps(self) -> None:
        """Takes all steps, whose gradients are -1, and looks at every value that comes."""
        channel = self.client.channels[0]
        for step in range(1, STEPS + 1):
            reply = channel.begin(self.destination)
            channel.push(step, [(name, -torch.ones(size)) for name, size in SHAPES.items()])
            channel.commit(step, {0: NUMBERS})
            reply.result(timeout=SECONDS)
            for name, value in self.values.items():
                assert value.min() == value.max(), f"{name} is of several steps"
                assert value[0] >= step


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_no_value_is_of_two_steps(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three trainers: whole values, and in the end the sum of all steps."""
    update = SliceUpdate.update

    def halves(own: SliceUpdate, gradient: torch.Tensor, *rest: Any, **named: Any) -> None:
        before = own.value.clone()
        update(own, gradient, *rest, **named)
        after = own.value.clone()
        own.value.copy_(before)
        own.value[: own.value.numel() // 2] = after[: own.value.numel() // 2]
        own.value.copy_(after)

    monkeypatch.setattr(SliceUpdate, "update", halves)
    with Server(ServerConfig(transport="shm")) as server, ThreadPoolExecutor(3) as pool:
        trainers = [Trainer(server.endpoint, mode, number, 3) for number in range(3)]
        for run in [pool.submit(each.steps) for each in trainers]:
            run.result(timeout=5 * SECONDS)
        total = STEPS * (3 if mode == "async" else 1)
        trainers[0].client.channels[0].pull([], trainers[0].destination).result(timeout=SECONDS)
        for each in trainers:
            each.client.leave()

    assert all(bool((v == total).all()) for v in trainers[0].values.values())


def test_a_pull_brings_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which cannot be missed: where nothing can be read in place, every reply is whole all the
    same.
    """
    monkeypatch.setattr(zones.ReadZones, "receive", lambda *arguments: MISSED)
    with Server(ServerConfig(transport="shm")) as server:
        trainer = Trainer(server.endpoint, "sync", 0, 1)
        trainer.steps()
        trainer.client.leave()

    assert all(bool((v == STEPS).all()) for v in trainer.values.values())
