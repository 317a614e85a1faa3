"""Each invariant has a test that breaks it."""

import inspect
from collections.abc import Callable
from dataclasses import replace

import pytest

from transpiler.distribute import (
    plan_program,
    pserver_program,
    pserver_startup,
    trainer_program,
    trainer_startup,
)
from transpiler.ir.graph import Argument, Block, Op, Ref, Role, Variable, freeze
from transpiler.ir.rules import Clip, Rule
from transpiler.plan.lane_plan import LanePlan, uniform
from transpiler.plan.plan import Deployment, Lane, Plan, Slice
from transpiler.program import Program
from transpiler.verify import invariants
from transpiler.verify import pserver as pserver_invariants
from transpiler.verify import trainer as trainer_invariants
from transpiler.verify.invariants import IllegalProgram, Violation
from transpiler.verify.verify import Stage, invariants_of, run, verify, verify_servers

SGD = {
    "lr": 0.1,
    "momentum": 0.0,
    "dampening": 0.0,
    "weight_decay": 0.0,
    "nesterov": False,
    "maximize": False,
}
Edit = Callable[[Program], Program]
ENDPOINTS = ("h:1", "h:2")


def single_node() -> tuple[Program, Program]:
    """loss = f(x, w, b) with a frozen scale: w is cut in two, b and the frozen one are whole."""
    shapes = {"w": (4, 3), "b": (3,)}
    variables = [
        Variable("x", ("batch", 4), "float32", Role.INPUT),
        Variable("h", ("batch", 3), "float32"),
    ]
    variables += [
        Variable(name, shape, "float32", Role.PARAMETER) for name, shape in shapes.items()
    ]
    variables += [
        Variable("scale", (), "float32", Role.BUFFER),
        Variable("loss", (), "float32", Role.OUTPUT),
    ]
    variables += [
        Variable(f"{name}@GRAD", shape, "float32", Role.GRADIENT, name)
        for name, shape in shapes.items()
    ]
    ops = [
        Op("aten.addmm", {"self": Ref("b"), "mat1": Ref("x"), "mat2": Ref("w")}, ("h",)),
        Op("aten.sum", {"self": Ref("h")}, ("loss",)),
        Op("aten.ones_like", {"self": Ref("b")}, ("b@GRAD",)),
        Op("aten.ones_like", {"self": Ref("w")}, ("w@GRAD",)),
    ]
    ops += [
        Op("sgd", {"param": Ref(n), "grad": Ref(f"{n}@GRAD"), "group": 0, **SGD}, (n,))
        for n in shapes
    ]
    held = {v.name: v for v in variables if v.role in (Role.PARAMETER, Role.BUFFER)}
    startup = Block(0, freeze(held), tuple(Op("init", {}, (name,)) for name in held))
    return Program((Block(0, freeze({v.name: v for v in variables}), tuple(ops)),)), Program(
        (startup,)
    )


OUTER = Rule(
    "sgd",
    {name: value for name, value in SGD.items() if not isinstance(value, bool)},
    {"nesterov": False},
)
LANES = {
    "sync": uniform(Lane("sync")),
    "async": uniform(Lane("async")),
    "run time": uniform(Lane("async")),
    "half_async": uniform(Lane("half_async")),
    "dc": uniform(Lane("async", dc_asgd=0.5)),
    "geo": uniform(Lane("geo", k_steps=5)),
    "diloco": uniform(Lane("diloco", k_steps=5, outer=OUTER)),
    "mixed": LanePlan((("w", Lane("geo", k_steps=5)), ("*", Lane("sync")))),
}


def job(mode: str = "sync", trainers: int = 2) -> dict[str, Program]:
    """The programs of a job with two servers; in the mode "run time" gradients are split there."""
    main, startup = single_node()
    plan = plan_program(main, lanes=LANES[mode], trainers=trainers, servers=2, min_block_size=6)
    trainer = Deployment(plan, ENDPOINTS, 0)
    server = Deployment(plan, ENDPOINTS, None, 0)
    return {
        "trainer": trainer_program(main, trainer, mode == "run time"),
        "trainer startup": trainer_startup(startup, trainer, mode == "run time"),
        "server": pserver_program(server),
        "server startup": pserver_startup(server),
    }


