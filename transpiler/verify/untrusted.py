"""What a server checks of the blocks that update slices, in a program that came over the wire.

The ops of a block are those that a server runs, their variables are defined and have the roles,
shapes and dtypes that the op needs, and their arguments are those that the plan asks for.  A part
of untrusted_program.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from transpiler.ir.graph import Block, Op, Ref, Role, Variable, refs
from transpiler.ir.ops import allowed_on_server, check, is_optimizer, rule_of_op, states_of_op
from transpiler.ir.python_functions import refuse
from transpiler.ir.schema import where
from transpiler.plan.lanes import applied
from transpiler.plan.plan import Lane, Placement, Plan, check_unique
from transpiler.verify.untrusted_plan import expect


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
    """The name of the variable that an argument of an op is."""
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
