"""A trainer in this process, for benchmarks: parameters of given sizes, and a step of all their
gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from trainer.communicator.communicator import Communicator
from trainer.environment.environment import Connection
from transpiler.distribute import plan_parameters
from transpiler.ir.rules import Rule
from transpiler.plan.plan import Deployment

SGD = {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}


class Trainer:
    """One trainer of a job whose parameters are flat tensors of float32.

    Args:
        elements: of each parameter.
        transport: the transport to ask for.
        keys: a folder of this host's, for TLS.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        elements: Sequence[int],
        transport: str,
        number: int = 0,
        trainers: int = 1,
        keys: str = "",
    ) -> None:
        self.parameters = {f"w{index}": torch.zeros(count) for index, count in enumerate(elements)}
        self.gradients = {name: torch.ones_like(value) for name, value in self.parameters.items()}
        listed = [
            (name, tuple(value.shape), "float32", 0) for name, value in self.parameters.items()
        ]
        plan = plan_parameters(
            listed, [Rule("sgd", SGD)], trainers=trainers, servers=len(endpoints)
        )
        connection = replace(Connection.from_environment(), transport=transport, keys=keys)
        self.communicator = Communicator(
            Deployment(plan, tuple(endpoints), trainer_id=number), self.parameters, [], connection
        )

    def step(self) -> None:
        """Pushes every gradient and pulls every parameter."""
        self.communicator.send_whole(self.gradients)
        self.communicator.commit({0: SGD})


@contextmanager
def trainer(
    endpoint: str, elements: Sequence[int], transport: str, keys: str = ""
) -> Iterator[Trainer]:
    """The only trainer of a job, joined."""
    joined = Trainer([endpoint], elements, transport, keys=keys)
    joined.communicator.start()
    try:
        yield joined
    finally:
        joined.communicator.leave()


def wide_model(width: int = 2048) -> nn.Module:
    """Two wide layers: 16 MB of float32 at the default width."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width // 2, width), nn.ReLU(), nn.Linear(width, width // 2))


def wide_batch(width: int = 2048, rows: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch for it."""
    return torch.randn(rows, width // 2), torch.randn(rows, width // 2)