def plan_of(program: Program) -> Plan:
    """The plan in a program."""
    assert program.deployment is not None
    return program.deployment.plan


def with_ops(program: Program, ops: list[Op], block: int = 0) -> Program:
    """The program with other ops in one block."""
    blocks = program.blocks
    blocks[block] = replace(blocks[block], ops=tuple(ops))
    return program.with_blocks(*blocks)


def with_variable(program: Program, variable: Variable) -> Program:
    """The program with one more, or another, variable in block 0."""
    blocks = program.blocks
    blocks[0] = replace(
        blocks[0], variables=freeze({**blocks[0].variables, variable.name: variable})
    )
    return program.with_blocks(*blocks)


def index(program: Program, kind: str, nth: int = 0) -> int:
    """Position of the nth op of a type in block 0."""
    return [i for i, op in enumerate(program.main.ops) if op.type == kind][nth]


def without(kind: str, nth: int = 0, block: int = 0) -> Edit:
    """Drops the nth op of a type."""

    def edit(program: Program) -> Program:
        ops = list(program.blocks[block].ops)
        del ops[[i for i, op in enumerate(ops) if op.type == kind][nth]]
        return with_ops(program, ops, block)

    return edit


def twice(kind: str, nth: int = 0) -> Edit:
    """Repeats the nth op of a type."""

    def edit(program: Program) -> Program:
        ops = list(program.main.ops)
        ops.insert(index(program, kind, nth), ops[index(program, kind, nth)])
        return with_ops(program, ops)

    return edit


def moved(kind: str, to: int, nth: int = 0) -> Edit:
    """Moves the nth op of a type to another position."""

    def edit(program: Program) -> Program:
        ops = list(program.main.ops)
        ops.insert(to if to >= 0 else len(ops), ops.pop(index(program, kind, nth)))
        return with_ops(program, ops)

    return edit


def changed(
    kind: str,
    nth: int = 0,
    block: int = 0,
    outputs: tuple[str, ...] | None = None,
    **arguments: Argument,
) -> Edit:
    """Changes arguments or outputs of the nth op of a type."""

    def edit(program: Program) -> Program:
        ops = list(program.blocks[block].ops)
        at = [i for i, op in enumerate(ops) if op.type == kind][nth]
        new = {**ops[at].arguments, **arguments}
        ops[at] = replace(
            ops[at], arguments=new, outputs=ops[at].outputs if outputs is None else outputs
        )
        return with_ops(program, ops, block)

    return edit


def added(op: Op, to: int, block: int = 0) -> Edit:
    """Puts an op in."""

    def edit(program: Program) -> Program:
        ops = list(program.blocks[block].ops)
        ops.insert(to if to >= 0 else len(ops), op)
        return with_ops(program, ops, block)

    return edit


UPDATE = Op("sgd", {"param": Ref("b"), "grad": Ref("b@GRAD"), "group": 0, **SGD}, ("b",))
COMPUTE = Op("aten.add.Tensor", {"self": Ref("b"), "other": Ref("b")}, ("h",))

