"""What transpiling decides, written down once: a :class:`~transpiler.plan.plan.Plan` from a program, or
from bare parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import NamedTuple

from transpiler.ir.graph import Op, Program, Ref, Role
from transpiler.ir.ops import is_optimizer, rule_of_op
from transpiler.ir.rules import RULES, rule_of
from transpiler.ir.table_ops import segment_of, table_of, updates_rows
from transpiler.ir.tables import ROW_RULES, Segment, Table
from transpiler.plan.lanes import MODES as MODES
from transpiler.plan.placement import Dispatcher, RoundRobin, place
from transpiler.plan.plan import COMPRESSIONS, Clip, Collective, Lane, Placement, Plan, Rule
from transpiler.plan.table_planner import check_table, rules_of
from transpiler.strategy.from_strategy import AUTO, LanePlan, uniform
from transpiler.verify.untrusted_plan import check_unique


class Named(NamedTuple):
    """A variable that servers hold: ``group`` is the index of its update rule, None if it is handed
    out and never updated.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: int | None


def _check(listed: Sequence[Named], rules: Sequence[Rule], **counts: int) -> None:
    """Whether counts, rules and groups are in range."""
    for what, count in counts.items():
        if count < 1:
            raise ValueError(f"{what}: expected 1 or more, got {count}")
    for index, rule in enumerate(rules):
        if rule.type not in RULES and rule.type not in ROW_RULES:
            raise ValueError(
                f"group {index}: expected an optimizer op among {', '.join(RULES)}, got "
                f"{rule.type!r}"
            )
    for variable in listed:
        if variable.group is not None and not 0 <= variable.group < len(rules):
            raise ValueError(
                f"{variable.name}: expected a group from 0 to {len(rules) - 1}, got "
                f"{variable.group}"
            )


def plan_parameters(
    named: Iterable[tuple[str, Sequence[int], str, int | None]],
    rules: Sequence[Rule],
    *,
    mode: str = "sync",
    lanes: LanePlan | None = None,
    trainers: int,
    servers: int,
    min_block_size: int = 8192,
    slice_var_up: bool = True,
    split_method: type[Dispatcher] = RoundRobin,
    clip: Clip | None = None,
    graph: str = "",
    compression: Mapping[str, str] | None = None,
    tables: Sequence[Table] = (),
) -> Plan:
    """The plan for variables ``(name, shape, dtype, group)``: the updated ones first, in their
    order, then the held ones.

    Args:
        named: what the servers hold.
        rules: one for each parameter group.
        mode: of all parameters, for modes that need no further numbers: "sync", "async" or
            "half_async".
        lanes: what :func:`transpiler.strategy.from_strategy.lanes_of` made of a strategy, in place of ``mode``.
        trainers, servers: how many processes of each kind.
        min_block_size: elements; slice_var_up: False leaves variables whole; split_method: who gets
            which slice.
        clip: how gradients are clipped, if the system does it.
        graph: fingerprint of the single-node program; "" for an eager script.
        compression: by pattern of parameter names, the first that matches: how gradients travel;
            see :class:`Placement`.
        tables: sparse ones, whose segments name groups; their lanes are found here, by name, as
            those of parameters.

    Raises:
        ValueError: a number is out of range, a mode, rule or group unknown, a name given twice, or
            a lane's pattern is of no use.
    """
    if mode not in MODES:
        raise ValueError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")
    if lanes is None:
        lanes = uniform(Lane(mode, merge=AUTO))
    listed = [Named(name, tuple(shape), dtype, group) for name, shape, dtype, group in named]
    _check(listed, rules, trainers=trainers, servers=servers)
    averaged = lanes.collective(
        [variable.name for variable in listed if variable.group is not None]
    )
    listed = [
        variable._replace(group=None) if variable.name in averaged else variable
        for variable in listed
    ]
    listed.sort(key=lambda variable: variable.group is None)  # stable
    made, indices, placed_tables = _laned(lanes, listed, rules, tables)
    placed = place(listed, servers, min_block_size, slice_var_up, split_method)
    # what is only held is in the first lane, and no step has it
    of_each = [*indices, *[0] * (len(listed) - len(indices))]
    placements = tuple(
        replace(placement, lane=lane) for placement, lane in zip(placed, of_each, strict=True)
    )
    if compression:
        placements = compressed(placements, made, compression)
    return Plan(
        made,
        trainers,
        servers,
        tuple(rules),
        placements,
        clip,
        graph,
        placed_tables,
        averaged=averaged,
    )


