"""What transpiling decides, written down once: a :class:`~transpiler.plan.plan.Plan` from a program, or
from bare parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import NamedTuple

from transpiler.ir.rules import ROW_RULES, RULES, Clip, Rule
from transpiler.ir.tables import Table
from transpiler.plan.lane_plan import AUTO, LanePlan, uniform
from transpiler.plan.modes import MODES
from transpiler.plan.placement import Dispatcher, RoundRobin, place
from transpiler.plan.plan import COMPRESSIONS, Lane, Placement, Plan, check_unique
from transpiler.plan.table_planner import check_table, rules_of


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
        if scheme and lanes[placement.lane].kind.steps_on_trainer:
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
