"""Programs as text: what a reader of the README sees."""

from __future__ import annotations

import textwrap
from dataclasses import replace

from transpiler.formats.text import call
from transpiler.ir.graph import Argument, Block, Literal, Op, Ref, Role, Symbol, Variable, freeze
from transpiler.ir.rules import Rule
from transpiler.plan.plan import Deployment, Lane, Placement, Plan, Slice
from transpiler.program import Program

RULE = Rule(
    "sgd",
    {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0},
    {"nesterov": False, "maximize": False},
)
WEIGHT = (Slice("fc.weight.block0", 0, 6, (2, 3), 0), Slice("fc.weight.block1", 6, 12, (2, 3), 1))
PLAN = Plan(
    (Lane("sync"),),
    trainers=2,
    servers=2,
    groups=(RULE,),
    placements=(
        Placement("fc.weight", (4, 3), "float32", 0, WEIGHT),
        Placement("fc.bias", (4,), "float32", 0, (Slice("fc.bias", 0, 4, (4,), 0),)),
    ),
)
HOSTS = ("127.0.0.1:6174", "127.0.0.1:6175")


def table(*variables: Variable) -> dict[str, Variable]:
    return {variable.name: variable for variable in variables}


def refs(*names: str) -> tuple[Ref, ...]:
    return tuple(map(Ref, names))


TRAINER_VARIABLES = table(
    Variable("fc.weight", (4, 3), "float32", Role.PARAMETER),
    Variable("fc.bias", (4,), "float32", Role.PARAMETER),
    Variable("x", ("batch", 3), "float32", Role.INPUT),
    Variable("t", (3, 4), "float32"),
    Variable("addmm", ("batch", 4), "float32"),
    Variable("loss", (), "float32", Role.OUTPUT),
    Variable("size", (), "size", Role.SIZE),
    Variable("ones", (), "float32"),
    Variable("expand", ("batch", 4), "float32"),
    Variable("fc.bias@GRAD", (4,), "float32", Role.GRADIENT, "fc.bias"),
    Variable("t_1", (4, "batch"), "float32"),
    Variable("fc.weight@GRAD", (4, 3), "float32", Role.GRADIENT, "fc.weight"),
)


def trainer_program() -> Program:
    """A linear layer's step, after transpiling by hand."""
    blocks = ("fc.weight@GRAD.block0", "fc.weight@GRAD.block1")
    everyone: dict[str, Argument] = {"endpoints": HOSTS, "trainer_id": 0}
    ops = (
        Op("aten.t", {"self": Ref("fc.weight")}, ("t",)),
        Op(
            "aten.addmm",
            {"self": Ref("fc.bias"), "mat1": Ref("x"), "mat2": Ref("t"), "beta": 1, "alpha": 1},
            ("addmm",),
        ),
        Op("aten.sum", {"self": Ref("addmm"), "dtype": None}, ("loss",)),
        Op(
            "aten.ones_like",
            {"self": Ref("loss"), "memory_format": Symbol("memory_format", "preserve_format")},
            ("ones",),
        ),
        Op("sym.size", {"x": Ref("addmm"), "dim": 0}, ("size",)),
        Op("aten.expand", {"self": Ref("ones"), "size": (Ref("size"), 4)}, ("expand",)),
        Op(
            "aten.sum.dim_IntList",
            {"self": Ref("expand"), "dim": (0,), "keepdim": False},
            ("fc.bias@GRAD",),
        ),
        Op("send", {"x": refs("fc.bias@GRAD"), "endpoints": HOSTS[:1], "trainer_id": 0}),
        Op("aten.t", {"self": Ref("expand")}, ("t_1",)),
        Op("aten.mm", {"self": Ref("t_1"), "mat2": Ref("x")}, ("fc.weight@GRAD",)),
        Op("split", {"x": Ref("fc.weight@GRAD"), "sections": (6, 6)}, blocks),
        Op("send", {"x": refs(*blocks), "endpoints": HOSTS, "trainer_id": 0}),
        Op("send_barrier", everyone),
        Op(
            "recv",
            {"param": "fc.weight", "endpoints": HOSTS},
            ("fc.weight.block0", "fc.weight.block1"),
        ),
        Op("recv", {"param": "fc.bias", "endpoints": HOSTS[:1]}, ("fc.bias",)),
        Op("fetch_barrier", everyone),
        Op(
            "concat", {"x": refs("fc.weight.block0", "fc.weight.block1"), "axis": 0}, ("fc.weight",)
        ),
    )
    return Program(
        (Block(0, freeze(TRAINER_VARIABLES), ops),), Deployment(PLAN, HOSTS, trainer_id=0)
    )