def _laned(
    lanes: LanePlan, listed: Sequence[Named], rules: Sequence[Rule], tables: Sequence[Table]
) -> tuple[tuple[Lane, ...], list[int], tuple[Table, ...]]:
    """The lanes in use, the index of each updated variable's, and the tables with theirs."""
    check_unique(
        "variable or table",
        [*{variable.name for variable in listed}, *(table.name for table in tables)],
    )
    updated = [
        (variable.name, rules[variable.group]) for variable in listed if variable.group is not None
    ]
    wanted = updated + [(table.name, rules_of(table, rules)[0]) for table in tables]
    if not wanted:
        raise ValueError(
            "modes: nothing is left for the servers: start the job without them "
            "(is_collective=True)"
        )
    odd = lanes.collective([table.name for table in tables])
    if odd:
        raise ValueError(
            f"modes: table {odd[0]!r} is in mode collective, which is for dense parameters: name "
            "another one for it"
        )
    made, indices = lanes.assign([name for name, _ in wanted], [rule for _, rule in wanted])
    in_lanes = zip(tables, indices[len(updated) :], strict=True)
    placed = tuple(replace(table, lane=index) for table, index in in_lanes)
    for table in placed:
        check_table(table, rules, made)
    return made, indices[: len(updated)], placed


def compressed(
    placements: Sequence[Placement], lanes: Sequence[Lane], patterns: Mapping[str, str]
) -> tuple[Placement, ...]:
    """The placements with the compression that the first matching pattern asks for.

    Raises:
        ValueError: an unknown scheme, a pattern that decides for no parameter, or one for a
            parameter whose gradients do not travel or are no wider than what they would be
            compressed to.
    """
    names = [placement.name for placement in placements if placement.group is not None]
    chosen = {name: next((p for p in patterns if fnmatchcase(name, p)), None) for name in names}
    for pattern, scheme in patterns.items():
        if scheme not in COMPRESSIONS:
            raise ValueError(
                f"compression[{pattern!r}]: expected one of {', '.join(map(repr, COMPRESSIONS))}, "
                f"got {scheme!r}"
            )
        if pattern not in chosen.values():
            raise ValueError(
                "compression: expected patterns that match a parameter which none before them "
                f"matches, got {pattern!r}"
            )
    done = []
    for placement in placements:
        scheme = patterns.get(chosen.get(placement.name) or "", "")
        if scheme and lanes[placement.lane].local:
            raise ValueError(
                f"compression: {placement.name!r} is in mode {lanes[placement.lane].mode}, where "
                "no gradients travel"
            )
        if scheme and placement.dtype not in ("float32", "float64"):
            raise ValueError(
                f"compression: {placement.name!r} is {placement.dtype}; expected float32 or float64"
            )
        done.append(replace(placement, compression=scheme))
    return tuple(done)


def optimizer_ops(program: Program) -> list[Op]:
    """The optimizer ops on parameters of a program's block 0, in order."""
    return [op for op in program.main.ops if is_optimizer(op.type) and not updates_rows(op)]


def row_updates(program: Program) -> list[Op]:
    """The optimizer ops on rows of tables, in order."""
    return [op for op in program.main.ops if updates_rows(op)]


def parameter_of(op: Op) -> str:
    """The parameter that an optimizer op updates."""
    param = op.arguments["param"]
    assert isinstance(param, Ref), "the catalogue checks it"
    return param.name


def gradient_of(op: Op) -> str:
    """The gradient that an optimizer op reads: the clipped one where the program clips."""
    grad = op.arguments["grad"]
    assert isinstance(grad, Ref), "the catalogue checks it"
    return grad.name


def _group_of(op: Op) -> int:
    group = op.arguments["group"]
    assert isinstance(group, int), "the catalogue checks it"
    return group


def _rules(program: Program) -> list[Rule]:
    """The rule of every group, from its ops; of a group that updates nothing, from the optimizer of
    the process that captured.

    Raises:
        ValueError: ops of one group disagree, or nothing tells the rule of a group.
    """
    found: dict[int, Rule] = {}
    dense = {_group_of(op) for op in optimizer_ops(program)}
    for op in (
        *optimizer_ops(program),
        *(op for op in row_updates(program) if _group_of(op) not in dense),
    ):
        group, rule = _group_of(op), rule_of_op(op)
        if found.setdefault(group, rule) != rule:
            raise ValueError(
                f"expected one update rule for group {group}, got {found[group]} and, for "
                f"{parameter_of(op)}, {rule}"
            )
    optimizer = program.storage.optimizer if program.storage else None
    groups = [] if optimizer is None else optimizer.param_groups
    for index in range(max(len(groups), *(group + 1 for group in found), 0)):
        if index in found:
            continue
        if optimizer is None:
            raise ValueError(
                f"group {index} updates no parameter, and a program without its optimizer does "
                "not tell its rule"
            )
        found[index] = rule_of(optimizer, groups[index])
    return [found[index] for index in sorted(found)]