BROKEN: list[tuple[str, str, str, str, Edit, str]] = [
    # invariant, mode, which program, op or variable named, how it is broken, what the message says
    ("updated_in_one_place", "sync", "trainer", "sgd", added(UPDATE, 4), "the servers update"),
    (
        "updated_in_one_place",
        "sync",
        "trainer",
        "b@m",
        lambda p: with_variable(p, Variable("b@m", (3,), "float32", Role.STATE, "b")),
        "the servers hold",
    ),
    ("sent_exactly_once", "sync", "trainer", "b@GRAD", without("send"), "never sent"),
    ("sent_exactly_once", "async", "trainer", "b@GRAD", twice("send"), "a second time"),
    (
        "sent_exactly_once",
        "sync",
        "trainer",
        "w@GRAD",
        changed("send", 1, x=(Ref("w@GRAD.block0"),), endpoints=("h:1",)),
        "in 2 slices",
    ),
    (
        "sent_exactly_once",
        "sync",
        "trainer",
        "w@GRAD.block0",
        changed("send", 1, endpoints=("h:2", "h:1")),
        "expected",
    ),
    (
        "sent_exactly_once",
        "sync",
        "trainer",
        "b",
        changed("send", 0, x=(Ref("b"),)),
        "is no gradient",
    ),
    (
        "sent_when_final",
        "sync",
        "trainer",
        "b@GRAD",
        added(Op("aten.ones_like", {"self": Ref("b")}, ("b@GRAD",)), 6),
        "before the op that produces it",
    ),
    (
        "sent_when_final",
        "sync",
        "trainer",
        "w@GRAD",
        changed("split", sections=(3, 9)),
        "expected sections",
    ),
    ("parameters_received_once", "sync", "trainer", "b", without("recv", 1), "never received"),
    ("parameters_received_once", "sync", "trainer", "w", twice("recv"), "a second time"),
    (
        "parameters_received_once",
        "sync",
        "trainer",
        "b",
        changed("recv", 1, endpoints=("h:2",)),
        "expected",
    ),
    (
        "parameters_received_once",
        "sync",
        "trainer",
        "w",
        changed("recv", 0, outputs=("w.block1", "w.block0")),
        "expected 2 slices",
    ),
    (
        "parameters_received_once",
        "sync",
        "trainer startup",
        "scale",
        without("recv", 2),
        "never received",
    ),
    ("received_after_sending", "async", "trainer", "recv", moved("recv", 0), "received before"),
    (
        "received_after_sending",
        "sync",
        "trainer",
        "aten.add.Tensor",
        added(COMPUTE, -1),
        "of the next step",
    ),
    (
        "barriers_exactly_where_due",
        "sync",
        "trainer",
        "send_barrier",
        without("send_barrier"),
        "expected 1 send_barrier, got 0",
    ),
    (
        "barriers_exactly_where_due",
        "sync",
        "trainer",
        "fetch_barrier",
        twice("fetch_barrier"),
        "expected 1 fetch_barrier, got 2",
    ),
    (
        "barriers_exactly_where_due",
        "async",
        "trainer",
        "send_barrier",
        added(Op("send_barrier", {"endpoints": ENDPOINTS, "trainer_id": 0}), 8),
        "expected 0 send_barrier, got 1",
    ),
    (
        "barriers_exactly_where_due",
        "sync",
        "trainer",
        "recv",
        moved("send_barrier", 9),
        "expected the order",
    ),
    (
        "barriers_exactly_where_due",
        "sync",
        "trainer startup",
        "fetch_barrier",
        without("fetch_barrier"),
        "expected 1",
    ),
    (
        "concatenated_after_arrival",
        "sync",
        "trainer",
        "w",
        without("concat"),
        "expected one concat",
    ),
    (
        "concatenated_after_arrival",
        "sync",
        "trainer",
        "w",
        changed("concat", x=(Ref("w.block1"), Ref("w.block0"))),
        "in this order",
    ),
    (
        "concatenated_after_arrival",
        "sync",
        "trainer",
        "w.block0",
        moved("concat", 10),
        "before it has been received",
    ),
    (
        "slices_held",
        "sync",
        "server",
        "scale",
        lambda p: with_variable(p, Variable("scale", (7,), "float32", Role.BUFFER, "scale")),
        "does not live on server 0",
    ),
    (
        "slices_held",
        "sync",
        "server",
        "w.block0",
        lambda p: with_variable(p, Variable("w.block0", (2, 3), "float64", Role.PARAMETER, "w")),
        "float64",
    ),
    ("listens_once", "sync", "server", "listen_and_serv", without("listen_and_serv"), "got none"),
    (
        "listens_once",
        "sync",
        "server",
        "listen_and_serv",
        twice("listen_and_serv"),
        "expected one op",
    ),
    (
        "listens_once",
        "sync",
        "server",
        "optimize_blocks",
        changed("listen_and_serv", optimize_blocks=(1,)),
        "(1, 2)",
    ),
    (
        "only_server_ops",
        "sync",
        "server startup",
        "aten.add.Tensor",
        added(COMPUTE, 0),
        "servers do not run",
    ),
    (
        "optimize_blocks_complete",
        "sync",
        "server",
        "w.block0",
        without("sum", block=1),
        "expected sum, scale, sgd",
    ),
    (
        "optimize_blocks_complete",
        "async",
        "server",
        "w.block0",
        added(
            Op("scale", {"x": Ref("w@GRAD.block0"), "scale": 0.5}, ("w@GRAD.block0",)), 0, block=1
        ),
        "got scale, sgd",
    ),
    (
        "optimize_blocks_complete",
        "sync",
        "server",
        "trainer_1",
        changed("sum", block=1, x=(Ref("w@GRAD.block0.trainer_0"),)),
        "x: expected ('w@GRAD.block0.trainer_0', 'w@GRAD.block0.trainer_1')",
    ),
    (
        "optimize_blocks_complete",
        "sync",
        "server",
        "scale",
        changed("scale", block=1, scale=1.0),
        "scale: expected 0.5",
    ),
    (
        "optimize_blocks_complete",
        "sync",
        "server",
        "block 1",
        without("sgd", block=1),
        "one optimizer op, got 0",
    ),
    (
        "optimize_blocks_complete",
        "sync",
        "server",
        "w.block0",
        changed("sgd", block=1, group=1),
        "expected group 0",
    ),
    (
        "optimize_blocks_complete",
        "sync",
        "server",
        "sgd",
        changed("sgd", block=1, grad=Ref("b@GRAD")),
        "the op before it",
    ),
    (
        "optimize_blocks_complete",
        "sync",
        "server",
        "b",
        changed("sgd", block=1, outputs=("b",)),
        "expected",
    ),
    (
        "optimize_blocks_complete",
        "sync",
        "server",
        "b",
        lambda p: p.with_blocks(*p.blocks[:2]),
        "no block updates it",
    ),
    # k-step lanes
    (
        "updated_in_one_place",
        "geo",
        "trainer",
        "w",
        without("sgd"),
        "expected one update on this trainer, got none",
    ),
    ("updated_in_one_place", "geo", "trainer", "w", twice("sgd"), "a second update"),
    ("updated_in_one_place", "mixed", "trainer", "b", added(UPDATE, 4), "the servers update"),
    ("changes_sent_once", "geo", "trainer", "", without("send"), "expected 1 sends of deltas"),
    (
        "changes_sent_once",
        "diloco",
        "trainer",
        "send",
        twice("send"),
        "expected 1 sends of deltas",
    ),
    (
        "changes_sent_once",
        "sync",
        "trainer",
        "send",
        changed("send", sections=(3,), delta=("b.delta",), mode="geo", k_steps=5),
        "expected 0 sends of deltas",
    ),
    ("changes_sent_once", "geo", "trainer", "w", moved("send", 4), "it changes after"),
    (
        "changes_sent_once",
        "geo",
        "trainer",
        "b",
        changed("send", delta=("w.block0.delta", "b.delta", "w.block1.delta")),
        "delta:",
    ),
    (
        "changes_sent_once",
        "geo",
        "trainer",
        "w",
        changed("send", x=(Ref("w"),)),
        "x: expected ('w', 'b')",
    ),
    (
        "changes_sent_once",
        "geo",
        "trainer",
        "w",
        changed("send", endpoints=("h:1",) * 3),
        "endpoints: expected",
    ),
    (
        "changes_sent_once",
        "geo",
        "trainer",
        "w",
        changed("send", sections=(6, 5, 4)),
        "sections: expected (6, 6, 3)",
    ),
    (
        "changes_sent_once",
        "geo",
        "trainer",
        "w",
        changed("send", mode="diloco"),
        "mode: expected geo",
    ),
    (
        "changes_sent_once",
        "diloco",
        "trainer",
        "w",
        changed("send", k_steps=6),
        "k_steps: expected 5",
    ),
    (
        "sent_exactly_once",
        "mixed",
        "trainer",
        "w@GRAD",
        added(
            Op(
                "send",
                {
                    "x": (Ref("w@GRAD"),),
                    "endpoints": ("h:1", "h:2"),
                    "sections": (6, 6),
                    "trainer_id": 0,
                },
            ),
            4,
        ),
        "is no gradient of an updated parameter",
    ),
    (
        "parameters_received_once",
        "geo",
        "trainer",
        "b",
        added(Op("recv", {"param": "b", "endpoints": ("h:1",), "trainer_id": 0}, ("b",)), -1),
        "nothing that servers update",
    ),
    (
        "barriers_exactly_where_due",
        "half_async",
        "trainer",
        "send_barrier",
        changed("send_barrier", half_async=False),
        "expected 0 send_barrier, got 1",
    ),
    (
        "barriers_exactly_where_due",
        "half_async",
        "trainer",
        "",
        without("send_barrier"),
        "expected 1 send_barrier of the trainer's own, got 0",
    ),
    (
        "barriers_exactly_where_due",
        "mixed",
        "trainer",
        "",
        without("send_barrier"),
        "expected 1 send_barrier, got 0",
    ),
    (
        "barriers_exactly_where_due",
        "geo",
        "trainer",
        "fetch_barrier",
        added(Op("fetch_barrier", {"endpoints": ENDPOINTS, "trainer_id": 0}), -1),
        "expected 0 fetch_barrier, got 1",
    ),
    (
        "optimize_blocks_complete",
        "geo",
        "server",
        "w.block0",
        changed("sum", block=1, x=(Ref("w.block0"), Ref("b.delta"))),
        "x: expected ('w.block0', 'w.block0.delta')",
    ),
    (
        "optimize_blocks_complete",
        "geo",
        "server",
        "w.block0",
        changed("sum", block=1, outputs=("w.block0.delta",)),
        "expected one optimizer op, got 0",
    ),
    (
        "optimize_blocks_complete",
        "diloco",
        "server",
        "w.block0",
        changed("scale", block=1, scale=0.5),
        "scale: expected -0.5",
    ),
    (
        "optimize_blocks_complete",
        "diloco",
        "server",
        "w.block0",
        changed("sgd", block=1, group=0),
        "expected group 1",
    ),
    (
        "optimize_blocks_complete",
        "diloco",
        "server",
        "w.block0",
        changed("sum", block=1, x=(Ref("w.block0.delta.trainer_0"),)),
        "x: expected ('w.block0.delta.trainer_0', 'w.block0.",
    ),
    (
        "optimize_blocks_complete",
        "dc",
        "server",
        "w.block0",
        without("dc_compensate", block=1),
        "expected dc_compensate, sgd",
    ),
    (
        "optimize_blocks_complete",
        "dc",
        "server",
        "w.block0",
        changed("dc_compensate", block=1, factor=0.25),
        "factor: expected 0.5",
    ),
    (
        "optimize_blocks_complete",
        "dc",
        "server",
        "w.block0",
        changed("dc_compensate", block=1, backups=(Ref("w.block0.trainer_1_bak"),) * 2),
        "backups: expected",
    ),
    (
        "optimize_blocks_complete",
        "mixed",
        "server",
        "w.block0",
        added(Op("scale", {"x": Ref("w.block0"), "scale": 0.5}, ("w.block0",)), 1, block=1),
        "expected one optimizer op, got 2",
    ),
    # split at run time
    (
        "sent_when_final",
        "run time",
        "trainer",
        "w@GRAD",
        changed("send", 1, sections=(3, 9)),
        "expected sections (6, 6)",
    ),
    (
        "sent_exactly_once",
        "run time",
        "trainer",
        "w@GRAD",
        changed("send", 1, endpoints=("h:2", "h:1")),
        "expected",
    ),
    (
        "parameters_received_once",
        "run time",
        "trainer",
        "w",
        changed("recv", 0, sections=(3, 9)),
        "expected 2 slices",
    ),
    (
        "parameters_received_once",
        "run time",
        "trainer startup",
        "w",
        without("recv"),
        "never received",
    ),
    ("slices_initialised", "sync", "server startup", "b", without("init", 1), "got 0"),
    (
        "defined_before_use",
        "sync",
        "trainer",
        "ghost",
        added(Op("aten.neg", {"self": Ref("ghost")}, ("h",)), 0),
        "neither block defines",
    ),
    (
        "defined_before_use",
        "sync",
        "trainer",
        "h",
        added(Op("aten.neg", {"self": Ref("h")}, ("loss",)), 0),
        "before an op gives it a value",
    ),
]


