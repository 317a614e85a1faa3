"""Programs of servers whose deployment or plan is wrong, and what a refusal of each says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tests.support.server_programs import (
    DEPLOYMENT,
    PLACED,
    RULE,
    SLICES,
    placed,
    planned,
    server,
    sliced,
    without,
)
from transpiler.ir.rules import Clip, Rule
from transpiler.plan.plan import Lane
from transpiler.program import Program

PLAN_ATTACKS: dict[str, tuple[Callable[[], Program], str]] = {
    "no deployment": (lambda: server(deployment=None), "without"),
    "a trainer's deployment": (
        lambda: server(deployment=replace(DEPLOYMENT, trainer_id=0)),
        "that of trainer 0",
    ),
    "no server index": (
        lambda: server(deployment=replace(DEPLOYMENT, server_index=None)),
        "server_index of 0 to 1, got None",
    ),
    "a server index too high": (
        lambda: server(deployment=replace(DEPLOYMENT, server_index=2)),
        "got 2",
    ),
    "too few endpoints": (
        lambda: server(deployment=replace(DEPLOYMENT, endpoints=("h:1",))),
        "expected 2 endpoints, got 1",
    ),
    "an empty endpoint": (
        lambda: server(deployment=replace(DEPLOYMENT, endpoints=("h:1", ""))),
        "got an empty one",
    ),
    "no blocks": (lambda: Program((), DEPLOYMENT), "one block or more"),
    "another mode": (lambda: planned(lanes=(Lane("chaos"),)), "lane 0, mode: expected one of sync"),
    "no trainers": (lambda: planned(trainers=0), "trainers, got 0"),
    "four billion trainers": (lambda: planned(trainers=2**32 - 1), "trainers, got 4294967295"),
    "four billion servers": (lambda: planned(servers=2**32 - 1), "servers, got 4294967295"),
    "a rule that is none": (lambda: planned(groups=(Rule("exec", {}),)), "group 0: rule 'exec'"),
    "a rule with nan": (
        lambda: planned(groups=(replace(RULE, hparams={**RULE.hparams, "lr": float("nan")}),)),
        "group 0.*'lr'",
    ),
    "a rule with another number": (
        lambda: planned(groups=(replace(RULE, hparams={**RULE.hparams, "x": 1.0}),)),
        "argument 'x'",
    ),
    "a clip that is none": (lambda: planned(clip=Clip("hair", 1.0)), "plan, clip"),
    "a clip by nan": (
        lambda: planned(clip=Clip("norm", float("nan"))),
        "plan, clip: expected numbers",
    ),
    "a plan with a nameless variable": (lambda: placed(name=""), "got an empty one"),
    "a plan with a variable twice": (
        lambda: planned(placements=(PLACED[1], PLACED[1])),
        "variable 'n': expected once",
    ),
    "a plan with an unknown dtype": (lambda: placed(dtype="object"), "expected a dtype among"),
    "a plan that trains integers": (lambda: placed(dtype="int64"), "floating-point"),
    "a plan with a negative size": (lambda: placed(shape=(-4, -3)), "fixed sizes of 0 or more"),
    "a plan beyond memory": (lambda: placed(shape=(2**40, 2**40)), "bytes or fewer"),
    "a plan beyond memory but for a zero": (
        lambda: placed(shape=(2**62, 2**62, 0)),
        "bytes or fewer",
    ),
    "a plan with a million dimensions": (
        lambda: placed(shape=(1,) * 1_000_000),
        "64 dimensions or fewer",
    ),
    "a plan with a missing group": (lambda: placed(group=7), "group below 1, got 7"),
    "a plan with a negative group": (lambda: placed(group=-3), "group below 1, got -3"),
    "a plan without slices": (lambda: sliced(), "slices of all 12 elements, got 0"),
    "slices with a gap": (
        lambda: sliced(SLICES[0], replace(SLICES[1], begin=7)),
        r"elements from 6 on, got \[7, 12\)",
    ),
    "slices that overlap": (
        lambda: sliced(SLICES[0], replace(SLICES[1], begin=5)),
        "elements from 6 on",
    ),
    "slices that end early": (lambda: sliced(SLICES[0]), "expected a shape|all 12 elements"),
    "a slice that runs backwards": (
        lambda: sliced(SLICES[0], replace(SLICES[1], end=3)),
        "elements from 6 on",
    ),
    "a slice of another shape": (
        lambda: sliced(SLICES[0], replace(SLICES[1], shape=(3, 2))),
        r"got \[3, 2\]",
    ),
    "a slice with too many rows": (
        lambda: sliced(SLICES[0], replace(SLICES[1], shape=(3, 3))),
        "6 elements",
    ),
    "a slice on no server": (
        lambda: sliced(SLICES[0], replace(SLICES[1], server=2)),
        "server of 0 to 1, got 2",
    ),
    "a slice without a name": (
        lambda: sliced(SLICES[0], replace(SLICES[1], name="")),
        "got an empty one",
    ),
    "two slices of one name": (
        lambda: sliced(SLICES[0], replace(SLICES[1], name="w.block0")),
        "expected once, got twice",
    ),
    "a slice that nobody holds": (
        lambda: without("n"),
        "slice 'n' of server 0: expected a variable of block 0, got none",
    ),
}
