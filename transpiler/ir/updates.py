"""Reads the optimizer, clip and table ops of a block: rules, groups, clipping and tables."""

from __future__ import annotations

import torch

from transpiler.ir.graph import Block, Op, Ref
from transpiler.ir.ops import is_optimizer, rule_of_op
from transpiler.ir.rules import Clip, Rule, rule_of
from transpiler.ir.table_ops import segment_of, table_of, updates_rows
from transpiler.ir.tables import Segment, Table


def optimizer_ops(block: Block) -> list[Op]:
    """The optimizer ops of a block that update parameters, in order."""
    return [op for op in block.ops if is_optimizer(op.type) and not updates_rows(op)]


def row_updates(block: Block) -> list[Op]:
    """The optimizer ops on rows of tables, in order."""
    return [op for op in block.ops if updates_rows(op)]


def updates(block: Block) -> bool:
    """Whether the block updates anything: a forward program's does not."""
    return bool(optimizer_ops(block) or row_updates(block))


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


def group_of(op: Op) -> int:
    """The parameter group of an optimizer op."""
    group = op.arguments["group"]
    assert isinstance(group, int), "the catalogue checks it"
    return group


def rules_of_ops(block: Block, optimizer: torch.optim.Optimizer | None) -> list[Rule]:
    """The rule of every group, by index.

    Args:
        block: its optimizer ops give the rules of their groups.
        optimizer: gives the rule of a group that updates nothing; None in a process that did not
            capture the program.

    Raises:
        ValueError: ops of one group disagree, or a group has neither an op nor the optimizer.
    """
    found: dict[int, Rule] = {}
    dense = {group_of(op) for op in optimizer_ops(block)}
    for op in (
        *optimizer_ops(block),
        *(op for op in row_updates(block) if group_of(op) not in dense),
    ):
        group, rule = group_of(op), rule_of_op(op)
        if found.setdefault(group, rule) != rule:
            raise ValueError(
                f"expected one update rule for group {group}, got {found[group]} and, for "
                f"{parameter_of(op)}, {rule}"
            )
    groups = [] if optimizer is None else optimizer.param_groups
    for index in range(max(len(groups), *(group + 1 for group in found), 0)):
        if index in found:
            continue
        if optimizer is None:
            raise ValueError(
                f"group {index}: expected an optimizer op that gives its rule, got none, and this "
                "process does not hold the optimizer"
            )
        found[index] = rule_of(optimizer, groups[index])
    return [found[index] for index in sorted(found)]


def _number(op: Op, key: str) -> float:
    value = op.arguments[key]
    assert isinstance(value, int | float), "the catalogue checks it"
    return float(value)


def compressed_parameters(block: Block) -> list[str]:
    """The parameters whose gradients the block compresses."""
    found = [op.arguments["param"] for op in block.ops if op.type == "dgc"]
    return [ref.name for ref in found if isinstance(ref, Ref)]


def merged_clip_of(block: Block) -> Clip | None:
    """The clipping of a job that may merge gradients before it clips; None: there is none, or each
    trainer clips its own, because the program compresses them.

    Raises:
        ValueError: as :func:`clip_of`.
    """
    return None if compressed_parameters(block) else clip_of(block)


def clip_of(block: Block) -> Clip | None:
    """The clipping of a single-node program, read from its clip ops; None if there is none.

    Raises:
        ValueError: two gradients are clipped in different ways, or one is and another is not.
    """
    kinds = {"clip_by_norm": "norm", "global_norm_scale": "global_norm"}
    found = {
        Clip("value", _number(op, "max"), _number(op, "min"))
        if op.type == "clip"
        else Clip(kinds[op.type], _number(op, "max_norm"))
        for op in block.ops
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
        for op in block.ops
        if op.type in ("clip", "clip_by_norm", "scale_by")
        for name in op.outputs
    }
    for op in (*optimizer_ops(block), *row_updates(block)):
        if gradient_of(op) not in clipped:
            raise ValueError(
                f"expected one way of clipping all gradients, got {gradient_of(op)} unclipped "
                "among clipped ones (need_clip=False acts where one process trains)"
            )
    return found.pop()


def tables_of(block: Block, trained: bool = False) -> list[Table]:
    """The tables that a single-node program declares, with the groups of the ops that update their
    rows.

    Args:
        trained: every table must be updated; otherwise all columns of a table without updates are
            in group 0.

    Raises:
        ValueError: settings contradict each other, or ops do not update all columns.
    """
    segments: dict[str, list[Segment]] = {}
    for op in row_updates(block):
        segments.setdefault(parameter_of(op), []).append(segment_of(op))
    found = []
    for op in block.ops:
        if op.type == "sparse_table":
            (name,), width = op.outputs, op.arguments["dim"]
            assert isinstance(width, int), "the catalogue checks it"
            if trained and name not in segments:
                raise ValueError(
                    f"table {name!r}: expected an op that updates its rows, got none: servers hold "
                    "only tables that are trained"
                )
            found.append(
                table_of(
                    op,
                    sorted(segments.get(name, [Segment(0, width, 0)]), key=lambda each: each.begin),
                )
            )
    return found