@pytest.mark.parametrize(
    "case", BROKEN, ids=lambda case: f"{case[0]}-{case[1]}-{case[2].replace(' ', '_')}-{case[3]}"
)
def test_a_broken_law_is_named(case: tuple[str, str, str, str, Edit, str]) -> None:
    """A program that violates an invariant is refused, with the invariant's sentence, the op or variable, and what
    is wrong.
    """
    invariant, mode, which, named, edit, words = case
    program = job(mode)[which]
    verify(program, plan_of(program))  # lawful before the edit
    broken = edit(program)
    module = next(
        m for m in (invariants, trainer_invariants, pserver_invariants) if hasattr(m, invariant)
    )
    violations = list(getattr(module, invariant)(broken, plan_of(program)))
    assert violations, "the invariant sees nothing"
    assert any(words in violation.why for violation in violations)
    assert any(
        named in f"{violation.op} {violation.variable} {violation.why}" for violation in violations
    )
    with pytest.raises(IllegalProgram):
        verify(broken, plan_of(program))


def test_every_law_has_a_test_that_breaks_it() -> None:
    """Whatever invariant a complete program is held against stands in the table above, or in a test of
    its own below; those of tables in test_tables.py.
    """
    broken = {case[0] for case in BROKEN} | {"slices_tile"}
    invariants = {
        invariant
        for programs in map(job, LANES)
        for program in programs.values()
        for invariant in invariants_of(program)
    }
    used = {
        invariant.__name__
        for invariant in invariants
        if invariant.__module__ != "transpiler.verify.tables"
    }
    assert used == broken


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        (
            [Slice("w.block0", 0, 6, (2, 3), 0), Slice("w.block1", 7, 12, (5,), 1)],
            "from element 6, got [7, 12)",
        ),
        (
            [Slice("w.block0", 0, 6, (2, 3), 0), Slice("w.block1", 3, 12, (3, 3), 1)],
            "from element 6, got [3, 12)",
        ),
        ([Slice("w", 0, 9, (3, 3), 0)], "slices of 12 elements in all, got 9"),
        ([Slice("w", 0, 12, (4, 4), 0)], "expected 12 elements, got shape [4, 4]"),
        ([Slice("w", 0, 6, (2, 3), 0), Slice("w", 6, 12, (2, 3), 1)], "two slices have this name"),
        ([Slice("w", 0, 12, (4, 3), 2)], "expected a server from 0 to 1, got 2"),
    ],
)
def test_slices_tile_the_parameter(pieces: list[Slice], words: str) -> None:
    """A plan whose slices leave a gap, overlap, fall short, share a name or name no server is
    refused.
    """
    program = job()["trainer"]
    plan = plan_of(program)
    bad = replace(
        plan, placements=(replace(plan.placement("w"), slices=tuple(pieces)), *plan.placements[1:])
    )
    with pytest.raises(IllegalProgram, match="follow one another without gap") as raised:
        verify(program, bad)
    assert words in str(raised.value)


