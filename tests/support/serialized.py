"""A program with every kind of variable, argument and value: what is written, and read again."""

from __future__ import annotations

import math

from transpiler.ir.graph import Block, Literal, Op, Ref, Role, Symbol, Variable, freeze
from transpiler.ir.rules import Clip, Rule
from transpiler.plan.plan import Deployment, Lane, Placement, Plan, Slice
from transpiler.program import Program

RULE = Rule(
    "adam",
    {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    {"amsgrad": False, "maximize": True},
)
PLAN = Plan(
    (Lane("sync"),),
    trainers=2,
    servers=1,
    groups=(RULE,),
    placements=(
        Placement("w", (2, 3), "bfloat16", 0, (Slice("w", 0, 6, (2, 3), 0),)),
        Placement("n", (), "int64", None, (Slice("n", 0, 1, (), 0),)),
    ),
    clip=Clip("value", 1.0, -0.0),
    graph="00ff",
)
DEPLOYMENT = Deployment(PLAN, ("host:1",), trainer_id=0)
VARIABLES = {
    "x": Variable("x", ("batch", 3), "bfloat16", Role.INPUT),
    "w": Variable("w", (2, 3), "bfloat16", Role.PARAMETER),
    "empty": Variable("empty", (0, 7), "float32", Role.BUFFER),
    "n": Variable("n", (), "int64", Role.BUFFER),
    "w@GRAD": Variable("w@GRAD", (2, 3), "bfloat16", Role.GRADIENT, "w"),
}
OPS = (
    Op(
        "aten.clone",
        {"self": Ref("x"), "memory_format": Symbol("memory_format", "contiguous_format")},
        ("y",),
        "train.py:3",
    ),
    Op("assign_value", {"value": Literal("int64", (1,), b"\x00\xff" * 4)}, ("c",)),
    Op("aten.full", {"size": (Ref("b"), 2), "fill_value": -math.inf, "pin_memory": None}, ("f",)),
    Op("send", {"x": (Ref("w@GRAD"),), "endpoints": ("host:1",), "trainer_id": 0}),
)
PROGRAM = Program((Block(0, freeze(VARIABLES), OPS), Block(1, freeze({}), ())), DEPLOYMENT)
