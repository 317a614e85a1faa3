"""Tables among a plan's parameters: which rules rows can have, which lanes tables can be in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from transpiler.ir.rules import ROW_RULES, Rule, rule_of
from transpiler.ir.tables import Table
from transpiler.plan.plan import Lane

# how torch computes a rule, or said by its type already
_FORM = ("foreach", "fused", "decoupled_weight_decay")


def row_rule(rule: Rule, whose: str) -> Rule:
    """A parameter group's rule as rows have it: the numbers and flags that matter to rows.

    Raises:
        ValueError: there is no such rule for rows, or it is set to something that there is not.
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
    odd = [name for name, flag in rule.flags.items() if flag and name not in (*spec.flags, *_FORM)]
    if odd:
        raise ValueError(f"{whose}: {odd[0]}=True: rows have no such form of {rule.type!r}")
    if rule.type == "sgd" and rule.hparams.get("momentum"):
        raise ValueError(f"{whose}: sgd with a momentum is called 'momentum'")
    hparams = {name: rule.hparams[name] for name in spec.hparams if name in rule.hparams}
    for name, number in hparams.items():
        if not all(map(math.isfinite, number if isinstance(number, tuple) else (number,))):
            raise ValueError(f"{whose}: {name}: expected a finite number, got {number}")
    if "lr" not in hparams:
        raise ValueError(f"{whose}: expected a learning rate, got none")
    flags = {name: flag for name, flag in rule.flags.items() if name in spec.flags}
    return Rule(rule.type, hparams, flags)


def group_rule(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], whose: str) -> Rule:
    """The rule for the rows of a table whose anchor is in this parameter group, with the group's
    present numbers.

    Args:
        whose: the table, for the message of an error.

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

    Raises:
        ValueError: a segment names no group, or one whose rule rows do not have.
    """
    for segment in table.segments:
        if not 0 <= segment.group < len(groups):
            raise ValueError(
                f"table {table.name!r}: expected a group below {len(groups)}, got {segment.group}"
            )
    return [row_rule(groups[segment.group], f"table {table.name!r}") for segment in table.segments]


def check_table(table: Table, groups: Sequence[Rule], lanes: Sequence[Lane]) -> None:
    """Whether a table makes sense in a plan.

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
    if lane.dc_asgd:
        raise ValueError(
            f"table {table.name!r}: dc_asgd compensates dense parameters; name another mode for it"
        )
