"""The plan of a single-node program: its ops give the rules, the clipping and the order."""

from __future__ import annotations

from collections.abc import Mapping

from transpiler.ir.graph import Role
from transpiler.ir.rules import Rule
from transpiler.ir.updates import (
    clip_of,
    group_of,
    optimizer_ops,
    parameter_of,
    row_updates,
    rules_of_ops,
    tables_of,
)
from transpiler.plan.lane_plan import LanePlan
from transpiler.plan.placement import Dispatcher, RoundRobin
from transpiler.plan.plan import Collective, Placement, Plan
from transpiler.plan.planner import Named, plan_parameters
from transpiler.program import Program


def _rules(program: Program) -> list[Rule]:
    optimizer = program.storage.optimizer if program.storage else None
    return rules_of_ops(program.main, optimizer)


def _variables(program: Program) -> list[Named]:
    """Parameters with an optimizer op, in the order of these ops; then all other persistent
    variables, as defined.
    """
    groups = {parameter_of(op): group_of(op) for op in optimizer_ops(program.main)}
    persistent = {
        variable.name: variable
        for variable in program.main.variables_of(Role.PARAMETER, Role.BUFFER)
    }
    named = []
    for name in (*groups, *(name for name in persistent if name not in groups)):
        if name not in persistent:
            raise ValueError(
                f"optimizer op for {name}: expected a parameter of the program, got another "
                "variable"
            )
        variable = persistent[name]
        shape = tuple(extent for extent in variable.shape if isinstance(extent, int))
        if len(shape) < len(variable.shape):
            raise ValueError(
                f"{name}: expected a parameter of fixed shape, got {list(variable.shape)}"
            )
        named.append(Named(name, shape, variable.dtype, groups.get(name)))
    return named


def plan_program(
    program: Program,
    *,
    mode: str = "sync",
    lanes: LanePlan | None = None,
    trainers: int,
    servers: int,
    min_block_size: int = 8192,
    slice_var_up: bool = True,
    split_method: type[Dispatcher] = RoundRobin,
    compression: Mapping[str, str] | None = None,
) -> Plan:
    """The plan of a job with servers for a single-node program.

    Its optimizer ops give the rules and the order of parameters, its clip ops the clipping.

    Args:
        program: the single-node main program.
        mode, lanes, trainers, servers, min_block_size, slice_var_up, split_method, compression: as
            in :func:`plan_parameters`.

    Raises:
        ValueError: as :func:`plan_parameters`; or the program has no optimizer op, or was
            transpiled already.
    """
    _check_single_node(program)
    return plan_parameters(
        _variables(program),
        _rules(program),
        mode=mode,
        lanes=lanes,
        trainers=trainers,
        servers=servers,
        min_block_size=min_block_size,
        slice_var_up=slice_var_up,
        split_method=split_method,
        clip=clip_of(program.main),
        graph=program.fingerprint(),
        compression=compression,
        tables=tables_of(program.main, trained=True),
    )


def plan_collective(program: Program, collective: Collective, trainers: int) -> Plan:
    """The plan of a job without servers: every trainer holds every variable, unsliced.

    Raises:
        ValueError: the program has no optimizer op, was transpiled already, clips in several ways,
            or has a table.
    """
    _check_single_node(program)
    if tables := program.main.variables_of(Role.TABLE):
        raise ValueError(
            f"transpile: expected a program without tables in a mode without servers, got table "
            f"{tables[0].name!r}"
        )
    placements = tuple(
        Placement(v.name, v.shape, v.dtype, v.group, ()) for v in _variables(program)
    )
    graph, clip = program.fingerprint(), clip_of(program.main)
    return Plan(
        (), trainers, 0, tuple(_rules(program)), placements, clip, graph, collective=collective
    )


def _check_single_node(program: Program) -> None:
    if program.deployment is not None:
        raise ValueError(
            "transpile: expected a single-node program, got one that was transpiled already"
        )
    if not optimizer_ops(program.main) and not row_updates(program.main):
        raise ValueError(
            "transpile: expected a program with optimizer ops, got one that updates nothing"
        )
