"""The eager path in an update mode: a wide model, one trainer's job, what it is compared with."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pserver.service.server import Server
from tests.support import eager_jobs
from tests.support.load import Deadline
from transpiler import DistributedStrategy

OUTER_SGD = {"type": "sgd", "lr": 1.0}


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 4000), nn.Tanh(), nn.Linear(4000, 2))


def strategy_of(**configs: Any) -> DistributedStrategy:
    strategy = DistributedStrategy()
    strategy.a_sync = True
    strategy.a_sync_configs = configs
    return strategy


def joined(
    endpoints: str, model: nn.Module, optimizer: torch.optim.Optimizer, **configs: Any
) -> Any:
    """Has joined in the mode of these ``a_sync_configs``."""
    return eager_jobs.joined(endpoints, model, optimizer, strategy=strategy_of(**configs))


class Held:
    """The server's slices are locked: messages arrive, none is applied."""

    def __init__(self, server: Server) -> None:
        self._locks = server.job.installed()._locks.values()

    def __enter__(self) -> None:
        for lock in self._locks:
            lock.acquire()

    def __exit__(self, *_: object) -> None:
        for lock in self._locks:
            lock.release()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def assert_equal(mine: nn.Module, reference: nn.Module) -> None:
    for (name, one), (_, other) in zip(
        mine.state_dict().items(), reference.state_dict().items(), strict=True
    ):
        assert torch.equal(one, other), f"{name}: largest difference {(one - other).abs().max()}"


def eventually(holds: Callable[[], bool]) -> None:
    deadline = Deadline(10)
    while not holds():
        assert not deadline.over, f"it did not come to that within {deadline.limit:g} s"
        threading.Event().wait(0.005)
