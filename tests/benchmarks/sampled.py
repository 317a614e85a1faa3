"""Rows: a softmax over sampled classes, of a hundred times as many classes."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from harness import Contender, Promise, Row, alternate
from harness import timed as timing
from processes import server
from torch import nn

from trainer import row_optimizers
from trainer.embedding.conversion import moved
from trainer.environment.environment import UserDefinedRoleMaker
from trainer.job.job import Job
from trainer.nn import SampledSoftmax

SIZE, BATCH, SAMPLES, FEW, MANY = 64, 256, 1000, 10**4, 10**6
SETTING = (
    "1 trainer, 1 server, sync, tcp; batches of 256, 1000 log-uniform samples, rows of 65 float32"
)
TIME = Promise(
    "sampled softmax/time of a step, 1 M classes", "10 k classes", 1.2, most=True, setting=SETTING
)
BYTES = Promise(
    "sampled softmax/bytes of a step, 1 M classes",
    "10 k classes",
    1.2,
    "bytes",
    True,
    setting=SETTING,
)
PROMISES = (TIME, BYTES)


class Training:
    """A job that trains an output layer of so many classes, on labels that are log-uniform."""

    def __init__(self, endpoint: str, classes: int) -> None:
        role = UserDefinedRoleMaker(0, worker_num=1, server_endpoints=[endpoint])
        self.job = Job(role, None)
        layer = SampledSoftmax(
            classes, SIZE, SAMPLES, name="classes", optimizer=row_optimizers.Adagrad(lr=0.1)
        )
        self.model = moved(nn.ModuleDict({"output": layer}), ())
        self.job.models.append(self.model)
        dense = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.optimizer = self.job.join(dense)
        self.features = torch.randn(BATCH, SIZE)
        self.labels = torch.randint(min(classes, FEW), (64, BATCH))
        if classes > FEW:
            self.labels = self.labels * (classes // FEW)
        self.steps = 0

    def step(self) -> None:
        """One step of training."""
        self.optimizer.zero_grad()
        label = self.labels[self.steps % len(self.labels)]
        self.model["output"](self.features, label).mean().backward()
        self.optimizer.step()
        self.steps += 1

    def bytes(self) -> float:
        """Of a step, in both directions, on average over the steps so far."""
        assert self.job.communicator is not None
        (counted,) = self.job.communicator.variable_bytes().values()
        return (counted["bytes_in"] + counted["bytes_out"]) / self.steps


def measure(wanted: Collection[Promise], runs: int, tiny: bool) -> Iterator[Row]:
    """The rows of this file that are wanted."""
    if not set(PROMISES) & set(wanted):
        return
    torch.set_num_threads(1)
    torch.manual_seed(0)
    few, many = (FEW // 5, MANY // 100) if tiny else (FEW, MANY)
    with server("tcp") as (_, first), server("tcp") as (_, second):
        trainings = {"few": Training(first, few), "many": Training(second, many)}
        contenders: dict[str, Contender] = {
            name: timing(training.step) for name, training in trainings.items()
        }
        medians = alternate(contenders, runs)
        sizes = {name: training.bytes() for name, training in trainings.items()}
        for training in trainings.values():
            training.job.finish()
    if TIME in wanted:
        yield Row(TIME, medians["many"], medians["few"], runs)
    if BYTES in wanted:
        yield Row(BYTES, sizes["many"], sizes["few"], runs)
