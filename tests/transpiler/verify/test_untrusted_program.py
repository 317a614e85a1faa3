"""What a server refuses of the programs that reach it over the wire: everything that is wrong
anywhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from google.protobuf.message import DecodeError

from transpiler import program_pb2 as pb
from transpiler.cluster_programs import pserver_program
from transpiler.ir.graph import Argument, Block, Op, Ref, Role, Variable, freeze
from transpiler.ir.rules import RULES, Clip, Rule, rule_of
from transpiler.plan.plan import Deployment, Lane, Placement, Plan, Slice
from transpiler.program import Program
from transpiler.verify.untrusted_program import check_server_program

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


def test_a_server_takes_a_sound_program() -> None:
    """The merge, the clip and the update of one slice pass, and still do after the wire."""
    program = server()

    assert check_server_program(program) is None
    assert check_server_program(Program.from_proto(program.to_proto())) is None


def test_a_server_that_owns_nothing_takes_an_empty_block() -> None:
    """A server without slices listens all the same."""
    plan = replace(PLAN, placements=(replace(PLACED[0], slices=(Slice("w", 0, 12, (4, 3), 1),)),))
    main = Block(0, freeze({}), (LISTEN,))

    assert (
        check_server_program(
            Program((main, Block(1, freeze({}), ())), replace(DEPLOYMENT, plan=plan))
        )
        is None
    )


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


ATTACKS: dict[str, tuple[Callable[[], Program], str]] = {
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


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_server_refuses_a_program_that_is_wrong_anywhere(attack: str) -> None:
    """Whatever is wrong with a program from the wire is a ValueError in words, never another
    exception and never accepted.
    """
    program, message = ATTACKS[attack]
    with pytest.raises(ValueError, match=message):
        check_server_program(program())


def test_random_damage_is_refused_or_harmless() -> None:
    """Bytes of a message changed at random give a ValueError or a sound program: no other
    exception, no long wait.
    """
    sent = server().to_proto().SerializeToString()
    refused = 0
    for seed in range(3000):
        chance = random.Random(seed)
        damaged = bytearray(sent)
        for _ in range(chance.randint(1, 3)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        try:
            message = pb.Program.FromString(bytes(damaged))
        except DecodeError:
            continue
        try:
            check_server_program(Program.from_proto(message))
        except ValueError as error:
            refused += 1
            assert str(error)
    assert refused > 50


# ---- lanes ----

OUTER = Rule(
    "sgd", {"lr": 1.0, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}, {"nesterov": False}
)
LANES = {
    "sync": Lane("sync"),
    "async": Lane("async"),
    "half_async": Lane("half_async", max_merge_var_num=2),
    "stale": Lane("async", staleness=3),
    "dc": Lane("async", dc_asgd=0.5),
    "geo": Lane("geo", k_steps=5),
    "diloco": Lane("diloco", k_steps=5, outer=OUTER),
}


def made(mode: str, **fields: Any) -> Program:
    """What the transpiler makes for one lane; ``fields`` change its only block's ops, by type:
    arguments or outputs.
    """
    plan = replace(PLAN, lanes=(LANES[mode],), clip=None)
    program = pserver_program(replace(DEPLOYMENT, plan=plan))
    ops = [
        replace(op, outputs=fields[op.type]["outputs"])
        if "outputs" in fields.get(op.type, {})
        else replace(op, arguments={**op.arguments, **fields.get(op.type, {})})
        for op in program.blocks[1].ops
        if fields.get(op.type, {}) is not None
    ]
    return program.with_blocks(program.main, replace(program.blocks[1], ops=tuple(ops)))


def in_lane(mode: str, **fields: Any) -> Callable[[], Program]:
    """The same, later."""
    return lambda: made(mode, **fields)


def relaned(*lanes: Lane) -> Callable[[], Program]:
    """A program whose plan has these lanes, and no block for them."""
    return lambda: planned(lanes=lanes)


def told(mode: str, *ops: Op) -> Callable[[], Program]:
    """A program of this mode whose one block has these ops."""
    listen = replace(LISTEN, arguments={**LISTEN.arguments, "mode": mode})
    delta = slice_variable("w.block0.delta", Role.DELTA)
    return lambda: server({delta.name: delta}, ops, listen, deployment=made(mode).deployment)


ADDING = Op("sum", {"x": (Ref("w.block0"), Ref("w.block0.delta"))}, ("w.block0",))
BACKUPS = tuple(Ref(f"w.block0.trainer_{trainer}_bak") for trainer in range(2))
LANE_ATTACKS: dict[str, tuple[Callable[[], Program], str]] = {
    "no lanes": (relaned(), "expected 1 to 65536 lanes, got 0"),
    "a variable in a missing lane": (lambda: placed(lane=1), "expected a lane below 1, got 1"),
    "a lane with a setting of another mode": (relaned(Lane("sync", k_steps=3)), "lane 0, k_steps"),
    "a lane without its rule": (relaned(Lane("diloco", k_steps=3)), "lane 0, outer"),
    "an outer rule that is none": (
        relaned(Lane("diloco", k_steps=3, outer=Rule("exec", {}))),
        "lane 0, outer: rule 'exec'",
    ),
    "a staleness of nothing": (relaned(Lane("async", staleness=0)), "lane 0, staleness"),
    "an infinite compensation": (relaned(Lane("async", dc_asgd=float("inf"))), "lane 0, dc_asgd"),
    "a merge over trainers without rounds": (told("async", *OPS), "does not run it in async mode"),
    "a scale without rounds": (
        told("async", *OPS[1:]),
        "'scale': a server does not run it, because the plan clips by None",
    ),
    "a compensation that nobody asked for": (
        lambda: made("async").with_blocks(*made("dc").blocks),
        "op 'dc_compensate': a server does not run it, because the plan clips by None",
    ),
    "another factor": (
        in_lane("dc", dc_compensate={"factor": 1.0}),
        "'factor': expected 0.5 as the plan says",
    ),
    "one trainer's backup for all": (
        in_lane("dc", dc_compensate={"backups": (BACKUPS[0], BACKUPS[0])}),
        "'backups': expected 2, one a trainer, got 1",
    ),
    "a gradient as backup": (
        in_lane("dc", dc_compensate={"backups": (BACKUPS[0], Ref("w@GRAD.block0"))}),
        "'backups': expected a STATE, got 'w@GRAD.block0', a GRADIENT",
    ),
    "an optimizer's state as backup": (
        in_lane("dc", dc_compensate={"backups": (BACKUPS[0], Ref("w@momentum_buffer.block0"))}),
        "state 'w@momentum_buffer.block0': expected once",
    ),
    "a compensation against something else": (
        in_lane("dc", dc_compensate={"param": BACKUPS[0]}),
        "'param': expected a PARAMETER",
    ),
    "a compensation of the parameter": (
        in_lane("dc", dc_compensate={"outputs": ("w.block0",)}),
        "expected to write a gradient",
    ),
    "a sum into a gradient in geo": (
        in_lane("geo", sum={"outputs": ("w.block0.delta",)}),
        "expected to write the parameter",
    ),
    "a sum of the parameter with itself": (
        in_lane("geo", sum={"x": (Ref("w.block0"), Ref("w.block0"))}),
        "expected the parameter 'w.block0' and a DELTA",
    ),
    "a sum that forgets the parameter": (
        in_lane("geo", sum={"x": (Ref("w.block0.delta"), Ref("w.block0.delta"))}),
        "expected the parameter 'w.block0' and a DELTA",
    ),
    "no sum in geo": (in_lane("geo", sum=None), "expected an update by group sum, got None"),
    "an optimizer op in geo": (
        told("geo", UPDATE),
        "expected an update by group None of 'w', got 0",
    ),
    "a sum in place of the rule": (told("async", ADDING), "expected to write a gradient"),
    "an outer update by the trainers' rule": (
        told("diloco", UPDATE),
        "'group': expected 1 as the plan says, got 0",
    ),
    "another outer rate": (in_lane("diloco", sgd={"lr": 2.0}), "expected the rule of group 1"),
    "an outer gradient uphill": (
        in_lane("diloco", scale={"scale": 0.5}),
        "'scale': expected -0.5 as the plan says",
    ),
    "too few deltas": (
        in_lane("diloco", sum={"x": (Ref("w.block0.delta.trainer_0"),)}),
        "'x': expected 2, one a trainer, got 1",
    ),
    "a mode of another plan": (
        lambda: replace(made("geo"), deployment=made("diloco").deployment),
        "'mode': expected 'diloco' as the plan says, got 'geo'",
    ),
}


@pytest.mark.parametrize("attack", LANE_ATTACKS)
def test_a_server_refuses_what_a_lane_does_not_say(attack: str) -> None:
    """Whatever contradicts the mode of a slice's lane is refused in words."""
    program, message = LANE_ATTACKS[attack]
    with pytest.raises(ValueError, match=message):
        check_server_program(program())


