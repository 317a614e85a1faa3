"""What a server asks of a program that came over the wire before it believes a word of it.

The message has been parsed and every op held against the catalogue (``serialize.from_proto``).
Here the rest: the plan makes sense by itself (``untrusted_plan.py``), the blocks are the shape of a
pserver's program, every name is defined, and tensors that meet have the same shape.  A program that
passes allocates what its variables say and reads nothing else.

[Note: the shape of a pserver's program]  Block 0 defines variables and ends in its only op,
``listen_and_serv``, whose ``optimize_blocks`` name every other block once.  Other blocks refer to
no block, so there is no cycle.  Each slice that the plan gives to this server is a variable of its
shape and dtype; each trained one is updated by exactly one optimizer op, by the rule of its group
or its lane's outer one, or, where the lane's trainers step by themselves, by one sum of it and a
delta.  Each table of the plan has two blocks, one that updates its rows and one that looks rows up
(``untrusted_tables.py``).
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping

from transpiler.ir.graph import Block, Op, Ref, Role, Variable, refs
from transpiler.ir.ops import allowed_on_server, check, is_optimizer, rule_of_op, states_of_op
from transpiler.ir.schema import where
from transpiler.plan.lanes import applied
from transpiler.plan.plan import Deployment, Lane, Placement, Plan, check_unique
from transpiler.program import Program
from transpiler.verify.untrusted_plan import check_deployment, check_extent, expect
from transpiler.verify.untrusted_tables import (
    blocks_of_tables,
    check_table_variable,
    check_tables,
    is_of_table,
)


def _check_listen(program: Program, deployment: Deployment) -> None:
    ops = program.main.ops
    expect(
        len(ops) == 1 and ops[0].type == "listen_and_serv",
        "block 0: expected one op, "
        "listen_and_serv, got " + (", ".join(op.type for op in ops[:8]) or "none"),
    )
    plan, arguments = deployment.plan, ops[0].arguments
    facts = {"server_index": deployment.server_index, "trainers": plan.trainers, "mode": plan.mode}
    for name, value in facts.items():
        got = arguments[name]
        expect(
            got == value,
            f"block 0, op 'listen_and_serv', argument {name!r}: expected {value!r} as the plan "
            f"says, got {got!r}",
        )
    lookups, _ = blocks_of_tables(program)
    updates = [index for index in range(1, len(program.blocks)) if index not in lookups]
    for key, expected in (("optimize_blocks", updates), ("prefetch_blocks", lookups)):
        named = arguments.get(key)
        indices = (
            [index for index in named if isinstance(index, int)] if isinstance(named, tuple) else []
        )
        which = "other blocks" if key == "optimize_blocks" else "blocks that look rows up"
        what = f"expected each of the {len(expected)} {which} once, got {indices[:8]}"
        expect(
            sorted(indices) == expected, f"block 0, op 'listen_and_serv', argument {key!r}: {what}"
        )


def _check_variables(block: Block, plan: Plan) -> None:
    for name, variable in block.variables.items():
        what = f"block {block.index}, variable {name!r}"
        expect(
            name != "" and name == variable.name,
            f"{what}: expected its own name, got {variable.name!r}",
        )
        if is_of_table(variable, plan):
            check_table_variable(what, variable)
        else:
            check_extent(what, variable.shape, variable.dtype)


def _alike(
    op: Op,
    scope: Mapping[str, Variable],
    argument: str,
    names: Iterable[str],
    like: Variable,
    shape: object = None,
) -> None:
    """Each of the names has the shape and dtype of ``like`` (or the shape given)."""
    shape = like.shape if shape is None else shape
    for name in names:
        got = scope[name]
        fits = got.shape == shape and got.dtype == like.dtype
        expected = (
            f"expected {like.dtype}{list(like.shape)} like {like.name!r}, got "
            f"{got.dtype}{list(got.shape)}"
        )
        expect(fits, f"{where(op)}, argument {argument!r}, variable {name!r}: {expected}")


def _named(op: Op, argument: str) -> str:
    value = op.arguments[argument]
    assert isinstance(value, Ref), "checked against the schema"
    return value.name


def _of_role(
    op: Op, scope: Mapping[str, Variable], argument: str, names: Iterable[str], role: Role
) -> None:
    for name in names:
        got = scope[name]
        expect(
            got.role is role,
            f"{where(op)}, argument {argument!r}: expected a {role.name}, got {got.name!r}, a "
            f"{got.role.name}",
        )


def _check_update(
    op: Op, scope: Mapping[str, Variable], plan: Plan, placement: Placement | None
) -> None:
    param, grad, states = scope[_named(op, "param")], scope[_named(op, "grad")], states_of_op(op)
    for argument, role in {
        "param": Role.PARAMETER,
        "grad": Role.GRADIENT,
        **dict.fromkeys(states, Role.STATE),
    }.items():
        _of_role(op, scope, argument, [_named(op, argument)], role)
    _alike(op, scope, "grad", [grad.name], param)
    for state, shaped in states.items():
        got, shape = scope[_named(op, state)], param.shape if shaped else ()
        expect(
            got.shape == shape,
            f"{where(op)}, argument {state!r}: expected the shape {list(shape)}, got "
            f"{list(got.shape)}",
        )
    if placement is None:
        return  # the plan places no such slice: refused with the slices
    found, group, rule = applied(plan, placement), op.arguments["group"], rule_of_op(op)
    expect(
        found is not None,
        f"{where(op)}: expected an update by group None of {placement.name!r}, got {group}",
    )
    if found is not None:
        expect(
            group == found[0],
            f"{where(op)}, argument 'group': expected {found[0]} as the plan says, got {group}",
        )
        expect(
            rule == found[1],
            f"{where(op)}: expected the rule of group {group}, {found[1]}; got {rule}",
        )


def _facts(op: Op, plan: Plan, lane: Lane, parameter: str) -> dict[str, object]:
    """The arguments that an op on gradients must have by the plan; none where the plan knows no
    such op.
    """
    clip = plan.clip
    if op.type == "scale" and lane.kind.waits_for_all:
        return {"scale": (-1.0 if lane.kind.steps_on_trainer else 1.0) / plan.trainers}
    if op.type == "dc_compensate" and lane.dc_asgd:
        return {"factor": lane.dc_asgd}
    if op.type == "clip" and clip is not None and clip.kind == "value":
        return {"min": clip.low, "max": clip.high}
    if op.type == "norm_scale" and clip is not None and clip.kind != "value":
        return {"by": parameter if clip.kind == "norm" else ""}
    return {}


def _check_sum(op: Op, scope: Mapping[str, Variable], plan: Plan, lane: Lane) -> None:
    if lane.kind.waits_for_all:
        count = len(op.inputs)
        expect(
            count == plan.trainers,
            f"{where(op)}, argument 'x': expected {plan.trainers}, one a trainer, got {count}",
        )
        return
    expect(lane.kind.servers_add, f"{where(op)}: a server does not run it in {lane.mode} mode")
    fits = (
        len(op.inputs) == 2
        and op.inputs[0] == op.outputs[0]
        and scope[op.inputs[1]].role is Role.DELTA
    )
    expect(
        fits,
        f"{where(op)}, argument 'x': expected the parameter {op.outputs[0]!r} and a DELTA, got "
        f"{', '.join(op.inputs)}",
    )


def _check_compensation(op: Op, scope: Mapping[str, Variable], plan: Plan) -> None:
    backups = tuple(refs(op.arguments["backups"]))
    _of_role(op, scope, "grad", [_named(op, "grad")], Role.GRADIENT)
    _of_role(op, scope, "param", [_named(op, "param")], Role.PARAMETER)
    _of_role(op, scope, "backups", backups, Role.STATE)
    count = len(set(backups))
    expect(
        count == plan.trainers,
        f"{where(op)}, argument 'backups': expected {plan.trainers}, one a trainer, got {count}",
    )


def _check_merge(op: Op, scope: Mapping[str, Variable], plan: Plan, lane: Lane) -> None:
    result = scope[op.outputs[0]]
    got = f"{result.name!r}, a {result.role.name}"
    roles = (
        {Role.GRADIENT, Role.TEMPORARY, Role.DELTA}
        if op.type != "sum" or not lane.kind.servers_add
        else {Role.PARAMETER}
    )
    expected = "the parameter" if Role.PARAMETER in roles else "a gradient"
    expect(result.role in roles, f"{where(op)}: expected to write {expected}, got {got}")
    _alike(op, scope, "x", op.inputs, result)
    if op.type == "sum":
        _check_sum(op, scope, plan, lane)
        return
    facts = _facts(op, plan, lane, result.of)
    expect(
        bool(facts),
        f"{where(op)}: the plan clips by {plan.clip}, and the lane is {lane}, so a server does "
        "not run it",
    )
    for name, value in facts.items():
        given = op.arguments[name]
        expect(
            given == value,
            f"{where(op)}, argument {name!r}: expected {value!r} as the plan says, got {given!r}",
        )
    if op.type == "dc_compensate":
        _check_compensation(op, scope, plan)


def _check_op(
    op: Op, scope: Mapping[str, Variable], plan: Plan, placement: Placement | None
) -> None:
    expect(
        allowed_on_server(op.type) and op.type not in ("init", "listen_and_serv"),
        f"{where(op)}: a server runs no such op",
    )
    check(op)
    for name in (*op.inputs, *op.outputs):
        expect(
            name in scope,
            f"{where(op)}: expected variables of its block or of block 0, got {name!r}",
        )
    if is_optimizer(op.type):
        _check_update(op, scope, plan, placement)
        return
    _check_merge(op, scope, plan, plan.lanes[0] if placement is None else plan.lane_of(placement))


def _check_block(
    block: Block, scope: Mapping[str, Variable], plan: Plan, placements: Mapping[str, Placement]
) -> None:
    check_unique(
        f"block {block.index}: op",
        ("optimizer" if is_optimizer(op.type) else op.type for op in block.ops),
    )
    updated = {name for op in block.ops for name in (*op.inputs, *op.outputs) if name in placements}
    what = f"block {block.index}: expected ops on one slice, got {', '.join(sorted(updated))}"
    expect(len(updated) <= 1, what)
    placement = placements[updated.pop()] if updated else None
    written: set[str] = set()
    for number, op in enumerate(block.ops):
        try:
            _check_op(op, scope, plan, placement)
            for name in op.inputs:
                known = name in written or scope[name].role is not Role.TEMPORARY
                expect(
                    known, f"{where(op)}: expected variables that an earlier op wrote, got {name!r}"
                )
        except ValueError as error:
            raise ValueError(f"block {block.index}, op {number}: {error}") from error
        written.update(op.outputs)


def _updates(program: Program) -> dict[str, object]:
    """The group of every slice that a block updates; "sum" where what trainers changed is added."""
    found: dict[str, object] = {}
    for block in program.blocks[1:]:
        for op in block.ops:
            for name in op.outputs:
                if (
                    name in program.main.variables
                    and program.main.variables[name].role is Role.PARAMETER
                ):
                    found[name] = op.arguments.get("group", op.type)
    return found


def _kept(op: Op) -> Iterable[str]:
    """The states that belong to an op alone."""
    return (
        map(str, refs(op.arguments["backups"]))
        if op.type == "dc_compensate"
        else (_named(op, key) for key in states_of_op(op))
    )


def _check_slices(program: Program, deployment: Deployment) -> None:
    """What the plan places here is defined, and updated once if it is trained."""
    scope = program.main.variables
    _, of_tables = blocks_of_tables(program)
    slices = [block for block in program.blocks if block.index not in of_tables]
    ops = [
        op
        for block in slices
        for op in block.ops
        if is_optimizer(op.type) or op.type == "dc_compensate"
    ]
    check_unique(
        "optimizer ops of parameter", (_named(op, "param") for op in ops if is_optimizer(op.type))
    )
    check_unique("state", (name for op in ops for name in _kept(op)))
    groups = _updates(program)
    placed: set[str] = set()
    for placement in deployment.plan.placements:
        for piece in placement.slices:
            if piece.server == deployment.server_index:
                placed.add(piece.name)
                what = f"slice {piece.name!r} of server {piece.server}"
                held = scope.get(piece.name)
                expect(held is not None, f"{what}: expected a variable of block 0, got none")
                role = held.role if held else Role.TEMPORARY
                expect(
                    role in (Role.PARAMETER, Role.BUFFER),
                    f"{what}: expected a PARAMETER or a BUFFER, got a {role.name}",
                )
                of = held.of if held else ""
                expect(
                    of in ("", placement.name),
                    f"{what}: expected a slice of {placement.name!r}, got one of {of!r}",
                )
                got = (held.shape, held.dtype) if held else ((), "")
                expect(
                    got == (piece.shape, placement.dtype),
                    f"{what}: expected {placement.dtype}{list(piece.shape)}, got "
                    f"{got[1]}{list(got[0])}",
                )
                group, found = groups.get(piece.name), applied(deployment.plan, placement)
                due = found[0] if found is not None else None if placement.group is None else "sum"
                expect(group == due, f"{what}: expected an update by group {due}, got {group}")
    for variable in program.main.variables_of(Role.PARAMETER, Role.BUFFER):
        expect(
            variable.name in placed,
            f"variable {variable.name!r}: the plan places no such slice on this server",
        )


def check_server_program(program: Program) -> None:
    """Holds a pserver's main program against everything above.

    Raises:
        ValueError: naming block, op and argument, what was expected and what came.
    """
    deployment = check_deployment(program.deployment)
    expect(len(program.blocks) >= 1, "expected a program with one block or more, got none")
    for index, block in enumerate(program.blocks):
        expect(block.index == index, f"block {index}: expected its own index, got {block.index}")
        _check_variables(block, deployment.plan)
    check_unique("variable", (name for block in program.blocks for name in block.variables))
    for op in program.main.ops:
        check(op)
    _check_listen(program, deployment)
    shared = dict(program.main.variables)
    placements = {
        piece.name: placement
        for placement in deployment.plan.placements
        for piece in placement.slices
    }
    check_tables(program, deployment.plan)
    _, of_tables = blocks_of_tables(program)
    for block in program.blocks[1:]:
        if block.index not in of_tables:
            _check_block(
                block, ChainMap(dict(block.variables), shared), deployment.plan, placements
            )
    # Blocks may run in any order or together.
    check_unique(
        "variable that blocks write,",
        (name for b in program.blocks for name in {n for op in b.ops for n in op.outputs}),
    )
    _check_slices(program, deployment)
