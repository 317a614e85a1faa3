"""A sound program of a server, and ways to spoil it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transpiler.ir.graph import Argument, Block, Op, Ref, Role, Variable, freeze
from transpiler.ir.rules import Clip, Rule
from transpiler.plan.plan import Deployment, Lane, Placement, Plan, Slice
from transpiler.program import Program

RULE = Rule(
    "momentum",
    {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0},
    {"nesterov": False},
)
SLICES = (Slice("w.block0", 0, 6, (2, 3), 0), Slice("w.block1", 6, 12, (2, 3), 1))
PLACED = (
    Placement("w", (4, 3), "float32", 0, SLICES),
    Placement("n", (), "int64", None, (Slice("n", 0, 1, (), 0),)),
)
PLAN = Plan((Lane("sync"),), 2, 2, (RULE,), PLACED, Clip("value", 1.0, -1.0))
DEPLOYMENT = Deployment(PLAN, ("h:1", "h:2"), server_index=0)

GRADIENTS = tuple(f"w@GRAD.block0.trainer_{trainer}" for trainer in range(2))
UPDATE = Op(
    "momentum",
    {
        "param": Ref("w.block0"),
        "grad": Ref("w@GRAD.block0"),
        "momentum_buffer": Ref("w.block0@momentum_buffer"),
        "group": 0,
        **RULE.hparams,
        **RULE.flags,
    },
    ("w.block0",),
)
OPS = (
    Op("sum", {"x": tuple(map(Ref, GRADIENTS))}, ("w@GRAD.block0",)),
    Op("scale", {"x": Ref("w@GRAD.block0"), "scale": 0.5}, ("w@GRAD.block0",)),
    Op("clip", {"x": Ref("w@GRAD.block0"), "min": -1.0, "max": 1.0}, ("w@GRAD.block0",)),
    UPDATE,
)
LISTEN = Op(
    "listen_and_serv",
    {"endpoint": "h:1", "server_index": 0, "trainers": 2, "mode": "sync", "optimize_blocks": (1,)},
)


def slice_variable(
    name: str, role: Role, shape: tuple[int | str, ...] = (2, 3), dtype: str = "float32"
) -> Variable:
    return Variable(name, shape, dtype, role, "w")


VARIABLES = {
    variable.name: variable
    for variable in (
        slice_variable("w.block0", Role.PARAMETER),
        slice_variable("w.block0@momentum_buffer", Role.STATE),
        *(slice_variable(name, Role.GRADIENT) for name in ("w@GRAD.block0", *GRADIENTS)),
        Variable("n", (), "int64", Role.BUFFER, "n"),
        slice_variable("t", Role.TEMPORARY),
    )
}


def server(
    variables: dict[str, Variable] | None = None,
    ops: tuple[Op, ...] = OPS,
    listen: Op = LISTEN,
    **fields: Any,
) -> Program:
    """A program that passes, but for what is given."""
    main = Block(0, freeze({**VARIABLES, **(variables or {})}), (listen,))
    return Program((main, Block(1, freeze({}), ops)), **{"deployment": DEPLOYMENT, **fields})


def without(name: str) -> Program:
    program = server()
    return program.with_blocks(
        Block(0, freeze({k: v for k, v in VARIABLES.items() if k != name}), (LISTEN,)),
        program.blocks[1],
    )


def listening(**arguments: Argument) -> Program:
    return server(listen=replace(LISTEN, arguments={**LISTEN.arguments, **arguments}))


def updating(**arguments: Argument) -> Program:
    return server(ops=(*OPS[:3], replace(UPDATE, arguments={**UPDATE.arguments, **arguments})))


def planned(**fields: Any) -> Program:
    return server(deployment=replace(DEPLOYMENT, plan=replace(PLAN, **fields)))


def placed(**fields: Any) -> Program:
    return planned(placements=(replace(PLACED[0], **fields), PLACED[1]))


def sliced(*slices: Slice) -> Program:
    return placed(slices=slices)


def declared(key: str, **fields: Any) -> Program:
    return server({key: replace(VARIABLES[key], **fields)})
