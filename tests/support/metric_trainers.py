"""Three trainers of one job in this process, whose samples are parts of one set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.table_trainers import Servers, Trainer
from tests.support.threads import at_once
from trainer.collective.values import TrainerValues
from trainer.job.shared_values import values_of
from transpiler import DistributedStrategy

TRAINERS = 3
SAMPLES = 400
Say = Callable[[TrainerValues], Any]
AllSay = Callable[[Say], list[Any]]


@contextmanager
def three_trainers(
    servers: Servers, strategy: DistributedStrategy | None = None
) -> Iterator[AllSay]:
    """Lets each trainer of a job say something, and gives what each one hears."""
    make = partial(Trainer, servers(2), strategy=strategy)
    trainers = at_once(*(partial(make, i, TRAINERS, nn.Linear(1, 1)) for i in range(TRAINERS)))
    values = [values_of(each.job) for each in trainers]
    yield lambda say: at_once(*(partial(say, each) for each in values))
    at_once(*(each.job.communicator.finish for each in trainers))


def samples(seed: int = 0, count: int = SAMPLES) -> dict[str, Tensor]:
    """Scores with ties, labels that go with them, weights and groups of some samples."""
    generator = torch.Generator().manual_seed(seed)
    preds = torch.rand(count, generator=generator).mul(50).round().div(50)
    labels = (torch.rand(count, generator=generator) < 0.2 + 0.6 * preds).long()
    weights = torch.rand(count, generator=generator, dtype=torch.float64) * 3
    groups = torch.randint(-5, 25, (count,), generator=generator) * 2**40
    return {"preds": preds, "labels": labels, "weights": weights, "groups": groups}


def part(rank: int, whole: Tensor) -> Tensor:
    """One trainer's samples: trainer 1 has none, the others unequal numbers."""
    first = len(whole) // 3
    return {0: whole[:first], 1: whole[:0], 2: whole[first:]}[rank]
