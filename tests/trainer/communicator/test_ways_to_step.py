"""Rows that are looked up ahead of steps of every kind: the forwards read the same bits as without,
and everything ends as without.

Real servers in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.table_trainers import Servers
from tests.support.threads import at_once
from tests.support.tiers import RARE
from trainer import (
    CountFilterEntry,
    DistributedEmbedding,
    ShowClickEntry,
    Uniform,
    fleet,
    row_optimizers,
)
from trainer.embedding.conversion import moved
from trainer.job.job import Job, begin, end
from transpiler import DistributedStrategy
from transpiler.clip import ClipGradByGlobalNorm

IDS, STEPS, SIZE = 25, 16, 6
START = Uniform(-1.0, 1.0)

Batch = tuple[Tensor, Tensor]  # ids, int64 [b, 7], and where the bags of the last four begin


class Model(nn.Module):
    """A table under two modules, one of bags, and dense parameters.

    Attributes:
        read: what its forwards have read.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.users = DistributedEmbedding(4, name="users", padding_idx=0, init=START)
        self.again = DistributedEmbedding(4, name="users", padding_idx=0, init=START)
        options = {"init": START, "num_embeddings": IDS, **options}
        self.bags = DistributedEmbedding(3, pooling="sum", **options)
        self.w, self.v = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(3))
        self.read: list[Tensor] = []
        counts = isinstance(options.get("entry"), ShowClickEntry)
        self.counted = {"show": torch.ones(()), "click": torch.zeros(())} if counts else {}

    def lookups(self, x: Tensor) -> list[tuple[DistributedEmbedding, Tensor]]:
        """The tables' parts of ids."""
        return [(self.users, x[:, :2]), (self.again, x[:, 2:3]), (self.bags, x[:, 3:])]

    def forward(self, x: Tensor, offsets: Tensor, bags: bool = True) -> Tensor:
        rows = [self.users(x[:, :2]).sum(1), self.again(x[:, 2:3]).sum(1)]
        out: Tensor = ((rows[0] + rows[1]) * self.w).sum(1)
        if bags:
            rows.append(self.bags(x[:, 3:].reshape(-1), offsets, **self.counted))
            out = out + (rows[2] * self.v).sum(1)
        self.read += [each.detach().reshape(-1).clone() for each in rows]
        return out


def batches(trainer: int) -> list[Batch]:
    """With ids that repeat, the padding's among them."""
    generator = torch.Generator().manual_seed(100 + trainer)
    found = []
    for _ in range(STEPS):
        x = torch.randint(0, IDS, (SIZE, 7), generator=generator)
        x[0] = x[1]
        found.append((x, torch.arange(0, 4 * SIZE, 4)))
    return found


@dataclass(frozen=True)
class Way:
    """How a script steps.

    Attributes:
        rule: of the first optimizer.
        configs, strategy: settings.
        options: of the table of bags.
        clip: the gradient's, on servers.
        second: an optimizer of a dense parameter, beside the first.
        turns: they step in turns.
        without: steps that do not look up bags.
        idle: steps without a forward, and so without gradients.
        nothing: steps of no samples.
        raises: steps whose forward fails; the script goes on with the next batch.
        scaled: by a GradScaler, with overflows on trainer 0.
        broken: steps with a gradient that is not finite, on the last trainer.
        between: called after each step.
    """

    rule: Callable[..., torch.optim.Optimizer] = torch.optim.Adagrad
    configs: Mapping[str, Any] = field(default_factory=dict)
    strategy: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    clip: Any = None
    second: bool = False
    turns: bool = False
    without: tuple[int, ...] = ()
    idle: tuple[int, ...] = ()
    nothing: tuple[int, ...] = ()
    raises: tuple[int, ...] = ()
    scaled: bool = False
    broken: tuple[int, ...] = ()
    between: Callable[[Trainer, int], None] = lambda trainer, step: None


class Trainer:
    """One of a job's trainers."""

    def __init__(self, endpoints: str, number: int, trainers: int, depth: int, way: Way) -> None:
        strategy = DistributedStrategy()
        strategy.a_sync = True
        strategy.a_sync_configs = {"modes": {"*": "sync"}, "look_ahead": depth, **way.configs}  # type: ignore[typeddict-item]
        for name, value in way.strategy.items():
            setattr(strategy, name, value)
        role = fleet.UserDefinedRoleMaker(
            number, worker_num=trainers, server_endpoints=endpoints.split(",")
        )
        self.job, self.way, self.depth = Job(role, strategy), way, depth
        self.number, self.last = number, number == trainers - 1
        self.model: Any = moved(Model(**way.options), ())
        self.job.models.append(self.model)
        model: Any = self.model
        mine = [each for each in model.parameters() if not (way.second and each is model.v)]
        self.optimizers: list[Any] = [self.job.join(way.rule(mine, lr=0.01), grad_clip=way.clip)]
        if way.second:
            self.optimizers.append(self.job.join(torch.optim.Adam([model.v], lr=0.01)))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
        self.data = batches(number)
        self.said = 1  # batches that were announced, or need not be

    def play(self) -> list[Tensor]:
        """All steps; what was read, and what there is in the end."""
        for step in range(STEPS):
            self._announce(step)
            self._step(step)
            self.way.between(self, step)
        for each in self.optimizers:
            each.flush()
        model, every = self.model, torch.arange(IDS)
        read, model.read = model.read, []
        with torch.no_grad():
            rows = [model.users(every), model.bags(every, every, **model.counted)]
        values = [*rows, model.w.detach(), model.v.detach()]
        return [*read, *(each.reshape(-1).clone() for each in values)]

    def _announce(self, step: int) -> None:
        look_ahead = self.job.look_ahead()
        while look_ahead is not None and self.said <= step + self.depth < STEPS:
            look_ahead.announce(self.model.lookups(self.data[self.said][0]))
            self.said += 1

    def _step(self, step: int) -> None:
        way, (x, offsets) = self.way, self.data[step]
        chosen = [self.optimizers[step % 2]] if way.turns else self.optimizers
        for each in chosen:
            each.zero_grad()
        if step in way.raises:
            self.model(x, offsets)
            return
        if step in way.nothing:
            x, offsets = x[:0], offsets[:0]
        if step not in way.idle:
            loss = self.model(x, offsets, step not in way.without).square().sum()
            if way.scaled:
                bad = step in (5, 6, 11) and self.number == 0
                loss = self.scaler.scale(loss * (float("inf") if bad else 1.0))
            loss.backward()
        if step in way.broken and self.last:
            self.model.w.grad.fill_(float("nan"))
        for each in chosen:
            (self.scaler.step if way.scaled else type(each).step)(each)
        if way.scaled:
            self.scaler.update()


