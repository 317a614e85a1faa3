"""Programs of servers whose variables, blocks or ops are wrong, and what a refusal of each says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tests.support.server_programs import (
    GRADIENTS,
    LISTEN,
    OPS,
    UPDATE,
    VARIABLES,
    declared,
    listening,
    placed,
    planned,
    server,
    updating,
)
from transpiler.ir.graph import Block, Op, Ref, Role, freeze
from transpiler.ir.rules import Clip
from transpiler.program import Program

OP_ATTACKS: dict[str, tuple[Callable[[], Program], str]] = {
    "a parameter from nowhere": (
        lambda: server({"v": replace(VARIABLES["w.block0"], name="v")}),
        "expected a slice that the plan places",
    ),
    "a buffer from nowhere": (
        lambda: server({"v": replace(VARIABLES["n"], name="v")}),
        "expected a slice that the plan places",
    ),
    "a slice as a temporary": (
        lambda: declared("n", role=Role.TEMPORARY),
        "expected a PARAMETER or a BUFFER",
    ),
    "a slice of another dtype": (
        lambda: declared("n", dtype="float32"),
        r"expected int64\[\], got float32\[\]",
    ),
    "a variable with a free size": (lambda: declared("t", shape=("batch",)), "fixed sizes"),
    "a variable with an unknown dtype": (
        lambda: declared("t", dtype="float31"),
        "expected a dtype among",
    ),
    "a variable that is a size": (lambda: declared("t", dtype="size"), "expected a dtype among"),
    "a variable of eight exabytes": (lambda: declared("t", shape=(2**63 - 1,)), "bytes or fewer"),
    "a variable under another's name": (lambda: declared("t", name="u"), "expected its own name"),
    "a variable in two blocks": (
        lambda: server().with_blocks(
            server().blocks[0], Block(1, freeze({"t": VARIABLES["t"]}), OPS)
        ),
        "variable 't': expected once, got twice",
    ),
    "a block under another's number": (
        lambda: server().with_blocks(server().blocks[0], Block(5, freeze({}), OPS)),
        "block 1: .*got 5",
    ),
    "a missing block": (
        lambda: listening(optimize_blocks=(1, 2)),
        "'optimize_blocks': expected each of the 1 other blocks once",
    ),
    "a block that calls itself": (lambda: listening(optimize_blocks=(0, 1)), "'optimize_blocks'"),
    "a block named twice": (lambda: listening(optimize_blocks=(1, 1)), "'optimize_blocks'"),
    "a block named by nobody": (lambda: listening(optimize_blocks=()), "'optimize_blocks'"),
    "a negative block": (
        lambda: listening(optimize_blocks=(-1,)),
        "'optimize_blocks': expected list",
    ),
    "another mode than the plan's": (lambda: listening(mode="async"), "'mode': expected 'sync'"),
    "more trainers than the plan": (lambda: listening(trainers=3), "'trainers': expected 2"),
    "another server": (lambda: listening(server_index=1), "'server_index': expected 0"),
    "two listens": (
        lambda: server().with_blocks(
            Block(0, freeze(VARIABLES), (LISTEN, LISTEN)), server().blocks[1]
        ),
        "expected one op",
    ),
    "no listen": (
        lambda: server().with_blocks(Block(0, freeze(VARIABLES), ()), server().blocks[1]),
        "expected one op",
    ),
    "a listen within": (lambda: server(ops=(*OPS, LISTEN)), "expected an op that servers run"),
    "a compute op": (
        lambda: server(ops=(Op("aten.neg", {"self": Ref("t")}, ("t",)), *OPS)),
        "block 1, op 0: op 'aten.neg'",
    ),
    "a send": (
        lambda: server(ops=(Op("fetch_barrier", {"endpoints": (), "trainer_id": 0}), *OPS)),
        "expected an op that servers run",
    ),
    "an init": (
        lambda: server(ops=(Op("init", {}, ("w.block0",)), *OPS)),
        "expected an op that servers run",
    ),
    "an unknown op": (
        lambda: server(ops=(Op("exec", {}, ("t",)), *OPS)),
        "block 1, op 0: op 'exec'",
    ),
    "an undefined input": (
        lambda: server(ops=(replace(OPS[0], arguments={"x": (Ref("ghost"),)}), *OPS[1:])),
        "block 1, op 0: .*'ghost'",
    ),
    "an undefined result": (
        lambda: server(ops=(replace(OPS[0], outputs=("ghost",)), *OPS[1:])),
        "block 1, op 0: .*'ghost'",
    ),
    "a temporary that nobody wrote": (
        lambda: server(ops=(replace(OPS[0], arguments={"x": (Ref("t"), Ref("t"))}), *OPS[1:])),
        "earlier op wrote",
    ),
    "a merge into the parameter": (
        lambda: server(ops=(replace(OPS[0], outputs=("w.block0",)), *OPS[1:])),
        "expected to write a gradient",
    ),
    "a merge of unlike shapes": (
        lambda: declared(GRADIENTS[1], shape=(3, 2)),
        r"block 1, op 0: op 'sum', argument 'x', .*got float32\[3, 2\]",
    ),
    "a merge of unlike dtypes": (lambda: declared(GRADIENTS[1], dtype="float64"), "float64"),
    "a gradient of another shape": (
        lambda: server(
            {"t": replace(VARIABLES["t"], shape=(9,), role=Role.GRADIENT)},
            ops=(*OPS[:3], replace(UPDATE, arguments={**UPDATE.arguments, "grad": Ref("t")})),
        ),
        "argument 'grad'",
    ),
    "a state of another shape": (
        lambda: declared("w.block0@momentum_buffer", shape=(6,)),
        "argument 'momentum_buffer': expected the shape",
    ),
    "a parameter as state": (
        lambda: updating(momentum_buffer=Ref("w.block0")),
        "expected a STATE, got 'w.block0', a PARAMETER",
    ),
    "a parameter as gradient": (lambda: updating(grad=Ref("w.block0")), "expected a GRADIENT"),
    "an update by another rate": (lambda: updating(lr=0.2), "expected the rule of group 0"),
    "an update by a missing group": (
        lambda: updating(group=1),
        "'group': expected 0 as the plan says, got 1",
    ),
    "an update by a huge group": (
        lambda: updating(group=2**62),
        "'group': expected 0 as the plan says",
    ),
    "an update by an infinite rate": (
        lambda: updating(lr=float("inf")),
        "block 1, op 3: op 'momentum', argument 'lr': expected a finite",
    ),
    "no update": (
        lambda: server(ops=OPS[:3]),
        "slice 'w.block0' of server 0: expected an update by group 0, got None",
    ),
    "two updates": (lambda: server(ops=(*OPS, UPDATE)), "'optimizer': expected once"),
    "an update of what is only held": (
        lambda: placed(group=None),
        "expected an update by group None of 'w', got 0",
    ),
    "a merge of too few": (
        lambda: server(ops=(replace(OPS[0], arguments={"x": (Ref(GRADIENTS[0]),)}), *OPS[1:])),
        "'x': expected 2, one a trainer, got 1",
    ),
    "another divisor": (
        lambda: server(
            ops=(
                OPS[0],
                replace(OPS[1], arguments={"x": Ref("w@GRAD.block0"), "scale": 1.0}),
                *OPS[2:],
            )
        ),
        "'scale': expected 0.5 as the plan says, got 1.0",
    ),
    "another clip": (
        lambda: planned(clip=Clip("value", 2.0, -2.0)),
        "argument 'min': expected -2.0 as the plan says",
    ),
    "another kind of clip": (
        lambda: planned(clip=Clip("norm", 2.0)),
        "op 'clip': a server does not run it, because the plan clips by Clip.kind='norm'",
    ),
    "no clip": (
        lambda: planned(clip=None),
        "op 'clip': a server does not run it, because the plan clips by None",
    ),
    "a slice of another variable": (
        lambda: declared("w.block0", of="v"),
        "expected a slice of 'w', got one of 'v'",
    ),
    "two blocks that write one gradient": (
        lambda: listening(optimize_blocks=(1, 2)).with_blocks(
            listening(optimize_blocks=(1, 2)).main,
            server().blocks[1],
            Block(2, freeze({}), OPS[:1]),
        ),
        "variable that blocks write, 'w@GRAD.block0': expected once",
    ),
    "two scales": (lambda: server(ops=(OPS[1], *OPS)), "'scale': expected once"),
}