def test_every_slice_is_owned_once_over_all_servers() -> None:
    """The servers' programs together hold each slice once: not twice, not never, and there is one
    program for each server.
    """
    plan = plan_of(job()["server"])
    programs = [pserver_program(Deployment(plan, ENDPOINTS, None, server)) for server in range(2)]
    verify_servers(programs, plan)
    extra = programs[0].main.variables["w.block0"]
    with pytest.raises(IllegalProgram, match=r"w.block0: expected one owner, got servers \[0, 1\]"):
        verify_servers([programs[0], with_variable(programs[1], extra)], plan)
    rest = {
        name: variable
        for name, variable in programs[0].main.variables.items()
        if name != "w.block0"
    }
    emptied = programs[0].with_blocks(
        replace(programs[0].main, variables=freeze(rest)), *programs[0].blocks[1:]
    )
    with pytest.raises(IllegalProgram, match=r"w.block0: expected one owner, got servers \[\]"):
        verify_servers([emptied, programs[1]], plan)
    with pytest.raises(IllegalProgram, match="one program for each of 2 servers"):
        verify_servers(programs[:1], plan)


def test_where_servers_clip_a_trainer_must_not() -> None:
    """A clip op left on a trainer of a job whose servers clip is refused."""
    program = job()["trainer"]
    plan = replace(plan_of(program), clip=Clip("value", 1.0, -1.0))
    clipped = added(Op("clip", {"x": Ref("b@GRAD"), "min": -1.0, "max": 1.0}, ("h",)), 4)(program)
    with pytest.raises(IllegalProgram, match="the servers clip the merged gradient"):
        verify(clipped, plan)