@pytest.mark.parametrize("mode", LANES)
def test_the_lanes_that_attacks_start_from_are_sound(mode: str) -> None:
    """Before each change above the program passes."""
    assert check_server_program(made(mode)) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "clip", [None, Clip("value", 1.0, -1.0), Clip("norm", 1.0), Clip("global_norm", 1.0)]
)
@pytest.mark.parametrize("trainers", [1, 2])
@pytest.mark.parametrize("mode", LANES)
def test_what_the_transpiler_makes_is_accepted(mode: str, trainers: int, clip: Clip | None) -> None:
    """Every server's program of a plan passes as it arrives, for every rule and every kind of
    variable.
    """
    for op_type, spec in RULES.items():
        w = torch.zeros(2, requires_grad=True)
        optimizer = spec.cls([w], momentum=0.9) if op_type == "momentum" else spec.cls([w])  # type: ignore[call-arg]
        rule = rule_of(optimizer, optimizer.param_groups[0])
        placements = (
            Placement("w", (4, 3), "float32", 0, SLICES),
            Placement("b", (3,), "bfloat16", 0, (Slice("b", 0, 3, (3,), 1),)),
            Placement("e", (0, 4), "float32", 0, (Slice("e", 0, 0, (0, 4), 0),)),
            PLACED[1],
        )
        plan = Plan((LANES[mode],), trainers, 3, (rule,), placements, clip)
        for index in range(3):
            program = pserver_program(Deployment(plan, ("h:1", "h:2", "h:3"), server_index=index))

            assert check_server_program(Program.from_proto(program.to_proto())) is None