def server_program() -> Program:
    """Server 1's part: one slice."""
    received = [f"fc.weight@GRAD.block1.trainer_{trainer}" for trainer in range(2)]
    grad = Variable("fc.weight@GRAD.block1", (2, 3), "float32", Role.GRADIENT, "fc.weight")
    variables = table(
        Variable("fc.weight.block1", (2, 3), "float32", Role.PARAMETER, "fc.weight"),
        *(Variable(name, (2, 3), "float32", Role.GRADIENT, "fc.weight") for name in received),
        grad,
    )
    listen: dict[str, Argument] = {
        "endpoint": HOSTS[1],
        "server_index": 1,
        "trainers": 2,
        "mode": "sync",
        "optimize_blocks": (1,),
    }
    update: dict[str, Argument] = {
        "param": Ref("fc.weight.block1"),
        "grad": Ref(grad.name),
        "group": 0,
        **RULE.hparams,
        **RULE.flags,
    }
    ops = (
        Op("sum", {"x": refs(*received)}, (grad.name,)),
        Op("scale", {"x": Ref(grad.name), "scale": 0.5}, (grad.name,)),
        Op("sgd", update, ("fc.weight.block1",)),
    )
    blocks = (
        Block(0, freeze(variables), (Op("listen_and_serv", listen),)),
        Block(1, freeze({}), ops),
    )
    return Program(blocks, Deployment(PLAN, HOSTS, server_index=1))


TRAINER = """\
trainer 0 of 2, sync, 2 servers: mean over trainers

block 0: 17 ops
  inputs      x float32[batch, 3]
  parameters  fc.weight float32[4, 3], fc.bias float32[4]

  t              = aten.t(fc.weight)                           float32[3, 4]
  addmm          = aten.addmm(fc.bias, x, t)                   float32[batch, 4]
  loss           = aten.sum(addmm)                             float32[]
  # backward
  ones           = aten.ones_like(loss)                        float32[]
  size           = sym.size(addmm, 0)                          size
  expand         = aten.expand(ones, [size, 4])                float32[batch, 4]
  fc.bias@GRAD   = aten.sum.dim_IntList(expand, [0])           float32[4]
                   send(fc.bias@GRAD -> 127.0.0.1:6174)
  t_1            = aten.t(expand)                              float32[4, batch]
  fc.weight@GRAD = aten.mm(t_1, x)                             float32[4, 3]
                   split(fc.weight@GRAD -> fc.weight@GRAD.block0 (6), fc.weight@GRAD.block1 (6))
                   send(fc.weight@GRAD.block0 -> 127.0.0.1:6174, \
fc.weight@GRAD.block1 -> 127.0.0.1:6175)
                   send_barrier(127.0.0.1:6174, 127.0.0.1:6175)
                   recv(fc.weight.block0 <- 127.0.0.1:6174, fc.weight.block1 <- 127.0.0.1:6175)
                   recv(fc.bias <- 127.0.0.1:6174)
                   fetch_barrier(127.0.0.1:6174, 127.0.0.1:6175)
  fc.weight      = concat(fc.weight.block0, fc.weight.block1)  float32[4, 3]"""

SERVER = """\
server 1 of 2 (127.0.0.1:6175), sync, 2 trainers: mean over trainers

block 0: 1 op
  parameters  fc.weight.block1 float32[2, 3]
  receives    fc.weight@GRAD.block1.trainer_0, fc.weight@GRAD.block1.trainer_1

  listen_and_serv(127.0.0.1:6175, sync, trainers=2, optimize_blocks=1)

block 1: 3 ops
  fc.weight@GRAD.block1 = sum([fc.weight@GRAD.block1.trainer_0, \
fc.weight@GRAD.block1.trainer_1])  float32[2, 3]
  fc.weight@GRAD.block1 = scale(fc.weight@GRAD.block1, 0.5)  float32[2, 3]
  fc.weight.block1      = sgd(fc.weight@GRAD.block1, lr=0.1)"""


def test_a_trainer_program_reads_as_what_it_does() -> None:
    """One line an op, defaults left out, every exchange with its endpoints."""
    assert str(trainer_program()) == TRAINER


def test_a_server_program_reads_as_what_it_does() -> None:
    """Who it is, what it holds and receives, and one titled block for each slice."""
    assert str(server_program()) == SERVER


