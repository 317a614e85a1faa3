"""Tables in a plan: the rules that may update their rows, and the lanes that they may be in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from transpiler.ir.rules import ROW_RULES, TENSOR_LR, Rule, rule_of
from transpiler.ir.tables import Segment, Table
from transpiler.plan.plan import Lane, Plan

# flags that only choose how torch computes a rule, or that the rule's type says already
_FORM = ("foreach", "fused", "decoupled_weight_decay")


def row_rule(rule: Rule, whose: str) -> Rule:
    """A parameter group's rule as a rule for rows: with the hparams and flags that matter to rows.

    Args:
        rule: the group's.
        whose: the table, for error messages.

    Returns:
        The rule for rows.

    Raises:
        ValueError: there is no such rule for rows, it has a flag that rows do not have, no learning
            rate, or an hparam that is not finite.
    """
    if rule.type not in ROW_RULES:
        known = ", ".join(ROW_RULES)
        raise ValueError(
            f"{whose}: rows are updated by one of {known}; got {rule.type!r}: give the table an "
            "optimizer of its own"
        )
    spec = ROW_RULES[rule.type]
    if rule.type == "adam" and rule.flags.get("decoupled_weight_decay"):
        return row_rule(
            replace(rule, type="adamw", flags={**rule.flags, "decoupled_weight_decay": False}),
            whose,
        )
    if rule.flags.get(TENSOR_LR):
        raise ValueError(
            f"{whose}: lr: expected a number, got a tensor of float32: rows are updated with a "
            "float, which differs in the last bits"
        )
    odd = [name for name, flag in rule.flags.items() if flag and name not in (*spec.flags, *_FORM)]
    if odd:
        raise ValueError(f"{whose}: {odd[0]}=True: rows have no such form of {rule.type!r}")
    if rule.type == "sgd" and rule.hparams.get("momentum"):
        raise ValueError(f"{whose}: sgd with a momentum is called 'momentum'")
    hparams = {name: rule.hparams[name] for name in spec.hparams if name in rule.hparams}
    for name, value in hparams.items():
        if not all(map(math.isfinite, value if isinstance(value, tuple) else (value,))):
            raise ValueError(f"{whose}: {name}: expected a finite number, got {value}")
    if "lr" in spec.hparams and "lr" not in hparams:
        raise ValueError(f"{whose}: expected a learning rate, got none")
    flags = {name: flag for name, flag in rule.flags.items() if name in spec.flags}
    return Rule(rule.type, hparams, flags)


def group_rule(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], whose: str) -> Rule:
    """The rule for the rows of a table whose proxy parameter is in this parameter group.

    Args:
        optimizer: the group's optimizer.
        group: one of its ``param_groups``.
        whose: the table, for error messages.

    Returns:
        The rule, with the group's present hparams.

    Raises:
        ValueError: rows have no such rule.
    """
    if type(optimizer) is torch.optim.SparseAdam:
        hparams = {name: group[name] for name in ROW_RULES["lazy_adam"].hparams}
        return row_rule(
            Rule("lazy_adam", hparams, {"maximize": bool(group.get("maximize"))}), whose
        )
    try:
        rule = rule_of(optimizer, group)
    except ValueError as error:
        raise ValueError(f"{whose}: {error}; or give the table an optimizer of its own") from error
    return row_rule(rule, whose)


def rules_of(table: Table, groups: Sequence[Rule]) -> list[Rule]:
    """The rule of each of a table's segments.

    Args:
        table: the table.
        groups: the rules of the plan's parameter groups.

    Returns:
        One rule for each segment.

    Raises:
        ValueError: a segment names no group, or one whose rule rows do not have.
    """
    for segment in table.segments:
        if not 0 <= segment.group < len(groups):
            raise ValueError(
                f"table {table.name!r}: expected a group below {len(groups)}, got {segment.group}"
            )
    return [row_rule(groups[segment.group], f"table {table.name!r}") for segment in table.segments]


def served(table: Table, plan: Plan) -> list[tuple[Segment, Rule]]:
    """What servers apply to a table's rows: the columns with their rules; nothing where they add.

    An outer optimizer has all columns.  The number of its group comes after those of the parameter
    groups, as :func:`transpiler.plan.lanes.applied` says.
    """
    lane = plan.lanes[table.lane]
    if lane.kind.servers_add:
        return []
    if lane.outer is not None:
        rule = row_rule(lane.outer, f"table {table.name!r}, outer optimizer")
        return [(Segment(0, table.dim, len(plan.groups) + table.lane), rule)]
    return list(zip(table.segments, rules_of(table, plan.groups), strict=True))


def stored(table: Table, plan: Plan) -> list[tuple[Segment, Rule]]:
    """The rules whose states a server's records have beside the values of rows: those that it
    applies, or where it only adds, the trainers'.
    """
    return served(table, plan) or list(
        zip(table.segments, rules_of(table, plan.groups), strict=True)
    )


def first_group(table: Table) -> int:
    """The group whose optimizer has the table: that of its first columns."""
    return table.segments[0].group


def rows_read(table: Table, trainers: int) -> tuple[str, ...]:
    """The names of a table's rows as each trainer has last looked them up, where delays are
    compensated.
    """
    return tuple(f"{table.name}.trainer_{trainer}_bak" for trainer in range(trainers))


def check_table(table: Table, groups: Sequence[Rule], lanes: Sequence[Lane]) -> None:
    """Returns if a table may be in a plan.

    Args:
        table: the table.
        groups: the rules of the plan's parameter groups.
        lanes: the plan's lanes.

    Raises:
        ValueError: its rule is none for rows, or its lane's mode is none for tables.
    """
    rules_of(table, groups)
    if not 0 <= table.lane < len(lanes):
        raise ValueError(
            f"table {table.name!r}: expected a lane below {len(lanes)}, got {table.lane}"
        )
    lane = lanes[table.lane]
    if not lane.kind.tables:
        raise ValueError(
            f"table {table.name!r}: mode {lane.mode} is for dense parameters; name another mode "
            "for it"
        )
    if lane.outer is not None:
        row_rule(lane.outer, f"table {table.name!r}, outer optimizer")
