"""The plan of a single-node program: its ops give the rules, the clipping and the order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from transpiler.ir.graph import Role
from transpiler.ir.rules import Rule
from transpiler.ir.updates import (
    clip_of,
    group_of,
    merged_clip_of,
    optimizer_ops,
    parameter_of,
    rules_of_ops,
    tables_of,
    updates,
)
from transpiler.plan.placement import Dispatcher, RoundRobin
from transpiler.plan.plan import Collective, Placement, Plan
from transpiler.plan.planner import LanePlan, Named, OptimizerRequest, plan_parameters
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
        clip=merged_clip_of(program.main),
        graph=program.fingerprint(),
        compression=compression,
        tables=tables_of(program.main, trained=True),
    )


def plan_programs(
    programs: Sequence[Program],
    *,
    lanes: LanePlan,
    trainers: int,
    servers: int,
    min_block_size: int = 8192,
    slice_var_up: bool = True,
    split_method: type[Dispatcher] = RoundRobin,
    compression: Mapping[str, str] | None = None,
) -> Plan:
    """The plan of a job for several programs over the same variables, which train different ones:
    each program's optimizer has lanes of its own.

    Args:
        programs: single-node main programs, captured from one module.
        lanes: their patterns match the parameters of all programs, as those of ``compression`` do.
        trainers, servers, min_block_size, slice_var_up, split_method, compression: as in
            :func:`plan_parameters`.

    Raises:
        ValueError: as :func:`plan_program`; or a parameter is trained by two programs, a variable
            differs between programs, or a program has a table or gradients that trainers average.
    """
    for program in programs:
        _check_together(program)
    rules, asked, found = list[Rule](), list[OptimizerRequest](), dict[str, Named]()
    for number, program in enumerate(programs):
        own = _rules(program)
        groups = range(len(rules), len(rules) + len(own))
        rules += own
        trained = []
        for variable in _variables(program):
            if variable.group is not None:
                trained.append(variable.name)
                variable = variable._replace(group=variable.group + groups.start)
            found[variable.name] = _merged(found.get(variable.name), variable, number)
        patterns = _deciding(compression or {}, trained)
        asked.append(
            OptimizerRequest(groups, lanes.of(trained), patterns, merged_clip_of(program.main))
        )
    updated = {v.name: rules[v.group] for v in found.values() if v.group is not None}
    _check_patterns(updated, lanes, compression or {}, asked)
    return plan_parameters(
        found.values(),
        rules,
        trainers=trainers,
        servers=servers,
        min_block_size=min_block_size,
        slice_var_up=slice_var_up,
        split_method=split_method,
        graph="+".join(program.fingerprint() for program in programs),
        optimizers=asked,
    )


def _check_patterns(
    updated: Mapping[str, Rule],
    lanes: LanePlan,
    compression: Mapping[str, str],
    asked: Sequence[OptimizerRequest],
) -> None:
    """Raises ValueError for a pattern that decides for no parameter of any program, or that lets
    trainers average one.
    """
    lanes.assign(list(updated), list(updated.values()))
    if averaged := lanes.collective(list(updated)):
        raise ValueError(
            f"modes: {averaged[0]!r} is in mode collective: expected one program, because a plan "
            "does not say which program's trainers average it: name another mode for it"
        )
    for pattern in compression:
        if not any(pattern in (each.compression or {}) for each in asked):
            raise ValueError(
                "compression: expected patterns that match a parameter which none before them "
                f"matches, got {pattern!r}"
            )


def _check_together(program: Program) -> None:
    _check_single_node(program)
    if tables := program.main.variables_of(Role.TABLE):
        raise ValueError(
            f"transpile: expected programs without tables in a list of programs, got table "
            f"{tables[0].name!r}: every program that looks rows up would pull them, and only one "
            "trains them; train it by fleet, which takes several optimizers"
        )


def _merged(known: Named | None, variable: Named, number: int) -> Named:
    """Merges a variable of one more program with that of the programs before it."""
    if known is None:
        return variable
    if (known.shape, known.dtype) != (variable.shape, variable.dtype):
        raise ValueError(
            f"transpile: {variable.name}: expected one variable in all programs, got "
            f"{known.dtype}{list(known.shape)} and, in program {number}, "
            f"{variable.dtype}{list(variable.shape)}: capture them from one module"
        )
    if known.group is not None and variable.group is not None:
        raise ValueError(
            f"transpile: {variable.name}: expected a parameter that one program trains, got a "
            f"second one that does, program {number}: give each optimizer parameters of its own"
        )
    return known if variable.group is None else variable


def _deciding(patterns: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """The patterns that decide for at least one of the names."""
    first = {next((p for p in patterns if fnmatchcase(name, p)), None) for name in names}
    return {pattern: value for pattern, value in patterns.items() if pattern in first}


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
    if collective.sharded and clip is not None and clip.kind == "global_norm":
        raise ValueError(
            "strategy.sharding: expected gradients that are clipped one by one, got "
            "ClipGradByGlobalNorm, and no trainer has all of them; clip by value or by each norm"
        )
    return Plan(
        (), trainers, 0, tuple(_rules(program)), placements, clip, graph, collective=collective
    )


def _check_single_node(program: Program) -> None:
    if program.deployment is not None:
        raise ValueError(
            "transpile: expected a single-node program, got one that was transpiled already"
        )
    if not updates(program.main):
        raise ValueError(
            "transpile: expected a program with optimizer ops, got one that updates nothing"
        )