def test_every_lane_is_printed_with_its_mode_merge_rule_and_bounds() -> None:
    """One lane stands in the first line, several in a line of their own; sends of changes and own
    barriers say what they are.
    """
    geo, queue = Lane("geo", k_steps=100), Lane("async", "sum", 4, 16, staleness=3, dc_asgd=0.04)
    one = replace(
        trainer_program(), deployment=Deployment(replace(PLAN, lanes=(geo,)), HOSTS, trainer_id=0)
    )
    assert (
        str(one).splitlines()[0]
        == "trainer 0 of 2, geo, 2 servers: every 100 steps what changed, divided by 2, is added"
    )
    for trainer, server in ((0, None), (None, 1)):
        plan = replace(PLAN, lanes=(geo, queue, Lane("sync")))
        head = str(
            replace(trainer_program(), deployment=Deployment(plan, HOSTS, trainer, server))
        ).split("\n\n")[0]
        assert head.splitlines()[1:] == [
            "  lane 0: geo, every 100 steps what changed, divided by 2, is added",
            "  lane 1: async, sum of up to 4 steps, at most 16 on the way, 1 waits for a further "
            "one, at most 3 steps ahead of "
            "the",
            "          slowest, delay compensation 0.04",
            "  lane 2: sync, mean over trainers",
        ]
        assert ", mixed, " in head.splitlines()[0]
    changes: dict[str, Argument] = {"x": refs("fc.bias"), "endpoints": HOSTS[:1], "trainer_id": 0}
    changes |= {"sections": (4,), "delta": ("fc.bias.delta",), "mode": "geo", "k_steps": 100}
    assert (
        call(Op("send", changes)) == "send(fc.bias.delta -> 127.0.0.1:6174, geo, every 100 steps)"
    )
    barrier = Op("send_barrier", {"endpoints": HOSTS[:1], "trainer_id": 0, "half_async": True})
    assert call(barrier) == "send_barrier(127.0.0.1:6174, half_async)"


def test_columns_are_aligned() -> None:
    """Within a block the equals signs stand in one column, and the types of ordinary lines in
    another.
    """
    lines = str(trainer_program()).splitlines()
    computed = [line for line in lines if " = " in line]

    assert len({line.index(" = ") for line in computed}) == 1
    assert len({line.rindex("  ") for line in computed}) == 1
    assert max(map(len, lines)) <= 120
    assert not any(line != line.rstrip() for line in lines)


def test_a_program_survives_the_wire_with_its_text() -> None:
    """What was received prints as what was sent."""
    for program in (trainer_program(), server_program()):
        assert str(Program.from_proto(program.to_proto())) == str(program)


def test_a_long_program_is_complete() -> None:
    """Two thousand ops are two thousand lines, and a name too long for its column moves only its
    own line.
    """
    long = "a_name_that_is_much_longer_than_any_other"
    ops = tuple(
        Op("aten.relu", {"self": Ref("x")}, (long if number == 7 else f"v{number}",))
        for number in range(2000)
    )
    lines = str(Program((Block(0, freeze({}), ops),))).splitlines()

    assert len(lines) == 2003
    assert lines[10].split(" = ")[0].strip() == long
    assert lines[11] == "  v8    = aten.relu(x)"


def test_what_is_not_a_default_is_shown() -> None:
    """An optimizer op shows its gradient, its rate and what the user changed; a cast its dtype; a
    constant its type.
    """
    states = {name: Ref(name) for name in ("step", "exp_avg", "exp_avg_sq")}
    adam = {
        "param": Ref("w"),
        "grad": Ref("g"),
        **states,
        "lr": 0.001,
        "eps": 1e-8,
        "weight_decay": 0.01,
        "maximize": True,
    }

    assert call(Op("adam", {**adam, "group": 1, "betas": (0.8, 0.999)}, ("w",))) == (
        "adam(g, lr=0.001, betas=[0.8, 0.999], weight_decay=0.01, maximize=True, group=1)"
    )
    cast = {"self": Ref("x"), "dtype": Symbol("dtype", "bfloat16")}
    assert call(Op("aten._to_copy", cast, ("y",))) == "aten._to_copy(x, dtype=bfloat16)"
    assert (
        call(Op("assign_value", {"value": Literal("int64", (2,), bytes(16))}, ("c",)))
        == "assign_value(<int64[2]>)"
    )
    assert call(
        Op("aten.sum.dim_IntList", {"self": Ref("x"), "dim": (0,), "keepdim": True}, ("y",))
    ).endswith("[0], keepdim=True)")


def test_a_broken_op_prints_too() -> None:
    """Text is for finding out what is wrong, so it never refuses."""
    broken = (
        Op("explode", {"now": True}),
        Op("send", {"x": 3}),
        Op("aten.nope", {"self": Ref("x")}, ("y",)),
    )
    shown = str(Program((Block(0, freeze({}), broken),)))

    expected = """\
        single-node program

        block 0: 3 ops
              explode(now=True)
              send(x=3)
          y = aten.nope(self=x)"""
    assert shown == textwrap.dedent(expected)
