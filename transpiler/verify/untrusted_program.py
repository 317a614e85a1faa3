"""The validation of untrusted programs: what a server checks before it installs one from the wire.

``serialize.from_proto`` has parsed the message and checked every op against the catalogue.  Here
the server checks that the plan is consistent by itself (``untrusted_plan.py``), that the blocks
have the shape of a pserver's program, that every name is defined, and that the tensors of an op
have matching shapes (``untrusted_blocks.py``).  A program that passes allocates what its variables
declare, and reads nothing else.

[Note: the shape of a pserver's program]  Block 0 defines variables and has one op,
``listen_and_serv``, whose ``optimize_blocks`` and ``prefetch_blocks`` name every other block once.
Other blocks refer to no block, so there is no cycle.  Each slice that the plan gives to this server
is a variable of its shape and dtype.  Each trained slice is updated by exactly one optimizer op, by
the rule of its group or its lane's outer rule, or, in a lane of mode geo, by one sum of it and a
delta.  Each table of the plan has two blocks: one updates its rows, one looks rows up
(``untrusted_tables.py``).
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable

from transpiler.ir.graph import Block, Op, Role, refs
from transpiler.ir.ops import check, is_optimizer, states_of_op
from transpiler.plan.lanes import applied
from transpiler.plan.plan import Deployment, Plan, check_unique
from transpiler.program import Program
from transpiler.verify.untrusted_blocks import check_block, variable_name
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
    expected_values = {
        "server_index": deployment.server_index,
        "trainers": plan.trainers,
        "mode": plan.mode,
    }
    for name, value in expected_values.items():
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


def _updates(program: Program) -> dict[str, object]:
    """The group of every slice that a block updates; "sum" where a delta is added."""
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
    """The states that belong to one op only: backups, or those of an update rule."""
    return (
        map(str, refs(op.arguments["backups"]))
        if op.type == "dc_compensate"
        else (variable_name(op, key) for key in states_of_op(op))
    )


def _check_slices(program: Program, deployment: Deployment) -> None:
    """Checks that the slices placed here are defined, and updated once if they are trained."""
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
        "optimizer ops of parameter",
        (variable_name(op, "param") for op in ops if is_optimizer(op.type)),
    )
    check_unique("state", (name for op in ops for name in _kept(op)))
    groups = _updates(program)
    placed: set[str] = set()
    for placement in deployment.plan.placements:
        for slice_ in placement.slices:
            if slice_.server == deployment.server_index:
                placed.add(slice_.name)
                what = f"slice {slice_.name!r} of server {slice_.server}"
                held = scope.get(slice_.name)
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
                    got == (slice_.shape, placement.dtype),
                    f"{what}: expected {placement.dtype}{list(slice_.shape)}, got "
                    f"{got[1]}{list(got[0])}",
                )
                group, found = groups.get(slice_.name), applied(deployment.plan, placement)
                due = found[0] if found is not None else None if placement.group is None else "sum"
                expect(group == due, f"{what}: expected an update by group {due}, got {group}")
    for variable in program.main.variables_of(Role.PARAMETER, Role.BUFFER):
        expect(
            variable.name in placed,
            f"variable {variable.name!r}: expected a slice that the plan places on this server",
        )


def check_server_program(program: Program) -> None:
    """Checks a pserver's main program that came over the wire.

    See [Note: the shape of a pserver's program].

    Args:
        program: as ``Program.from_proto`` gave it.

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
        slice_.name: placement
        for placement in deployment.plan.placements
        for slice_ in placement.slices
    }
    check_tables(program, deployment.plan)
    _, of_tables = blocks_of_tables(program)
    for block in program.blocks[1:]:
        if block.index not in of_tables:
            check_block(block, ChainMap(dict(block.variables), shared), deployment.plan, placements)
    # Blocks may run in any order or at the same time.
    check_unique(
        "variable that blocks write,",
        (name for b in program.blocks for name in {n for op in b.ops for n in op.outputs}),
    )
    _check_slices(program, deployment)
