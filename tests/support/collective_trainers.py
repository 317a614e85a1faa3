"""Trainers of programs without servers.

Most tests run all of them as threads of this process: process groups belong to an Executor, not to
the process.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from pserver.launcher.cluster import free_port
from tests.support.load import patiently
from trainer import Executor, ParallelExecutor
from transpiler import (
    ClipGradByGlobalNorm,
    DistributedStrategy,
    DistributeTranspiler,
    DistributeTranspilerConfig,
    capture,
    program_guard,
)
from transpiler.ir.graph import Storage
from transpiler.program import Program

DEADLINE = 60.0


GRAD: dict[str, Any] = {"mode": "collective", "collective_mode": "grad_allreduce"}


LOCAL: dict[str, Any] = {"mode": "collective", "collective_mode": "local_sgd"}


NCCL2: dict[str, Any] = {"mode": "nccl2"}


ROWS: dict[str, Any] = {
    "use_hierarchical_allreduce": True,
    "hierarchical_allreduce_inter_nranks": 2,
}


Batch = tuple[torch.Tensor, torch.Tensor]


def ports(count: int) -> list[str]:
    """Endpoints that were free a moment ago."""
    return [f"127.0.0.1:{free_port()}" for _ in range(count)]


def together(count: int, act: Callable[[int], Any]) -> list[Any]:
    """What each of so many trainers gives, or the exception that it ends in."""
    with ThreadPoolExecutor(count) as pool:
        running: list[Future[Any]] = [pool.submit(act, rank) for rank in range(count)]
        patiently(lambda left: not wait(running, left).not_done, DEADLINE)
        return [each.exception(0) or each.result() for each in running]


def fine(results: list[Any]) -> list[Any]:
    """The results, none of which is an exception."""
    for each in results:
        if isinstance(each, BaseException):
            raise each
    return results


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def batches(trainers: int, steps: int = 5) -> list[list[Batch]]:
    """By step and trainer."""
    generator = torch.Generator().manual_seed(1)
    return [
        [
            (torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator))
            for _ in range(trainers)
        ]
        for _ in range(steps)
    ]


@cache
def captured(lr: float, clip: bool) -> tuple[Program, Program]:
    """The programs of such a trainer, captured once; each one binds them to its own model."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    with program_guard(Program(()), Program(())):
        return capture(
            model,
            step,
            optimizer,
            batches(1)[0][0],
            grad_clip=ClipGradByGlobalNorm(0.1) if clip else None,
        )


class Trainer:
    """One trainer's model, optimizer, schedule and programs; with no endpoints, the single
    node's.
    """

    def __init__(
        self,
        endpoints: list[str],
        rank: int,
        settings: dict[str, Any],
        lr: float = 0.1,
        clip: bool = False,
        strategy: DistributedStrategy | None = None,
    ) -> None:
        self.model = net()
        if rank:  # trainer 0's values count
            for parameter in self.model.parameters():
                parameter.data.add_(1.0)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        storage = Storage(dict(self.model.named_parameters()), self.optimizer)
        self.main, self.startup = (
            replace(program, storage=storage) for program in captured(lr, clip)
        )
        if endpoints:
            transpiler = DistributeTranspiler(DistributeTranspilerConfig(**settings))
            own = endpoints[rank]
            transpiler.transpile(
                rank,
                self.main,
                trainers=",".join(endpoints),
                startup_program=self.startup,
                current_endpoint=own,
                strategy=strategy,
            )
            self.main, self.startup = (
                transpiler.get_trainer_program(),
                transpiler.get_startup_program(),
            )

    def train(self, data: list[Batch], place: tuple[int, int] | None = None) -> list[torch.Tensor]:
        """Runs the programs over the batches: with ParallelExecutor if given its numbers.

        Gives the parameters.
        """
        with Executor() as executor:
            executor.run(self.startup)
            if place is None:
                for batch in data:
                    executor.run(self.main, feed=batch)
                    self.schedule.step()
            else:
                with ParallelExecutor(False, "loss", self.main, *place) as parallel:
                    for batch in data:
                        parallel.run(feed=batch)
                        self.schedule.step()
            return [parameter.detach().clone() for parameter in self.model.parameters()]


def joined(data: list[list[Batch]]) -> list[Batch]:
    """Every step's batches as one."""
    return [(torch.cat([x for x, _ in row]), torch.cat([y for _, y in row])) for row in data]
