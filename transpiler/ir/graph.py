"""A program's graph: its data, and the live objects behind its names.

The data (variables, ops and blocks) is in ``block.py``; this is where other rooms take both from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from transpiler.ir.block import PERSISTENT as PERSISTENT
from transpiler.ir.block import Argument as Argument
from transpiler.ir.block import Block as Block
from transpiler.ir.block import Literal as Literal
from transpiler.ir.block import Op as Op
from transpiler.ir.block import Ref as Ref
from transpiler.ir.block import Role as Role
from transpiler.ir.block import Symbol as Symbol
from transpiler.ir.block import Variable as Variable
from transpiler.ir.block import freeze as freeze
from transpiler.ir.block import refs as refs
from transpiler.ir.rules import Rule
from transpiler.ir.served import Served

Around = Callable[[torch.nn.Module], AbstractContextManager[object]]


class HasRule(Protocol):
    """An optimizer of a table's own: an update rule whose hyper-parameters may change."""

    def rule(self) -> Rule:
        """The rule with the present hyper-parameters."""


class Storage:
    """The live objects of a program in the process that captured or loaded it.

    Attributes:
        tensors: parameters, buffers and frozen parameters by name.  They are the module's own
            tensors: training the program trains the module.
        optimizer: the user's optimizer, whose ``param_groups`` a scheduler moves and whose
            ``state`` a single-node run fills.
        tables: the modules that look a table up, by the table's name; they hold its rows.
        own: the optimizers that belong to single tables, in the order of the groups that they add
            to the optimizer's.
        rows: the first rows of a server's tables, by name: ids, int64 [n], and values, [n, dim].
        states: where there is no optimizer, the states that a file gave, by parameter and state;
            the optimizers that a program's ops are run with continue with these dicts.
        unsaved: the reason why a file could not restore a parameter or a table, by its name.
        steps: that were taken with these tensors, those before a loaded checkpoint included.
        served: in a server's program, the progress of its job; None before it has served one.
        evaluation: captures the step again, in evaluation mode, and gives block 0; None in a
            process that did not capture it.
        captured: block 0 as it was captured; None in a process that did not capture it.
        again: captures the step again, inside a context of the module, and gives block 0; None in
            a process that did not capture it.
        opaque: of a forward program, the functions whose backward is Python code of the user's.
        module_types: the type in snake case ("batch_norm2d") of the module that has each parameter,
            by the parameter's name; empty in a process that did not capture the program.
        sparse_weights: the names of the weights to which 2:4 sparsity applies; empty in a process
            that did not capture the program.
        sums: of gradients that a program merges over runs, by the name of the merged variable.
        summed: the runs that they are of, since the last update.
        together: those of the programs that were transpiled into one job, by the numbers of their
            optimizers; itself alone otherwise.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        optimizer: torch.optim.Optimizer | None,
        tables: Mapping[str, Sequence[torch.nn.Module]] | None = None,
        own: Sequence[HasRule] = (),
        rows: Mapping[str, tuple[torch.Tensor, torch.Tensor]] | None = None,
        states: Mapping[str, dict[str, torch.Tensor]] | None = None,
    ) -> None:
        self.tensors = dict(tensors)
        self.optimizer = optimizer
        self.tables = dict(tables or {})
        self.own = tuple(own)
        self.rows = dict(rows or {})
        self.states = dict(states or {})
        self.unsaved: dict[str, str] = {}
        self.steps = 0
        self.served: Served | None = None
        self.evaluation: Callable[[], Block] | None = None
        self.captured: Block | None = None
        self.again: Callable[[Around], Block] | None = None
        self.opaque: tuple[str, ...] = ()
        self.module_types: Mapping[str, str] = {}
        self.sparse_weights: tuple[str, ...] = ()
        self.sums: dict[str, torch.Tensor] = {}
        self.summed = 0
        self.together: tuple[Storage, ...] = (self,)

    def states_of(self, parameter: str) -> Mapping[str, torch.Tensor]:
        """The present optimizer states of a parameter, by state; none before its first step."""
        if self.optimizer is None:
            return self.states.get(parameter, {})
        tensor = self.tensors.get(parameter)
        found: Mapping[str, torch.Tensor] = {}
        return found if tensor is None else self.optimizer.state.get(tensor, found)
