"""A thousand sync steps whose rows are looked up ahead: each forward reads the bits that it would
read without.

Ids that repeat in a batch, a table under two modules, rows that are evicted, and rows that outlive
their time by a clock that shows how many steps were begun.  Real servers in this process.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pserver.job import job
from pserver.lane import tables
from tests.support import jobs
from tests.support.table_trainers import Servers
from tests.support.threads import at_once
from trainer import DistributedEmbedding, Uniform, fleet
from trainer.embedding.conversion import moved
from trainer.job.job import Job
from trainer.samplers.read_ahead import ReadAhead
from transpiler import DistributedStrategy

IDS, STEPS, SIZE, PART = 80, 1000, 6, 100
START = Uniform(-1.0, 1.0)

RULES: Mapping[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.5),
    "adagrad": jobs.adagrad,
    "adam": jobs.adam,
}
TTL = {"ttl": 5.0}  # steps
LRU, LFU = {"capacity": 30}, {"capacity": 20, "eviction": "lfu"}
BOTH = {"capacity": 55, **TTL}
# how rows go, of the table under two modules and of the bags
FORGETS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "lru, ttl": (LRU, TTL),
    "lfu, both": (LFU, BOTH),
    "ttl, lru": (TTL, LRU),
    "both, lfu": (BOTH, LFU),
}


class Model(nn.Module):
    """A table under two modules, one of bags, and dense parameters.

    Attributes:
        read: what its forwards have read.
    """

    def __init__(self, forgets: str) -> None:
        super().__init__()
        shared, bags = FORGETS[forgets]
        self.users = DistributedEmbedding(4, name="users", init=START, **shared)
        self.again = DistributedEmbedding(4, name="users", init=START, **shared)
        self.bags = DistributedEmbedding(4, name="bags", pooling="sum", init=START, **bags)
        self.out = nn.Linear(12, 1)
        own = torch.Generator().manual_seed(0)  # torch's is of all trainers, which are threads
        with torch.no_grad():
            for each in self.out.parameters():
                each.uniform_(-0.3, 0.3, generator=own)
        self.read: list[Tensor] = []

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        rows = [self.users(x[:, 0]), self.again(x[:, 1]), self.bags(x[:, 2:].reshape(-1), offsets)]
        together = torch.cat(rows, 1)
        self.read.append(together.detach().clone())
        out: Tensor = self.out(together).squeeze(1)
        return out


def batches(trainer: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Ids [SIZE, 4], of which some are in most batches and some in few; where bags begin; labels.
    Half of the samples repeat ids of the other half, and one repeats its own.
    """
    generator = torch.Generator().manual_seed(100 + trainer)
    for _ in range(STEPS):
        x = (torch.rand(SIZE, 4, generator=generator) ** 4 * IDS).long()
        x[0], x[1], x[2, :] = x[3], x[4].flip(0), x[2, 0]
        yield x, torch.arange(0, 2 * SIZE, 2), torch.randn(SIZE, generator=generator)


class Clock:
    """Shows how many steps the trainers have begun: it ticks when all forwards of a step are over,
    and no trainer has sent its gradients.
    """

    def __init__(self, trainers: int) -> None:
        self.now = 1000.0
        self._met = threading.Barrier(trainers, self._tick)

    def __call__(self) -> float:
        return self.now

    def _tick(self) -> None:
        self.now += 1.0

    def meet(self) -> None:
        """Waits for all trainers."""
        self._met.wait(60.0)


class Trainer:
    """One of a job's trainers."""

    def __init__(self, endpoints: str, number: int, trainers: int, depth: int, case: Case) -> None:
        strategy = DistributedStrategy()
        strategy.a_sync = True
        strategy.a_sync_configs = {"modes": {"*": "sync"}, "look_ahead": depth}
        role = fleet.UserDefinedRoleMaker(
            number, worker_num=trainers, server_endpoints=endpoints.split(",")
        )
        self.job = Job(role, strategy)
        self.model: Any = moved(Model(case.forgets), ())
        self.job.models.append(self.model)
        self.optimizer: Any = self.job.join(RULES[case.rule](self.model.parameters()))
        data = list(batches(number))
        self._data = ReadAhead(self.job.look_ahead)(iter(data))

    def step(self, clock: Clock) -> None:
        x, offsets, y = next(self._data)
        self.optimizer.zero_grad()
        (self.model(x, offsets) - y).square().mean().backward()
        clock.meet()
        self.optimizer.step()

    def ends(self) -> Played:
        """Its rows so far, and the values and counts at the end."""
        self.optimizer.flush()
        model, every = self.model, torch.arange(IDS)
        read, model.read = model.read, []
        with torch.no_grad():
            rows = [model.users(every), model.bags(every, every)]
        assert self.job.communicator is not None
        counts = Counter[str]()
        for client in self.job.communicator.clients:
            for table in client.table_status():
                counts.update(table.counters)
        values = [*rows, *(each.detach().clone() for each in model.out.parameters())]
        return Played(read, values, self.job.metrics(), counts)


