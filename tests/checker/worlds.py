"""The world of one trial in which trainers and links come and go: all of it drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from tests.checker.scenario import TRANSPORTS
from tests.support.every_mode import with_every_mode
from transpiler.ir.rules import Clip, Hparam, Rule
from transpiler.ir.tables import (
    Constant,
    CountFilterEntry,
    ProbabilityEntry,
    Segment,
    ShowClickEntry,
    Table,
    Uniform,
)
from transpiler.plan.plan import Placement, Plan
from transpiler.plan.planner import plan_parameters
from transpiler.strategy.from_strategy import lanes_of
from transpiler.strategy.strategy import DistributedStrategy

OUTER = {"type": "nesterov", "lr": 0.7, "momentum": 0.9}
# by mode: its settings, of which tuples are drawn from; None: sync
MODES: Mapping[str, Mapping[str, Any] | None] = with_every_mode(
    {
        "sync": None,
        "async": {"send_queue_size": 1},
        "async, queue": {"send_queue_size": (2, 4), "max_merge_var_num": (1, 2, 4)},
        "half_async": {"half_async": True, "max_merge_var_num": (1, 2, 4)},
        "staleness": {"send_queue_size": 1, "staleness": (1, 2, 3)},
        "geo": {"k_steps": (1, 2, 4), "row_invalidation": (True, False)},
        "diloco": {"k_steps": (1, 2), "outer_optimizer": OUTER},
        "lanes": {"modes": {"a*": "async", "g*": "geo", "*": "half_async"}, "k_steps": (1, 2)},
    },
    dict,
)
TOGETHER = ("sync", "staleness", "diloco")  # one trainer's steps wait for another's
_SGD: dict[str, Hparam] = {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}
_ADAM: dict[str, Hparam] = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8}
DENSE_RULES = {
    "sgd": Rule("sgd", _SGD),
    "momentum": Rule("sgd", _SGD | {"momentum": 0.9, "weight_decay": 0.01}),
    "adam": Rule("adam", _ADAM | {"weight_decay": 0.0}),
}
ROW_RULES = {
    "sgd": Rule("sgd", {"lr": 0.1, "weight_decay": 0.0}),
    "momentum": Rule("momentum", _SGD | {"momentum": 0.9}),
    "adam": Rule("adam", _ADAM | {"weight_decay": 0.0}),
    "lazy_adam": Rule("lazy_adam", _ADAM),
}
CLIPS = {
    "value": Clip("value", 0.5, -0.5),
    "norm": Clip("norm", 1.0),
    "global_norm": Clip("global_norm", 1.5),
}
DIM = 2
FEW, MANY = 40, 60_000  # ids
LARGE_ROWS = 16_500  # of a server: above what eviction searches whole
SHOWN = ShowClickEntry("show", "click", 0.2, delete_threshold=0.3, decay=0.9)
# by kind: the settings of a table
TABLES: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "short-lived": {"ttl": 0.05},
    "counted": {"entry": CountFilterEntry(2)},
    "by chance": {"entry": ProbabilityEntry(0.5)},
    "shown": {"entry": SHOWN},
    "capped": {"capacity": 12},
    "capped, lfu": {"capacity": 12, "eviction": "lfu"},
    "large": {"capacity": LARGE_ROWS, "eviction": "lru"},
}
# what befalls a trainer, or a link, before one of its steps
LOSSES = ("dies", "zombie")
EVENTS = (
    *(*LOSSES, "leaves", "partition", "link", "unlinked"),
    *("server_lost", "shrink", "saves", "restores", "late"),
)


@dataclass(frozen=True, slots=True)
class Event:
    """What befalls a trial, once.

    Attributes:
        kind: one of ``EVENTS``.
        trainer: which one is concerned, or does it.
        step: before which of the steps of its number, from 1.
        server: which one is told, or cut off, or lost.
        commits: so many servers have the commit of one that dies in its step.
        again: another process of its number joins.
        first: a zombie goes on before the other process has joined, rather than afterwards; a
            server that is lost dies at once, rather than when it has staged its next step, or as
            server 0 written its next record; a trainer that dies with all commits has not heard of
            its step.
        seconds: for how long something is cut off, or not there.
    """

    kind: str
    trainer: int
    step: int
    server: int = 0
    commits: int = 0
    again: bool = False
    first: bool = True
    seconds: float = 0.0

    def __str__(self) -> str:
        more = {
            "dies": f" with the commit on {self.commits} servers",
            "zombie": f", server {self.server} is told",
            "partition": f" from server {self.server} for {self.seconds} s",
            "link": f" of server {self.server} for {self.seconds} s",
            "unlinked": f": server {self.server} has lost server 0",
            "server_lost": f": server {self.server} is away for {self.seconds} s"
            f"{'' if self.first else ', from its next record or step on'}",
        }.get(self.kind, "")
        return f"{self.kind} {self.trainer} at {self.step}{more}{' +1' if self.again else ''}"


@dataclass(frozen=True)
class World:
    """The settings of one trial.

    Attributes:
        samples, batch, passes: of the data, which leases deal out.
        rule, row_rule: keys of ``DENSE_RULES`` and ``ROW_RULES``.
        clip: a key of ``CLIPS``; "": none.
        tables: keys of ``TABLES``.
        rate: the part of the frames that have a fault.
        call_rate: the part of the control calls.
        leases: samples are dealt out; otherwise each trainer takes as many steps.
        every: seconds between two saves that the job makes by itself; 0: it makes none.
        slow: servers take a while for some updates: what comes between a record and the end of its
            update has more time to.
        events: what befalls it.
    """

    seed: int
    mode: str
    transport: str
    servers: int
    trainers: int
    samples: int
    batch: int
    passes: int
    rule: str
    row_rule: str
    clip: str
    tables: tuple[str, ...]
    rate: float
    call_rate: float
    leases: bool = True
    every: float = 0.0
    slow: bool = False
    events: tuple[Event, ...] = field(default_factory=tuple)

    def __str__(self) -> str:
        return (
            f"world {self.seed}: {self.mode} {self.configs or ''} over {self.transport}, "
            f"{self.servers} servers, {self.trainers} trainers, {self.passes} x {self.samples} "
            f"samples by {self.batch}{'' if self.leases else ', no leases'}"
            f"{f', a save every {self.every} s' if self.every else ''}"
            f"{', slow updates' if self.slow else ''}, {self.rule}, clip "
            f"{self.clip or 'none'}, tables {', '.join(self.tables) or 'none'} ({self.row_rule}), "
            f"faults in {self.rate:.0%} of "
            f"the frames and {self.call_rate:.0%} of the calls; "
            f"{'; '.join(map(str, self.events)) or 'no events'}"
        )

    @cached_property
    def configs(self) -> dict[str, Any] | None:
        """``a_sync_configs``, with the settings drawn; None for sync."""
        settings = MODES[self.mode]
        if settings is None:
            return None
        draw = random.Random(f"{self.seed} world configs")
        return {
            key: draw.choice(value) if isinstance(value, tuple) else value
            for key, value in settings.items()
        }

    @property
    def late(self) -> list[int]:
        """The trainers that join later."""
        return [event.trainer for event in self.events if event.kind == "late"]

    @property
    def target(self) -> int:
        """The last message of each trainer, where samples are not dealt out."""
        return max(2, self.passes * self.samples // self.batch // self.trainers)

    @property
    def saves(self) -> bool:
        """Whether servers save what they hold."""
        return any(event.kind == "saves" for event in self.events)

    @property
    def awaits(self) -> bool:
        """Whether servers wait for one that is lost."""
        return any(event.kind in ("unlinked", "server_lost") for event in self.events)

    @property
    def loses_servers(self) -> bool:
        """Whether a server is lost, and comes back."""
        return any(event.kind == "server_lost" for event in self.events)

    @property
    def features(self) -> list[str]:
        """What of rules, tables and data a table of many trials counts."""
        rules = [self.rule] + ([f"rows {self.row_rule}"] if self.tables else [])
        clip = [f"clip {self.clip}"] if self.clip else []
        tables = [f"table {kind}" for kind in self.tables]
        leases, saves = ["leases"] * self.leases, ["automatic saves"] * bool(self.every)
        return [*rules, *clip, *tables, *leases, *saves, *["slow updates"] * self.slow]

    @property
    def loses(self) -> bool:
        """Whether samples may have been given to scripts that end, or be too few
        at an epoch's end for each of the trainers that step together to have one.
        """
        kinds = (*LOSSES, "leaves", *(["late"] if self.mode in TOGETHER else []))
        return any(event.kind in kinds for event in self.events)

    @property
    def windows(self) -> bool:
        """Whether a script may have taken samples that are in no step yet when it asks for more."""
        return any(lane.k_steps > 1 or lane.kind.collects for lane in self.plan.lanes)

    @cached_property
    def plan(self) -> Plan:
        """A vector and a matrix, which all servers have slices of, and the tables."""
        strategy = None
        if self.configs is not None:
            strategy = DistributedStrategy()
            strategy.a_sync, strategy.a_sync_configs = True, self.configs
        return plan_parameters(
            [
                ("a", (2 * self.servers, 3), "float32", 0),
                ("g", (5 * self.servers,), "float32", 0),
                ("h", (7,), "float32", 0),
            ],
            [DENSE_RULES[self.rule], *([ROW_RULES[self.row_rule]] if self.tables else [])],
            lanes=lanes_of(strategy),
            trainers=self.trainers,
            servers=self.servers,
            min_block_size=4,
            clip=CLIPS[self.clip] if self.clip else None,
            tables=[self._table(index, kind) for index, kind in enumerate(self.tables)],
        )

    def _table(self, index: int, kind: str) -> Table:
        settings = dict(TABLES[kind])
        if kind == "large":
            settings["capacity"] *= self.servers
        segments = (Segment(0, DIM, 1),)
        name = f"{'agh'[index % 3]}.t{index}"
        drawn = random.Random(f"{self.seed} initial {index}").random()
        initial = Constant(0.5) if drawn < 0.5 else Uniform(-1.0, 1.0)
        return Table(name, DIM, segments, initial=initial, seed=index, **settings)

    def kind(self, table: str) -> str:
        """Which kind a table is of."""
        return self.tables[int(table.rpartition("t")[2])]

    def initial(self, placement: Placement) -> torch.Tensor:
        """What a parameter begins with."""
        draw = torch.Generator().manual_seed(self.seed)
        return torch.randn(placement.shape, generator=draw)

    def hparams(self, step: int) -> dict[int, dict[str, Hparam]]:
        """Of a step: by group; the rate of learning changes."""
        found: dict[int, dict[str, Hparam]] = {}
        for group, rule in enumerate(self.plan.groups):
            rate = rule.hparams["lr"]
            assert isinstance(rate, float), "one number"
            found[group] = {**rule.hparams, "lr": rate / (1 + step % 3)}
        return found

    def smaller(self) -> list[World]:
        """Simpler trials, the simplest first, to look for the smallest one that fails."""
        simpler = [
            replace(self, rate=0.0, call_rate=0.0),
            replace(self, rate=0.0),
            replace(self, tables=()),
            replace(self, passes=1),
            replace(self, every=0.0),
            replace(self, slow=False),
            *(
                replace(self, events=tuple(e for e in self.events if e is not each))
                for each in self.events
            ),
            *(replace(self, tables=(kind,)) for kind in self.tables),
        ]
        return [world for world in simpler if world != self]


def world_of(seed: int, mode: str | None = None, transport: str | None = None) -> World:
    """The trial of a seed.  32 seeds in a row have every mode over every transport."""
    draw = random.Random(f"{seed} world")
    modes = list(MODES)
    servers, trainers = draw.choice((1, 2, 2, 3)), draw.choice((2, 2, 3))
    mode = mode or modes[seed % len(modes)]
    kinds = draw.sample(list(TABLES)[:-1], draw.choice((0, 1, 1, 2)))
    if draw.random() < 0.04:
        kinds = ["large"]
    shown = World(
        seed=seed,
        mode=mode,
        transport=transport or TRANSPORTS[(seed // len(modes) + seed) % len(TRANSPORTS)],
        servers=servers,
        trainers=trainers,
        samples=draw.choice((8, 13, 24)),
        batch=draw.choice((1, 1, 2)),
        passes=draw.choice((1, 1, 2)),
        rule=draw.choice(list(DENSE_RULES)),
        row_rule=draw.choice(list(ROW_RULES)),
        clip=draw.choice(("", *CLIPS)) if mode == "sync" else "",
        tables=tuple(kinds),
        rate=draw.choice((0.0, 0.0, 0.02, 0.05)),
        call_rate=draw.choice((0.0, 0.0, 0.1)),
        leases=mode not in TOGETHER or draw.random() < 0.5,
    )
    events = (*_events(draw, shown), *_unlinked(shown), *_servers_lost(shown))
    slow = random.Random(f"{seed} slow updates").random() < 0.4
    return replace(shown, every=_every(shown), slow=slow, events=events)


def _every(world: World) -> float:
    """Seconds between automatic saves of a job that deals samples out; 0: there are none."""
    draw = random.Random(f"{world.seed} automatic saves")
    return draw.choice((0.0, 0.0, 0.005, 0.02)) if world.leases else 0.0


def _events(draw: random.Random, world: World) -> tuple[Event, ...]:
    """One or two losses and more; one trainer stays from the beginning to the end."""
    steady = draw.randrange(world.trainers)
    others = [trainer for trainer in range(world.trainers) if trainer != steady]
    # what a call removes and a save are not ordered by the log
    kinds = ["leaves", "partition", draw.choice(("shrink", "saves"))]
    kinds += ["link"] if world.servers > 1 else []
    kinds += [*LOSSES, *LOSSES, "dies"]
    kinds += ["late"]
    found: list[Event] = []
    for _ in range(draw.choice((1, 2, 2, 3))):
        kind = draw.choice(kinds)
        who = draw.choice(others) if kind in (*LOSSES, "leaves", "late") else steady
        first = kind == "zombie" or any(e.kind == "late" for e in found)
        if kind == "late" and (not who or first or any(e.trainer == who for e in found)):
            continue
        steps = max(2, world.samples // world.batch // world.trainers)
        found.append(
            Event(
                kind,
                who,
                draw.randint(1, steps),
                server=draw.randrange(1, world.servers) if kind == "link" else _any(draw, world),
                commits=draw.randint(0, world.servers),
                again=draw.random() < 0.6,
                first=draw.random() < 0.5,
                seconds=draw.choice((0.02, 0.05, 0.15)),
            )
        )
    return tuple(found)


def _unlinked(world: World) -> Iterator[Event]:
    """A server loses server 0 for an instant, where their job outlives that."""
    draw = random.Random(f"{world.seed} unlinked")
    if world.servers > 1 and world.plan.outlives_servers and draw.random() < 0.4:
        steps = max(2, world.samples // world.batch // world.trainers)
        who, server = draw.randrange(world.trainers), draw.randrange(1, world.servers)
        yield Event("unlinked", who, draw.randint(1, steps), server)


def _servers_lost(world: World) -> Iterator[Event]:
    """A server that has saved dies, and comes back, once or twice, where the job outlives that."""
    draw = random.Random(f"{world.seed} servers lost")
    if not world.plan.outlives_servers or draw.random() > 0.4:
        return
    steps = max(2, world.samples // world.batch // world.trainers)
    server, at = _any(draw, world), 1
    for loss in range(draw.choice((1, 1, 1, 2))):
        who = draw.randrange(world.trainers)
        at = draw.randint(at, steps)
        if not loss or draw.random() < 0.5:
            yield Event("saves", who, at)
        at = draw.randint(at, steps)
        first, seconds = draw.random() < 0.5, draw.choice((0.02, 0.05, 0.15))
        yield Event("server_lost", who, at, server, first=first, seconds=seconds)
        server = draw.choice((server, _any(draw, world)))


def _any(draw: random.Random, world: World) -> int:
    return draw.randrange(world.servers)
