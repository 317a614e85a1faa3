"""A trainer of one parameter, for tests of the server that it talks to."""

from __future__ import annotations

import torch

from pserver.client.channel import Channel
from pserver.client.client import Client, Identity
from pserver.client.replies import Reply
from pserver.config import PREFERRED_TRANSPORTS
from pserver.security.access import OPEN, Access
from tests.support.load import result
from transpiler.distribute import plan_parameters, pserver_program
from transpiler.ir.rules import Rule
from transpiler.plan.plan import Deployment, Plan

SECONDS = 20.0


NUMBERS = {"lr": 0.5, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}


def plan_of(trainers: int = 1) -> Plan:
    """One parameter of 1000 elements, plain SGD, one server."""
    return plan_parameters(
        [("w", (1000,), "float32", 0)],
        [Rule("sgd", NUMBERS, {})],
        mode="sync",
        trainers=trainers,
        servers=1,
    )


class Trainer:
    """A trainer with one parameter, which starts as ones."""

    def __init__(
        self,
        endpoint: str,
        number: int = 0,
        trainers: int = 1,
        transports: tuple[str, ...] = PREFERRED_TRANSPORTS,
        access: Access = OPEN,
    ) -> None:
        self.value = torch.ones(1000)
        plan = plan_of(trainers)
        identity = Identity(number, "first", plan.fingerprint(), plan.manifest(), transports)
        self.client = Client(endpoint, 0, identity, SECONDS, SECONDS, 1, access=access)
        if self.client.join().install:
            self.client.install(pserver_program(Deployment(plan, (endpoint,), server_index=0)))
            result(self.channel.load([("w", self.value)]), SECONDS)

    def destination(self, name: str, blank: object) -> torch.Tensor:
        """Of the values in answers: the parameter itself."""
        return self.value

    @property
    def channel(self) -> Channel:
        """Of the only lane."""
        return self.client.channels[0]

    def step(self, step: int, gradient: float) -> Reply:
        """One step, whole."""
        answer = self.channel.begin(self.destination)
        self.channel.push(step, [("w", torch.full((1000,), gradient))])
        self.channel.commit(step, {0: NUMBERS})
        return result(answer, SECONDS)