@dataclass
class Played:
    """Of one trainer.

    Attributes:
        read: by its forwards, one after the other.
        values: of rows and parameters, at the end.
        metrics: its own.
        counts: of the servers' tables.
    """

    read: list[Tensor]
    values: list[Tensor]
    metrics: dict[str, float]
    counts: Mapping[str, int]


@dataclass(frozen=True)
class Case:
    """A job of a thousand steps, ``depth`` batches ahead."""

    trainers: int
    depth: int
    rule: str
    forgets: str
    servers: int

    def __str__(self) -> str:
        forgets = self.forgets.replace(", ", "+")
        return f"{self.trainers}-{self.depth}-{self.rule}-{forgets}-{self.servers}"


def cases() -> list[Case]:
    """Sixteen, in which any value of an axis occurs with any of another: the lines of slopes 1, 2
    and 3 over the field of four elements.  (Servers are two, so each twice as often.)
    """
    twice, thrice = (0, 2, 3, 1), (0, 3, 1, 2)
    return [
        Case(
            n + 1,
            ahead + 1,
            [*RULES][n ^ ahead],
            [*FORGETS][n ^ twice[ahead]],
            (n ^ thrice[ahead]) % 2 + 1,
        )
        for n in range(4)
        for ahead in range(4)
    ]


def test_the_cases_have_all_pairs() -> None:
    """Of any two axes; the number of servers has two values, the others four."""
    found = [(c.trainers, c.depth, c.rule, c.forgets, c.servers) for c in cases()]
    for one in range(5):
        for other in range(one):
            pairs = {(each[one], each[other]) for each in found}
            assert len(pairs) == (8 if one == 4 else 16)


def play(servers: Servers, case: Case, depth: int, monkeypatch: pytest.MonkeyPatch) -> list[Played]:
    """The story of each trainer of a job."""
    clock = Clock(case.trainers)
    with monkeypatch.context() as patched:
        for room, name in ((tables, "LockedTable"), (job, "Decisions")):
            patched.setattr(room, name, partial(getattr(room, name), clock=clock))
        joined = at_once(
            *(
                partial(Trainer, servers(case.servers), number, case.trainers, depth, case)
                for number in range(case.trainers)
            )
        )

        def part(each: Trainer) -> None:
            for _ in range(PART):
                each.step(clock)

        try:
            for _ in range(STEPS // PART):
                at_once(*(partial(part, each) for each in joined))
            return at_once(*(each.ends for each in joined))
        finally:
            at_once(*(each.optimizer.close for each in joined))


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", cases(), ids=str)
def test_a_thousand_steps_read_the_same_bits(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    """On every trainer, in every forward; and rows, parameters and the tables' counts are the same
    at the end.
    """
    expected = play(servers, case, 0, monkeypatch)
    found = play(servers, case, case.depth, monkeypatch)

    for mine, theirs in zip(found, expected, strict=True):
        assert len(mine.read) == len(theirs.read) == STEPS
        for step, (one, other) in enumerate(zip(mine.read, theirs.read, strict=True), 1):
            assert same_bits(one, other), f"step {step}"
        assert all(map(same_bits, mine.values, theirs.values))
        assert all(each.isfinite().all() for each in mine.values)
        for what in ("rows", "pushes", "admitted", "evicted", "expired"):
            assert mine.counts[what] == theirs.counts[what], what
        own, ahead = mine.metrics["rows_looked_up"], mine.metrics["rows_ahead"]
        assert ahead > 0.95 * theirs.metrics["rows_looked_up"] and own < ahead / 40
        assert mine.counts["evicted"] > STEPS / 10 and mine.counts["expired"] > STEPS / 10
