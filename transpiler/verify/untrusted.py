"""The checks of a server before it installs a program from the wire: its plan, blocks and tables.

[Note: the shape of a pserver's program]  Block 0 defines variables and has one op,
``listen_and_serv``, whose ``optimize_blocks`` and ``prefetch_blocks`` name every other block once.
Other blocks refer to no block, so there is no cycle.  Each slice that the plan gives to this server
is a variable of its shape and dtype.  Each trained slice is updated by exactly one optimizer op, by
the rule of its group or its lane's outer rule, or, in a lane of mode geo, by one sum of it and a
delta.  Each table of the plan has two blocks: one updates its rows, one looks rows up.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Iterable, Mapping

from transpiler.ir.graph import Block, Op, Ref, Role, Variable, refs
from transpiler.ir.ops import (
    allowed_on_server,
    check,
    check_rule,
    is_optimizer,
    rule_of_op,
    states_of_op,
)
from transpiler.ir.python_functions import refuse
from transpiler.ir.rules import check_registered, is_dense
from transpiler.ir.schema import DTYPES, where
from transpiler.plan.lanes import applied, check_lane
from transpiler.plan.plan import (
    COMPRESSIONS,
    Deployment,
    Lane,
    Placement,
    Plan,
    Slice,
    check_unique,
)
from transpiler.plan.planner import check_table, row_rule
from transpiler.plan.settings import A_SYNC_CONFIGS
from transpiler.program import Program
from transpiler.verify.invariants import table_of_block
from transpiler.verify.tables import table_blocks_complete, tables_held

# ---- untrusted plan ----
#
# The checks of a plan, and of its deployment, that came over the wire.
#
# This is the part of the validation that needs no program.


CLIPS = ("value", "norm", "global_norm")
MOST_PROCESSES = 65536  # of a kind
MOST_LANES = 65536
MOST_DIMENSIONS = 64  # torch's own limit
MOST_BYTES = 2**46  # of one variable: beyond any machine, and far from the end of 64 bits


def expect(holds: bool, what: str) -> None:
    """Raises a ValueError with the message ``what`` unless the condition holds."""
    if not holds:
        raise ValueError(what)


def check_extent(what: str, shape: Iterable[int | str], dtype: str) -> None:
    """Checks that a variable has a dtype of torch's, and fixed sizes that a machine could hold.

    Raises:
        ValueError: naming the variable.
    """
    sizes = [size if isinstance(size, int) else -1 for size in shape]
    expect(dtype in DTYPES, f"{what}: expected a dtype among {', '.join(DTYPES)}; got {dtype!r}")
    expect(
        len(sizes) <= MOST_DIMENSIONS,
        f"{what}: expected {MOST_DIMENSIONS} dimensions or fewer, got {len(sizes)}",
    )
    expect(
        min(sizes, default=0) >= 0, f"{what}: expected fixed sizes of 0 or more, got {list(shape)}"
    )
    limit = f"{what}: expected {MOST_BYTES} bytes or fewer, got {dtype}{list(shape)}"
    expect(math.prod(size or 1 for size in sizes) * DTYPES[dtype].itemsize <= MOST_BYTES, limit)


def _check_slice(what: str, placement: Placement, slice_: Slice, begin: int, servers: int) -> None:
    expect(slice_.name != "", f"{what}: expected slices with names, got an empty one")
    what = f"{what}, slice {slice_.name!r}"
    expect(
        slice_.begin == begin <= slice_.end,
        f"{what}: expected elements from {begin} on, got [{slice_.begin}, {slice_.end})",
    )
    expect(
        0 <= slice_.server < servers,
        f"{what}: expected a server of 0 to {servers - 1}, got {slice_.server}",
    )
    check_extent(what, slice_.shape, placement.dtype)
    whole = placement.shape if len(placement.slices) == 1 else (slice_.end - slice_.begin,)
    rows = (slice_.shape[:1] or (0,)) + placement.shape[1:]
    fits = slice_.shape in (whole, rows) and math.prod(slice_.shape) == slice_.end - slice_.begin
    expect(
        fits,
        f"{what}: expected a shape for {slice_.end - slice_.begin} elements of "
        f"{list(placement.shape)}, got {list(slice_.shape)}",
    )


def _check_placement(placement: Placement, plan: Plan) -> None:
    expect(placement.name != "", "plan: expected variables with names, got an empty one")
    what = f"plan, variable {placement.name!r}"
    check_extent(what, placement.shape, placement.dtype)
    expect(
        placement.compression in COMPRESSIONS,
        f"{what}: expected a known compression, got {placement.compression!r}",
    )
    if placement.group is not None:
        expect(
            0 <= placement.group < len(plan.groups),
            f"{what}: expected a group below {len(plan.groups)}, got {placement.group}",
        )
        rule = plan.groups[placement.group].type
        expect(
            is_dense(rule),
            f"{what}: expected a group with a rule for dense parameters, got {rule!r}",
        )
        trainable = DTYPES[placement.dtype].is_floating_point or DTYPES[placement.dtype].is_complex
        expect(
            trainable,
            f"{what}: expected a floating-point dtype to train, got {placement.dtype}",
        )
    expect(
        0 <= placement.lane < len(plan.lanes),
        f"{what}: expected a lane below {len(plan.lanes)}, got {placement.lane}",
    )
    _check_placement_update(what, placement, plan)
    begin = 0
    for slice_ in placement.slices:
        _check_slice(what, placement, slice_, begin, plan.servers)
        begin = slice_.end
    total = math.prod(placement.shape)
    expect(
        len(placement.slices) > 0 and begin == total,
        f"{what}: expected slices of all {total} elements, got {begin}",
    )


def _check_placement_update(what: str, placement: Placement, plan: Plan) -> None:
    """Checks that a rule fits the variable: a registered one its dtype, and a whole tensor if the
    rule computes a number of it.
    """
    found = applied(plan, placement)
    if found is None:
        return
    try:
        if found[1].update is not None:
            check_registered(found[1], DTYPES[placement.dtype])
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error
    expect(
        not found[1].whole or len(placement.slices) == 1,
        f"{what}: expected one slice, because the rule {found[1].type!r} computes a number of the "
        f"whole tensor, got {len(placement.slices)}",
    )


def check_plan(plan: Plan) -> None:
    """Checks that a plan is consistent by itself.

    Raises:
        ValueError: naming the variable, slice, group or field, what was expected and what came.
    """
    expect(
        plan.collective is None, f"plan: expected one of a job with servers, got mode {plan.mode}"
    )
    expect(
        1 <= len(plan.lanes) <= MOST_LANES,
        f"plan: expected 1 to {MOST_LANES} lanes, got {len(plan.lanes)}",
    )
    for index, lane in enumerate(plan.lanes):
        check_lane(lane, f"plan, lane {index}")
    for what, count in (("trainers", plan.trainers), ("servers", plan.servers)):
        expect(
            1 <= count <= MOST_PROCESSES,
            f"plan: expected 1 to {MOST_PROCESSES} {what}, got {count}",
        )
    of_rows = {segment.group for table in plan.tables for segment in table.segments}
    of_rows -= {placement.group for placement in plan.placements if placement.group is not None}
    for index, rule in enumerate(plan.groups):
        try:
            if index not in of_rows:
                check_rule(rule)
            else:
                row_rule(rule, "rows")
        except ValueError as error:
            raise ValueError(f"plan, group {index}: {error}") from error
    if plan.clip is not None:
        expect(
            plan.clip.kind in CLIPS,
            f"plan, clip: expected a kind among {', '.join(CLIPS)}; got {plan.clip.kind!r}",
        )
        numbers = f"low {plan.clip.low}, high {plan.clip.high}"
        expect(
            not math.isnan(plan.clip.low + plan.clip.high),
            f"plan, clip: expected numbers, got {numbers}",
        )
    for placement in plan.placements:
        _check_placement(placement, plan)
    A_SYNC_CONFIGS["lost_trainer"].kind.check("plan, lost_trainer", plan.lost_trainer)
    for table in plan.tables:
        check_table(table, plan.groups, plan.lanes)
    check_unique(
        "plan, variable", [p.name for p in plan.placements] + [table.name for table in plan.tables]
    )
    check_unique(
        "plan, slice", (slice_.name for placement in plan.placements for slice_ in placement.slices)
    )


def check_deployment(deployment: Deployment | None) -> Deployment:
    """Checks that a deployment is a server's, and consistent by itself.

    Returns:
        The deployment.

    Raises:
        ValueError: there is none, it is a trainer's, its counts contradict each other, or its plan
            is inconsistent.
    """
    if deployment is None:
        raise ValueError("expected a pserver's program, which has a deployment, got one without")
    check_plan(deployment.plan)
    servers, index = deployment.plan.servers, deployment.server_index
    expect(
        len(deployment.endpoints) == servers,
        f"deployment: expected {servers} endpoints, got {len(deployment.endpoints)}",
    )
    expect(
        "" not in deployment.endpoints, "deployment: expected endpoints HOST:PORT, got an empty one"
    )
    expect(
        index is not None and 0 <= index < servers,
        f"deployment: expected a server_index of 0 to {servers - 1}, got {index}",
    )
    expect(
        deployment.trainer_id is None,
        f"deployment: expected a server's, got that of trainer {deployment.trainer_id}",
    )
    return deployment


# ---- untrusted blocks ----
#
# The checks of the blocks that update slices, in a program that came over the wire.
#
# The ops of a block are those that a server runs, their variables are defined and have the roles,
# shapes and dtypes that the op needs, and their arguments are those that the plan asks for.


def _alike(
    op: Op,
    scope: Mapping[str, Variable],
    argument: str,
    names: Iterable[str],
    like: Variable,
    shape: object = None,
) -> None:
    """Checks that each of the variables has the dtype and the shape of ``like``, or ``shape``."""
    shape = like.shape if shape is None else shape
    for name in names:
        got = scope[name]
        fits = got.shape == shape and got.dtype == like.dtype
        expected = (
            f"expected {like.dtype}{list(like.shape)} like {like.name!r}, got "
            f"{got.dtype}{list(got.shape)}"
        )
        expect(fits, f"{where(op)}, argument {argument!r}, variable {name!r}: {expected}")


def variable_name(op: Op, argument: str) -> str:
    """The name of the variable in an argument of an op."""
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
    param, grad, states = (
        scope[variable_name(op, "param")],
        scope[variable_name(op, "grad")],
        states_of_op(op),
    )
    for argument, role in {
        "param": Role.PARAMETER,
        "grad": Role.GRADIENT,
        **dict.fromkeys(states, Role.STATE),
    }.items():
        _of_role(op, scope, argument, [variable_name(op, argument)], role)
    _alike(op, scope, "grad", [grad.name], param)
    for state, shaped in states.items():
        got, shape = scope[variable_name(op, state)], param.shape if shaped else ()
        expect(
            got.shape == shape,
            f"{where(op)}, argument {state!r}: expected the shape {list(shape)}, got "
            f"{list(got.shape)}",
        )
    if placement is None:
        return  # the plan places no such slice: check_slices refuses it
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


def _expected_arguments(op: Op, plan: Plan, lane: Lane, parameter: str) -> dict[str, object]:
    """The arguments that the plan gives to an op on gradients; none if the plan has no such op."""
    clip = plan.clip
    if op.type == "scale" and lane.kind.waits_for_all and lane.averages:
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
    _of_role(op, scope, "grad", [variable_name(op, "grad")], Role.GRADIENT)
    _of_role(op, scope, "param", [variable_name(op, "param")], Role.PARAMETER)
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
    expected_values = _expected_arguments(op, plan, lane, result.of)
    expect(
        bool(expected_values),
        f"{where(op)}: a server does not run it, because the plan clips by {plan.clip} and the "
        f"lane is {lane}",
    )
    for name, value in expected_values.items():
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
    refuse("a server", [op])
    expect(
        allowed_on_server(op.type) and op.type not in ("init", "listen_and_serv"),
        f"{where(op)}: expected an op that servers run",
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


def check_block(
    block: Block, scope: Mapping[str, Variable], plan: Plan, placements: Mapping[str, Placement]
) -> None:
    """Checks the ops of a block that updates a slice.

    Args:
        scope: the variables of the block and of block 0, by name.
        placements: by the names of their slices.

    Raises:
        ValueError: naming block, op and argument, what was expected and what came.
    """
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


# ---- untrusted tables ----
#
# The checks of the tables in a program that came over the wire.
#
# The plan determines the blocks of a table, so the invariants of tables (tables.py) are checked
# here, on a program that may not come from our passes.


ROLES = frozenset({Role.TABLE, Role.GRADIENT, Role.DELTA, Role.INPUT, Role.TEMPORARY})


def is_of_table(variable: Variable, plan: Plan) -> bool:
    """Whether a variable of a server's program belongs to a table.

    Such a variable may have a free number of rows, and nothing is allocated for it.
    """
    return variable.role is Role.TABLE or any(variable.of == table.name for table in plan.tables)


def check_table_variable(what: str, variable: Variable) -> None:
    """Checks the role, dtype and shape of a variable of a table.

    Raises:
        ValueError: naming the variable.
    """
    expect(
        variable.role in ROLES,
        f"{what}: expected no {variable.role.name} of a table: states are part of the rows",
    )
    expect(
        variable.dtype in DTYPES,
        f"{what}: expected a dtype among {', '.join(DTYPES)}; got {variable.dtype!r}",
    )
    widths = [size for size in variable.shape[1:] if not isinstance(size, int) or size < 1]
    expect(
        1 <= len(variable.shape) <= 2 and not widths,
        f"{what}: expected rows, got the shape {list(variable.shape)}",
    )


def blocks_of_tables(program: Program) -> tuple[list[int], list[int]]:
    """The indices of a server's blocks that answer lookups, and those of all blocks of tables."""
    tables = [block for block in program.blocks[1:] if table_of_block(block, program.main)]
    return [block.index for block in tables if block.ops[0].type == "lookup_table"], [
        block.index for block in tables
    ]


