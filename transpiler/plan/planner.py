"""Makes the plan of a job with servers: lanes, placements and tables, from the variables, their
update rules and the user's choices.

::

    plan_parameters   checks, then
      _laned          the lane of each updated variable and each table     (lane_plan.py)
      _whole          what is not cut, because its rule needs norms
      place           slices and their servers                             (placement.py)
      compressed      how gradients travel                             (compression.py)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from transpiler.ir.rules import ROW_RULES, RULES, Clip, Rule, is_dense
from transpiler.ir.tables import Table
from transpiler.plan.compression import compressed
from transpiler.plan.lane_plan import AUTO, LanePlan, uniform
from transpiler.plan.modes import MODES
from transpiler.plan.placement import Dispatcher, RoundRobin, place
from transpiler.plan.plan import Lane, Plan, check_unique
from transpiler.plan.table_planner import check_table, first_group, rules_of


class Named(NamedTuple):
    """A variable that servers hold.

    Attributes:
        name, shape, dtype: of the whole variable.
        group: the index of its update rule; None if servers never update it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: int | None


class Asked(NamedTuple):
    """What one of the script's optimizers asks for.

    Attributes:
        groups: the indices of its update rules.
        lanes: for its parameters and tables: no other optimizer's are in them.
        compression: how its gradients travel; see :func:`plan_parameters`.
        clip: how its gradients are clipped, if they are.
    """

    groups: Collection[int]
    lanes: LanePlan
    compression: Mapping[str, str] | None = None
    clip: Clip | None = None


def _check(listed: Sequence[Named], rules: Sequence[Rule], **counts: int) -> None:
    """Whether counts, rules and groups are in range."""
    for what, count in counts.items():
        if count < 1:
            raise ValueError(f"{what}: expected 1 or more, got {count}")
    for index, rule in enumerate(rules):
        if not is_dense(rule.type) and rule.type not in ROW_RULES:
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


def _known(mode: str) -> str:
    if mode not in MODES:
        raise ValueError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")
    return mode


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
    optimizers: Sequence[Asked] = (),
) -> Plan:
    """The plan for variables and tables.

    Args:
        named: (name, shape, dtype, group) of what the servers hold; ``group`` is the index of the
            update rule, None for a variable that is never updated.
        rules: one for each parameter group.
        mode: of all parameters, for modes without settings: "sync", "async" or "half_async".
        lanes: the lanes that a strategy asks for, in place of ``mode``.
        trainers, servers: how many processes of each role.
        min_block_size: the least number of elements of a slice.
        slice_var_up: False leaves variables whole.
        split_method: chooses the server of each slice.
        clip: how the system clips gradients, if it does.
        graph: fingerprint of the single-node program; "" for an eager script.
        compression: by pattern of names of parameters and tables, of which the first that matches
            counts: how gradients travel; see :class:`Placement` and :class:`Table`.
        tables: sparse ones, whose segments name groups.  Their lanes are found by name, as those of
            parameters are.
        optimizers: of a script that has several, in place of ``mode``, ``lanes``, ``compression``
            and ``clip``.  Each has lanes of its own, so that its steps wait for no other's.

    Returns:
        The plan: the placements of updated variables first, in the order of ``named``, then those
        of the others.

    Raises:
        ValueError: a number is out of range; a mode, rule or group is unknown; a name comes twice;
            or a lane's pattern decides for no parameter.
    """
    lanes = lanes or uniform(Lane(_known(mode), merge=AUTO))
    asked = list(optimizers) or [Asked(range(len(rules)), lanes, compression, clip)]
    listed = [Named(name, tuple(shape), dtype, group) for name, shape, dtype, group in named]
    _check(listed, rules, trainers=trainers, servers=servers)
    averaged = tuple(
        name
        for each in asked
        for name in each.lanes.collective([v.name for v in listed if v.group in each.groups])
    )
    listed = [each._replace(group=None) if each.name in averaged else each for each in listed]
    listed.sort(key=lambda each: each.group is None)  # stable
    made, indices, placed_tables = _laned(asked, listed, rules, tables)
    undivided = _undivided(listed, rules, [made[index] for index in indices])
    placed = place(listed, servers, min_block_size, slice_var_up, split_method, undivided)
    # a variable that is never updated is in the first lane, and no step has it
    of_each = [*indices, *[0] * (len(listed) - len(indices))]
    placements = tuple(
        replace(placement, lane=lane) for placement, lane in zip(placed, of_each, strict=True)
    )
    patterns = [(each.compression, each.groups) for each in asked if each.compression]
    placements, placed_tables = compressed(placements, placed_tables, made, patterns)
    plan = Plan(
        made,
        trainers,
        servers,
        tuple(rules),
        placements,
        graph=graph,
        tables=placed_tables,
        averaged=averaged,
        lost_trainer=_lost_trainer(asked, averaged),
    )
    return _clipping(plan, [each.clip for each in asked])


