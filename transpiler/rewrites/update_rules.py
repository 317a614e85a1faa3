"""LARS, LAMB or adam_d2sum in the place of a program's optimizer: the optimizer ops change."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from transpiler.ir.graph import Block, Op, Role, Storage, Variable, freeze
from transpiler.ir.ops import is_optimizer
from transpiler.ir.rules import RULES
from transpiler.ir.table_ops import updates_rows
from transpiler.ir.updates import (
    gradient_of,
    group_of,
    optimizer_ops,
    parameter_of,
    row_updates,
    rules_of_ops,
)
from transpiler.rewrites.programs import Programs, Rewrite
from transpiler.strategy.strategy import DistributedStrategy
from transpiler.strategy.update_rules import REPLACEMENTS, replaced
from transpiler.tracing.programs import update_op


def _asked(strategy: DistributedStrategy) -> bool:
    return any(getattr(strategy, name) for name in REPLACEMENTS)


def _apply(programs: Programs, strategy: DistributedStrategy) -> Programs:
    """The programs with the other optimizer's ops and states.

    Raises:
        ValueError: the optimizer is none that the switch replaces, or rows of a table follow it.
    """
    block, storage = programs.main.main, programs.main.storage
    ops = optimizer_ops(block)
    if not ops:
        return programs
    live = None if storage is None else storage.optimizer
    if live is not None and storage is not None:
        former, names = live, {tensor: name for name, tensor in storage.tensors.items()}
    else:
        former, names = _optimizer_of(block, ops)
    groups = len(former.param_groups)
    _check_tables(block, groups, strategy)
    types: Mapping[str, str] = {} if storage is None else storage.module_types
    made = replaced(former, strategy, names, types, apart=True)
    changed = _changed(block, made, names, len(made.param_groups) - groups)
    kept = None if storage is None else _stepped_by(storage, made if live is not None else None)
    startup = replace(programs.startup, storage=kept)
    return Programs(replace(programs.main.with_blocks(changed), storage=kept), startup)


def _stepped_by(storage: Storage, optimizer: torch.optim.Optimizer | None) -> Storage:
    """The same live tensors, which another optimizer steps."""
    made = copy.copy(storage)
    made.optimizer, made.together = optimizer, (made,)
    return made


def _optimizer_of(block: Block, ops: list[Op]) -> tuple[torch.optim.Optimizer, dict[Tensor, str]]:
    """An optimizer with the groups of a program's ops, over stand-ins for its parameters: of a
    program that this process did not capture.
    """
    rules = rules_of_ops(block, None)
    of_op = {parameter_of(op): torch.empty(0) for op in ops}
    groups = [
        {
            "params": [of_op[parameter_of(op)] for op in ops if group_of(op) == index],
            **rule.hparams,
            **rule.flags,
        }
        for index, rule in enumerate(rules)
        if rule.type in RULES
    ]
    cls = RULES[ops[0].type].cls if ops[0].type in RULES else torch.optim.Optimizer
    return cls(groups), {tensor: name for name, tensor in of_op.items()}  # type: ignore[call-arg]


def _check_tables(block: Block, groups: int, strategy: DistributedStrategy) -> None:
    """Raises where a table's rows are updated by the optimizer that is replaced."""
    for op in row_updates(block):
        if group_of(op) < groups:
            switch = next(name for name in REPLACEMENTS if getattr(strategy, name))
            raise ValueError(
                f"strategy.{switch}: table {parameter_of(op)!r} follows the optimizer that "
                f"{REPLACEMENTS[switch].cls.__name__} replaces, and rows have no such rule: give "
                "the table an optimizer of its own"
            )


def _changed(
    block: Block, optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], added: int
) -> Block:
    """The block with the optimizer's ops and states.

    Args:
        added: how many groups the optimizer has more than the former one; those of tables' own
            optimizers come behind them.
    """
    index_of = {
        names[parameter]: index
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        if parameter in names
    }
    variables: dict[str, Variable] = {
        name: variable
        for name, variable in block.variables.items()
        if variable.role is not Role.STATE or variable.of not in index_of
    }
    made: list[Op] = []
    for op in block.ops:
        if updates_rows(op):
            arguments = {**op.arguments, "group": group_of(op) + added}
            made.append(replace(op, arguments=arguments))
        elif is_optimizer(op.type):
            name = parameter_of(op)
            changed = update_op(optimizer, name, index_of[name], gradient_of(op), variables)
            made.append(replace(changed, location=op.location))
        else:
            made.append(op)
    return replace(block, variables=freeze(variables), ops=tuple(made))


UPDATE_RULES = Rewrite(_asked, _apply)
