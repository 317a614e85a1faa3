"""Complete programs of a small job in every mode, and edits that break them."""

from collections.abc import Callable
from dataclasses import replace

from transpiler.distribute import (
    plan_program,
    pserver_program,
    pserver_startup,
    trainer_program,
    trainer_startup,
)
from transpiler.ir.graph import Argument, Block, Op, Ref, Role, Variable, freeze
from transpiler.ir.rules import Rule
from transpiler.plan.plan import Deployment, Lane, Plan
from transpiler.plan.planner import LanePlan, uniform
from transpiler.program import Program

SGD = {
    "lr": 0.1,
    "momentum": 0.0,
    "dampening": 0.0,
    "weight_decay": 0.0,
    "nesterov": False,
    "maximize": False,
}
Edit = Callable[[Program], Program]
# invariant, mode, which program, op or variable named, how it is broken, what the message says
Broken = tuple[str, str, str, str, Edit, str]
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
    "averaged": LanePlan((("w", Lane("collective")), ("*", Lane("sync")))),
}


def job(mode: str = "sync", trainers: int = 2) -> dict[str, Program]:
    """The programs of a job with two servers; in the mode "run time" gradients are split there."""
    main, startup = single_node()
    plan = plan_program(main, lanes=LANES[mode], trainers=trainers, servers=2, min_block_size=6)
    trainer = Deployment(plan, ENDPOINTS, 0, runtime_split_send_recv=mode == "run time")
    server = Deployment(plan, ENDPOINTS, None, 0)
    return {
        "trainer": trainer_program(main, trainer),
        "trainer startup": trainer_startup(startup, trainer),
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