def test_laws_are_checked_after_every_pass() -> None:
    """A pass that violates an invariant established by an earlier one is caught before the next pass
    runs.
    """
    program = job()["trainer"]
    seen: list[str] = []

    def harmless(program: Program, plan: Plan) -> Program:
        seen.append("harmless")
        return program

    def careless(program: Program, plan: Plan) -> Program:
        seen.append("careless")
        return without("send")(program)

    def never(program: Program, plan: Plan) -> Program:
        seen.append("never")
        return program

    stages = [
        Stage(harmless, (trainer_invariants.sent_exactly_once,)),
        Stage(careless),
        Stage(never),
    ]
    with pytest.raises(IllegalProgram, match="b@GRAD: it is never sent"):
        run(program, plan_of(program), stages)
    assert seen == ["harmless", "careless"]


def test_the_message_names_op_variable_and_law() -> None:
    """An IllegalProgram says where, what and by which invariant, and keeps them for whoever handles
    it.
    """
    program = job()["trainer"]
    with pytest.raises(IllegalProgram) as raised:
        verify(twice("send")(program), plan_of(program))
    assert str(raised.value).startswith("op 4 of block 0 (send), b@GRAD: it is sent a second time")
    assert "invariant: Each gradient is sent exactly once" in str(raised.value)
    assert isinstance(raised.value, ValueError) and isinstance(raised.value.violation, Violation)


def test_a_law_is_a_sentence() -> None:
    """Every invariant's docstring begins with the sentence that its error quotes."""
    for mode in LANES:
        for program in job(mode).values():
            for invariant in invariants_of(program):
                assert (inspect.getdoc(invariant) or "").split("\n\n")[0].endswith(".")


def test_a_single_node_program_has_no_laws_of_a_cluster() -> None:
    """verify asks for a program of a cluster."""
    main, _ = single_node()
    plan = plan_of(job()["trainer"])
    with pytest.raises(ValueError, match="got a single-node one"):
        verify(main, plan)