def check_tables(program: Program, plan: Plan) -> None:
    """Checks the blocks of tables against the plan.

    Raises:
        ValueError: naming block, op and table.
    """
    _, indices = blocks_of_tables(program)
    for index in indices:
        _check_block(program.blocks[index], program.main.variables)
    for invariant in (tables_held, table_blocks_complete):
        for violation in invariant(program, plan):
            place = ", ".join(
                part for part in (violation.op, f"table {violation.variable!r}") if part
            )
            raise ValueError(f"{place}: {violation.why}")


def _check_block(block: Block, shared: Mapping[str, Variable]) -> None:
    for number, op in enumerate(block.ops):
        try:
            check(op)
            for name in (*op.inputs, *op.outputs):
                known = name in block.variables or name in shared
                expect(
                    known,
                    f"{where(op)}: expected variables of its block or of block 0, got {name!r}",
                )
        except ValueError as error:
            raise ValueError(f"block {block.index}, op {number}: {error}") from error


# ---- untrusted program ----
#
# The validation of untrusted programs, before a server installs one from the wire.
#
# ``from_proto`` (formats/messages.py) has parsed the message and checked every op against the
# catalogue.  Here the server checks that the plan is consistent by itself, that the blocks have the
# shape of a pserver's program, that every name is defined, and that the tensors of an op have
# matching shapes.  A program that passes allocates what its variables declare, and reads nothing
# else.


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