def _lost_trainer(asked: Sequence[Asked], averaged: Sequence[str]) -> str:
    """What becomes of averages when a trainer is lost; of optimizers that differ, the first of
    "stop", "wait" and "go_on" that one says.
    """
    lanes = [lane for each in asked for _, lane in each.lanes.choices if averaged]
    said = {lane.lost_trainer for lane in lanes if lane.kind.among_trainers}
    return next((word for word in ("stop", "wait", "go_on") if word in said), "wait")


def _clipping(plan: Plan, clips: Sequence[Clip | None]) -> Plan:
    """The plan with the rule of clipping of all optimizers; where they differ trainers clip, if
    they can.
    """
    plan = replace(plan, clip=next((clip for clip in clips if clip is not None), None))
    odd = next((number for number, clip in enumerate(clips) if clip != clips[0]), None)
    if odd is None:
        return plan
    if plan.clips_on_servers:
        raise ValueError(
            "grad_clip: expected the same for every optimizer, because servers clip the mean of "
            f"{plan.trainers} trainers' gradients by the one rule of the plan; got {clips[0]} for "
            f"optimizer 0 and {clips[odd]} for optimizer {odd}: give both the same"
        )
    return replace(plan, clip=None)


def _undivided(
    listed: Sequence[Named], rules: Sequence[Rule], lanes: Sequence[Lane]
) -> frozenset[str]:
    """The variables whose rule, on the servers, makes numbers of whole tensors.

    Args:
        lanes: of the updated variables, which come first.
    """
    return frozenset(
        each.name
        for each, lane in zip(listed, lanes, strict=False)
        if each.group is not None and rules[each.group].whole and not lane.kind.steps_on_trainer
    )


def _laned(
    asked: Sequence[Asked], listed: Sequence[Named], rules: Sequence[Rule], tables: Sequence[Table]
) -> tuple[tuple[Lane, ...], list[int], tuple[Table, ...]]:
    """The lanes in use, the index of each updated variable's, and the tables with theirs."""
    check_unique(
        "variable or table",
        [*{variable.name for variable in listed}, *(table.name for table in tables)],
    )
    wanted = {v.name: (v.group, rules[v.group]) for v in listed if v.group is not None}
    updated = list(wanted)
    wanted |= {table.name: (first_group(table), rules_of(table, rules)[0]) for table in tables}
    if not wanted:
        raise ValueError(
            "modes: nothing is left for the servers: start the job without them "
            "(is_collective=True)"
        )
    made: list[Lane] = []
    of_name: dict[str, int] = {}
    for number, each in enumerate(asked):
        own = {name: rule for name, (group, rule) in wanted.items() if group in each.groups}
        if odd := each.lanes.collective([table.name for table in tables if table.name in own]):
            raise ValueError(
                f"modes: table {odd[0]!r} is in mode collective, which is for dense parameters: "
                "name another one for it"
            )
        if own:
            lanes, indices = each.lanes.assign(list(own), list(own.values()))
            of_name |= {name: len(made) + i for name, i in zip(own, indices, strict=True)}
            made += [replace(lane, optimizer=number) for lane in lanes]
    placed = tuple(replace(table, lane=of_name[table.name]) for table in tables)
    for table in placed:
        check_table(table, rules, made)
    return tuple(made), [of_name[name] for name in updated], placed