def _number(op: Op, key: str) -> float:
    value = op.arguments[key]
    assert isinstance(value, int | float), "the catalogue checks it"
    return float(value)


def clip_of(program: Program) -> Clip | None:
    """How a single-node program clips its gradients, read from its clip ops.

    Raises:
        ValueError: two gradients are clipped in different ways, or one is and another is not.
    """
    kinds = {"clip_by_norm": "norm", "global_norm_scale": "global_norm"}
    found = {
        Clip("value", _number(op, "max"), _number(op, "min"))
        if op.type == "clip"
        else Clip(kinds[op.type], _number(op, "max_norm"))
        for op in program.main.ops
        if op.type == "clip" or op.type in kinds
    }
    if len(found) > 1:
        raise ValueError(
            f"expected one way of clipping all gradients, got {', '.join(sorted(map(str, found)))}"
        )
    if not found:
        return None
    clipped = {
        name
        for op in program.main.ops
        if op.type in ("clip", "clip_by_norm", "scale_by")
        for name in op.outputs
    }
    for op in (*optimizer_ops(program), *row_updates(program)):
        if gradient_of(op) not in clipped:
            raise ValueError(
                f"expected one way of clipping all gradients, got {gradient_of(op)} unclipped "
                "among clipped ones"
            )
    return found.pop()


def _variables(program: Program) -> list[Named]:
    """Parameters with an optimizer op, in the order of these ops; then all other persistent
    variables, as defined.
    """
    groups = {parameter_of(op): _group_of(op) for op in optimizer_ops(program)}
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


def tables_of(program: Program, trained: bool = False) -> list[Table]:
    """The tables that a single-node program declares, with the groups of the ops that update their
    rows.

    Args:
        trained: each has to be updated; otherwise the columns of one that is not are in group 0.

    Raises:
        ValueError: settings make no sense, or ops do not update all columns.
    """
    segments: dict[str, list[Segment]] = {}
    for op in row_updates(program):
        segments.setdefault(parameter_of(op), []).append(segment_of(op))
    found = []
    for op in program.main.ops:
        if op.type == "sparse_table":
            (name,), width = op.outputs, op.arguments["dim"]
            assert isinstance(width, int), "the catalogue checks it"
            if trained and name not in segments:
                raise ValueError(
                    f"table {name!r}: no op updates its rows, and servers hold only tables that "
                    "are trained"
                )
            found.append(
                table_of(
                    op,
                    sorted(segments.get(name, [Segment(0, width, 0)]), key=lambda each: each.begin),
                )
            )
    return found


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
) -> Plan:
    """The plan for a single-node program: rules, clipping and the order of parameters are those of
    its ops.

    Raises:
        ValueError: as :func:`plan_parameters`, or the program has no optimizer op, or is already
            one of a cluster.
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
        clip=clip_of(program),
        graph=program.fingerprint(),
        tables=tables_of(program, trained=True),
    )


def plan_collective(program: Program, collective: Collective, trainers: int) -> Plan:
    """The plan for a single-node program that trainers run without servers: everybody holds
    everything, in one piece.

    Raises:
        ValueError: the program has no optimizer op, or is already one of a cluster, or clips in
            several ways.
    """
    _check_single_node(program)
    if tables := program.main.variables_of(Role.TABLE):
        raise ValueError(
            f"transpile: table {tables[0].name!r} needs servers: a mode without them has no place for its rows"
        )
    placements = tuple(
        Placement(v.name, v.shape, v.dtype, v.group, ()) for v in _variables(program)
    )
    graph, clip = program.fingerprint(), clip_of(program)
    return Plan(
        (), trainers, 0, tuple(_rules(program)), placements, clip, graph, collective=collective
    )


def _check_single_node(program: Program) -> None:
    if program.deployment is not None:
        raise ValueError(
            "transpile: expected a single-node program, got one that was transpiled already"
        )
    if not optimizer_ops(program) and not row_updates(program):
        raise ValueError(
            "transpile: expected a program with optimizer ops, got one that updates nothing"
        )
