"""A trial's scenario: mode, transport, steps and faults, all drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tests.support.every_mode import with_every_mode
from transpiler.distribute import plan_parameters
from transpiler.ir.rules import Clip, Rule
from transpiler.ir.tables import Constant, Segment, Table
from transpiler.plan.plan import Plan
from transpiler.strategy.from_strategy import lanes_of
from transpiler.strategy.strategy import DistributedStrategy

TRANSPORTS = ("inprocess", "grpc", "tcp", "shm")
RULE = Rule("sgd", {"lr": 1.0, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0})
UNCLIPPED = Clip("global_norm", 2.0**40)  # the norms travel, and the coefficient is 1
COPIES = 2  # of each trainer's counter in a slice, or in a row: half of an update is seen
# of rows: few, so that trainers use the same ones
IDS = (0, 1, 2, 3, 17, -1, -5, 2**40 + 3, 2**63 - 1, -(2**63))

# The settings of each mode; values are drawn from the tuples.
MODES: Mapping[str, Mapping[str, Any] | None] = with_every_mode(
    {
        "sync": None,
        "sync, clipped": None,
        "sync, look-ahead": {"modes": {"*": "sync"}, "look_ahead": (1, 2, 4)},
        "async": {"send_queue_size": 1, "look_ahead": (0, 1, 2)},
        "async, queue": {
            "send_queue_size": (2, 4),
            "max_merge_var_num": (1, 2, 4),
            "send_wait_times": (0, 2),
            "thread_pool_size": (1, 2),
            "look_ahead": (0, 4),
        },
        "async, receiver": {
            "send_queue_size": (2, 4),
            "independent_recv_thread": True,
            "min_send_grad_num_before_recv": (1, 2),
        },
        "half_async": {
            "half_async": True,
            "max_merge_var_num": (1, 2, 4),
            "look_ahead": (0, 1),
        },
        "staleness": {"staleness": (1, 2, 3), "look_ahead": (0, 1, 3)},
        "geo": {"k_steps": (2, 4), "row_invalidation": (True, False)},
        "diloco": {"k_steps": (1, 2, 4), "outer_optimizer": {"type": "sgd", "lr": 1.0}},
        "mixed": {
            "modes": {"async.*": "async", "geo.*": "geo", "*": "sync"},
            "send_queue_size": (1, 3),
            "k_steps": (2, 4),
            "look_ahead": (0, 2),
        },
    },
    dict,
)


@dataclass(frozen=True)
class Scenario:
    """The settings of one trial; the rest is drawn from its seed.

    Attributes:
        mode: a key of ``MODES``.
        transport: how tensors travel.
        steps: that each trainer takes; a multiple of 4.
        rate: the part of the frames that have a fault.
        tables: whether there are sparse tables beside the parameters, in the modes that tables
            have.
    """

    seed: int
    mode: str
    transport: str
    servers: int
    trainers: int
    steps: int
    rate: float
    tables: bool = True

    def __str__(self) -> str:
        configs = "" if self.configs is None else f" {self.configs}"
        return (
            f"seed {self.seed}: {self.mode}{configs} over {self.transport}, "
            f"{self.servers} servers, {self.trainers} trainers, {self.steps} steps, "
            f"{'no ' if not self.table_names else ''}tables, faults in {self.rate:.0%} of the "
            "frames"
        )

    @cached_property
    def configs(self) -> dict[str, Any] | None:
        """``a_sync_configs``, with the settings drawn; None for sync."""
        settings = MODES[self.mode]
        if settings is None:
            return None
        draw = random.Random(f"{self.seed} configs")
        return {
            key: draw.choice(value) if isinstance(value, tuple) else value
            for key, value in settings.items()
        }

    @property
    def table_names(self) -> tuple[str, ...]:
        """One, or one in each lane."""
        if not self.tables or "outer_optimizer" in (self.configs or {}):
            return ()
        return ("async.t", "geo.t", "sync.t") if self.mode == "mixed" else ("t",)

    @cached_property
    def plan(self) -> Plan:
        """Two or three parameters, each of as many slices as there are servers; and the tables."""
        names = ("async.a", "geo.b", "sync.c") if self.mode == "mixed" else ("a", "b")
        length = COPIES * self.trainers * self.servers
        strategy = None
        if self.configs is not None:
            strategy = DistributedStrategy()
            strategy.a_sync, strategy.a_sync_configs = True, self.configs
        return plan_parameters(
            [(name, (length,), "float32", 0) for name in names],
            [RULE],
            lanes=lanes_of(strategy),
            trainers=self.trainers,
            servers=self.servers,
            min_block_size=COPIES * self.trainers,
            clip=UNCLIPPED if self.mode == "sync, clipped" else None,
            tables=[
                Table(name, width, (Segment(0, width, 0),), initial=Constant(0.0))
                for name in self.table_names
                for width in [COPIES * self.trainers]
            ],
        )

    @cached_property
    def changes(self) -> list[list[int]]:
        """By trainer, step by step: what it adds to its counters.

        Multiples that means over steps and trainers keep whole.
        """
        draw = random.Random(f"{self.seed} changes")
        return [
            [4 * self.trainers * draw.randint(1, 3) for _ in range(self.steps)]
            for _ in range(self.trainers)
        ]

    @cached_property
    def overflows(self) -> frozenset[tuple[int, int]]:
        """(trainer, step) with an overflow: no trainer takes this step.  Only in sync."""
        draw = random.Random(f"{self.seed} overflows")
        pairs = [
            (trainer, step) for trainer in range(self.trainers) for step in range(1, self.steps + 1)
        ]
        return frozenset(pair for pair in pairs if self.configs is None and draw.random() < 0.08)

    def looked_up(self, table: str, trainer: int, step: int) -> list[int]:
        """The ids whose rows a trainer reads after its step of that number, before the next; each
        once.
        """
        draw = random.Random(f"{self.seed} {table} {trainer} {step} reads")
        return draw.sample(IDS, draw.randint(1, len(IDS)))

    def trained(self, table: str, trainer: int, step: int) -> list[int] | None:
        """The ids whose rows a step adds to, of those that were read before it; None where it has
        nothing of the table.
        """
        draw = random.Random(f"{self.seed} {table} {trainer} {step} trains")
        read = self.looked_up(table, trainer, step - 1)
        return None if draw.random() < 0.15 else draw.sample(read, draw.randint(0, len(read)))

    def pause(self, trainer: int, step: int) -> float:
        """Seconds that a trainer computes before a step."""
        draw = random.Random(f"{self.seed} pause {trainer} {step}")
        return draw.choice((0.0, 0.0, 0.0, 0.001, 0.003))

    def smaller(self) -> list[Scenario]:
        """Simpler trials, the simplest first, to look for the smallest one that fails."""
        simpler = [
            replace(self, rate=0.0),
            replace(self, tables=False),
            replace(self, trainers=1),
            replace(self, servers=1),
            replace(self, steps=max(4, self.steps // 8 * 4)),
        ]
        return [scenario for scenario in simpler if scenario != self]


def of_seed(seed: int, mode: str | None = None, transport: str | None = None) -> Scenario:
    """The trial of a seed.  44 seeds in a row have every mode over every transport."""
    draw = random.Random(f"{seed} scenario")
    modes = list(MODES)
    return Scenario(
        seed=seed,
        mode=mode or modes[seed % len(modes)],
        transport=transport
        or TRANSPORTS[(seed // len(modes) + seed % len(modes)) % len(TRANSPORTS)],
        servers=draw.choice((1, 2)),
        trainers=draw.choice((1, 2, 2, 2, 4)),
        steps=draw.choice((4, 8)),
        rate=draw.choice((0.02, 0.05, 0.1)),
    )
