"""Seven jobs whose steps are counted, each in a process of its own: what other jobs have left in a
process, as hooks of torch, would count too.

Such a process keeps to one processor.  On two of them threads pass the interpreter's lock to and
fro, and each time is a voluntary switch: 16 trainers' steps had 160 of them on some days and 2,000
on others.  On one a thread switches when it waits for something.

::

    python -c 'from tests.support.step_costs import main; main()' CASE
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pserver.config import ServerConfig
from pserver.service.server import Server
from tests.support import costs
from tests.support.costs import NEVER, Crew, Step
from tests.support.table_trainers import Net, Trainer, sgd
from trainer import DistributedEmbedding

SMALL, LARGE = 256, 4 * 2**20  # elements: 1 KB, 16 MB
MANY, SLOTS = 16, 26


class Dense(nn.Module):
    """Parameters of one size, whose gradients are ones."""

    def __init__(self, count: int, elements: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(elements) for _ in range(count))
        self.gradient = torch.ones(elements)


def dense(trainer: Trainer, times: int = 1) -> None:
    """Steps whose gradients are there, until the last is answered."""
    for _ in range(times):
        for weight in trainer.model.weights:
            weight.grad = trainer.model.gradient
        trainer.optimizer.step()
    trainer.job.communicator.drain()


def lookup(trainer: Trainer) -> None:
    """A lookup of four rows, and a push of their gradients."""
    trainer.add([1, 2, 3, 4], 1.0, 1.0)


class Slots(nn.Module):
    """A table for each of many slots, as a click model has them."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = nn.ModuleList(DistributedEmbedding(16, name=f"slot-{i}") for i in range(SLOTS))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = sum(slot(ids) for slot in self.slots).sum()
        return loss


def click(trainer: Trainer) -> None:
    """A lookup in every slot, and a push of its gradients."""
    trainer.optimizer.zero_grad()
    trainer.model(torch.arange(32)).backward()
    trainer.optimizer.step()


CASES: dict[str, tuple[int, Any, Any, dict[str, Any]]] = {
    # trainers, the model, a step, the mode
    "sync, 10 x 1 KB": (1, lambda: Dense(10, SMALL), dense, {}),
    "async, 16 MB": (1, lambda: Dense(1, LARGE), dense, {"k_steps": 0}),
    "sync, a lookup and a push": (1, Net, lookup, {}),
    "sync, 26 tables": (1, Slots, click, {}),
    "a window of 4 steps, 10 x 1 KB": (
        *(1, lambda: Dense(10, SMALL), lambda trainer: dense(trainer, 4), {"k_steps": 4}),
    ),
    "async, 16 trainers of 1 KB": (MANY, lambda: Dense(1, SMALL), dense, {"k_steps": 0}),
    "sync, 16 trainers of 1 KB": (MANY, lambda: Dense(1, SMALL), dense, {}),
}


@contextmanager
def job(case: str) -> Iterator[tuple[Crew, list[Step]]]:
    """The trainers of a case, and a step of each."""
    count, model, step, configs = CASES[case]
    crew = Crew(count)
    made: list[Trainer | None] = [None] * count
    with Server(ServerConfig(transport="tcp", heartbeat_timeout_seconds=NEVER)) as server:

        def join(number: int) -> None:
            torch.set_num_threads(1)
            made[number] = Trainer(server.endpoint, number, count, model(), sgd, **configs)

        crew.each([lambda number=number: join(number) for number in range(count)])
        trainers = [each for each in made if each is not None]
        try:
            yield crew, [lambda trainer=trainer: step(trainer) for trainer in trainers]
        finally:
            crew.each([each.job.finish for each in trainers])
            crew.end()


def main() -> None:
    """Prints, as JSON, by end what a step of a case costs, and threads of unknown names."""
    case = sys.argv[1]
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with costs.without_looks():
        with costs.counted() as counts, job(case) as (crew, steps):
            found = costs.step_counts(counts, crew, steps)
        with job(case) as (crew, steps):
            switches = costs.step_switches(crew, steps)
    said = {end: [*each, switches[end]] for end, each in found.items()}
    print(json.dumps({"costs": said, "unknown": sorted(counts.unknown)}))