def flushes(trainer: Trainer, step: int) -> None:
    if step in (3, 4, 10):
        trainer.optimizers[0].flush()


def evaluates(trainer: Trainer, step: int) -> None:
    """With a batch that is announced."""
    if step % 4 == 1:
        with torch.no_grad():
            trainer.model(*trainer.data[(step + 2) % STEPS])


def shrinks(trainer: Trainer, step: int) -> None:
    """As the only trainer; rows go."""
    if step in (5, 10):
        begin(trainer.job)
        try:
            assert fleet.shrink(threshold=0.5)["bags"]  # after decay, rows that came once or twice
        finally:
            end()


def schedules(trainer: Trainer, step: int) -> None:
    for group in trainer.optimizers[0].param_groups:
        group["lr"] *= 0.9


TURNS = Way(second=True, turns=True)
OWN = {"optimizer": row_optimizers.Adam(lr=0.01)}
WAYS = {
    "sgd": Way(rule=torch.optim.SGD, between=schedules),
    "momentum": Way(rule=lambda mine, lr: torch.optim.SGD(mine, lr / 10, momentum=0.9)),
    "two optimizers": Way(second=True),
    "in turns": TURNS,
    "in turns, with evaluations": Way(second=True, turns=True, between=evaluates, options=OWN),
    "overlap": Way(configs={"overlap": True}),
    "merged": Way(strategy={"gradient_merge": True, "gradient_merge_configs": {"k_steps": 3}}),
    "clipped": Way(clip=ClipGradByGlobalNorm(0.5)),
    "overflows": Way(scaled=True),
    "refused": Way(broken=(4, 9), configs={"nonfinite": "refuse"}),
    "a table without gradient": Way(without=(3, 4, 9, 10, 11)),
    "no gradients": Way(idle=(3, 8, 9)),
    "no samples": Way(nothing=(3, 8, 9)),
    "a failing forward": Way(raises=(4, 9)),
    "flushes": Way(between=flushes),
    "evaluations": Way(between=evaluates),
    "bfloat16": Way(options={"dtype": torch.bfloat16}),
    "ttl": Way(options={"ttl": 3600.0}),
    "capacity": Way(options={"capacity": 12}),
    "lfu": Way(options={"capacity": 12, "eviction": "lfu"}),
    "entry": Way(options={"entry": CountFilterEntry(2)}),
    "memory": Way(options={"memory_bytes": 2000}),
}
OFTEN = ("in turns, with evaluations", "merged", "clipped", "overflows", "no gradients", "lfu")


@pytest.fixture
def played(servers: Servers) -> Iterator[Callable[[int, int, Way], list[list[Tensor]]]]:
    """``played(trainers, depth, way)``: a job; what :meth:`Trainer.play` of each gives."""

    def play(trainers: int, depth: int, way: Way) -> list[list[Tensor]]:
        endpoints = servers(2)
        joined = at_once(
            *(lambda n=n: Trainer(endpoints, n, trainers, depth, way) for n in range(trainers))
        )
        try:
            found = at_once(*(each.play for each in joined))
            if depth:
                assert all(each.job.metrics()["rows_ahead"] > 0 for each in joined)
            return found
        finally:
            at_once(*(lambda own=own: [o.close() for o in own.optimizers] for own in joined))

    yield play
    fleet.finish()


def assert_same(found: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    """Of each trainer, to the bit."""
    for mine, theirs in zip(found, expected, strict=True):
        for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), number


@pytest.mark.parametrize("way", [way if way in OFTEN else RARE(way) for way in WAYS])
def test_every_way_to_step_reads_the_same_bits(
    played: Callable[[int, int, Way], list[list[Tensor]]], way: str
) -> None:
    """Two trainers, two batches ahead."""
    assert_same(played(2, 2, WAYS[way]), played(2, 0, WAYS[way]))


@pytest.mark.parametrize("depth", [1, 4])
def test_rows_that_a_shrink_drops_are_read_as_new(
    played: Callable[[int, int, Way], list[list[Tensor]]], depth: int
) -> None:
    """Between a lookup ahead and its step."""
    entry = ShowClickEntry("show", "click", 0.01, delete_threshold=0.5, decay=0.5)
    way = Way(between=shrinks, options={"entry": entry})
    assert_same(played(1, depth, way), played(1, 0, way))
