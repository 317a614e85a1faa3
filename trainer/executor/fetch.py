"""What is fetched from a program: the names are checked before it runs, the values are copied after
it has run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.executor.optimizer_segment import OptimizerSegment
from transpiler.ir.close_names import close_names
from transpiler.ir.graph import Role, Variable
from transpiler.ir.sparse_rows import SparseRows
from transpiler.program import Program


def check_fetches(program: Program, fetch_list: Sequence[str] | None) -> tuple[str, ...]:
    """The names to fetch.

    Raises:
        TypeError: it is no list of names.
        ValueError: the program has no variable of a name.
    """
    if isinstance(fetch_list, str):
        raise TypeError(f"fetch_list: expected a list of names, got the text {fetch_list!r}")
    for name in fetch_list or ():
        if not isinstance(name, str):
            raise TypeError(f"fetch_list: expected names, got {type(name).__name__}")
        if name not in program.main.variables:
            near = close_names(name, program.main.variables)
            raise ValueError(
                f"fetch_list: the program has no variable {name!r}; close names: {near}"
            )
    return tuple(fetch_list or ())


def fetched(
    program: Program,
    name: str,
    values: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    updates: Sequence[OptimizerSegment],
) -> Tensor:
    """A fetched value: never an alias of a tensor that the next run will change.

    Args:
        values: of variables after a run, by name.
        tensors: behind the persistent variables.
        updates: the program's, which have the optimizer states.

    Raises:
        ValueError: the program gives the variable no value, or it is a table.
    """
    variable = program.main.variables[name]
    if variable.role is Role.STATE:
        return _state(name, variable, updates)
    if name not in values:
        merge = next((op for op in program.main.ops if op.type == "gradient_merge"), None)
        if merge is not None and any(name in op.outputs for op in program.main.ops):
            raise ValueError(
                f"fetch_list: {name!r} has a value in every run number "
                f"{merge.arguments['k_steps']} only, because it stands behind gradient_merge"
            )
        raise ValueError(f"fetch_list: {name!r} is given no value by this program")
    value = values[name]
    if variable.role is Role.TABLE:
        raise ValueError(f"fetch_list: {name!r} is a table: look its rows up")
    if isinstance(value, SparseRows):
        return _sparse_tensor(name, value, program)
    if not isinstance(value, Tensor):
        return torch.tensor(value)
    held = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    return value.detach().clone() if value.untyped_storage().data_ptr() in held else value.detach()


def _state(name: str, variable: Variable, updates: Sequence[OptimizerSegment]) -> Tensor:
    key = name.removeprefix(f"{variable.of}@")
    found = [update.state(variable.of, key) for update in updates]
    state = next((value for value in found if value is not None), None)
    if state is None:
        raise ValueError(
            f"fetch_list: {name!r} has no value before the first step of the optimizer"
        )
    return state.detach().clone()


def _sparse_tensor(name: str, gradient: SparseRows, program: Program) -> Tensor:
    """A gradient of rows as a sparse tensor of the table's shape.

    Raises:
        ValueError: the table has no shape, for ids are any int64.
    """
    table = program.main.variables[program.main.variables[name].of]
    if not all(isinstance(size, int) for size in table.shape):
        raise ValueError(
            f"fetch_list: {name!r} has rows for ids of any int64: no tensor is so large"
        )
    shape = [int(size) for size in table.shape]
    return torch.sparse_coo_tensor(
        gradient.ids.unsqueeze(0), gradient.rows, shape, check_invariants=False
    )
