"""A forward program as torch.export has programs: for what serves models without this package."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer.serving import InitialRows, LookupModule
from transpiler.ir.graph import PERSISTENT, Op, Role, Storage, Variable
from transpiler.ir.python_functions import refuse
from transpiler.ir.schema import DTYPES
from transpiler.ir.tables import Table
from transpiler.ir.updates import tables_of
from transpiler.lower import Kernel, lower
from transpiler.program import Program

# extents of an example's free sizes: no two alike, none of them 1
_EXTENTS = (4, 6, 9, 10, 14, 15, 21, 22)


def export_program(program: Program) -> torch.export.ExportedProgram:
    """Converts a forward program, with its values and the rows of its tables, to ``torch.export``.

    The free sizes stay free, and have the program's names.

    Args:
        program: a forward program with values: captured without an optimizer, a clone for tests, or
            one that ``load_inference_model`` gave.

    Returns:
        A program that takes the inputs in order, and gives a dict of the outputs.

    Raises:
        TypeError: the argument is no program.
        ValueError: the program trains, has no values, reads rows of servers, or calls Python code.

    Example::

        program, _ = capture(net, lambda model, x: model(x), example=(torch.ones(3, 4),))
        exported = export_program(program)
        output = exported.module()(torch.ones(5, 4))["output"]
    """
    if not isinstance(program, Program):
        raise TypeError(f"export_program: expected a Program, got {type(program).__name__}")
    storage = program.storage
    if storage is None:
        raise ValueError("export_program: expected a program with values, got one without")
    if program.deployment is not None or program.main.variables_of(Role.GRADIENT, Role.STATE):
        raise ValueError("export_program: expected a forward program; clone(for_test=True) is one")
    if any(op.type == "fake_init" for op in program.main.ops):
        raise ValueError("export_program: expected a program with rows, got one that has servers'")
    refuse("export_program", program.main.ops)
    inputs, extents = program.main.variables_of(Role.INPUT), _Extents()
    example = tuple(_example(variable, extents) for variable in inputs)
    shapes = tuple(extents.dims(variable) for variable in inputs)
    with torch.no_grad():
        return torch.export.export(_Forward(program, storage), example, dynamic_shapes=(shapes,))


class _Extents:
    """The free sizes of a program's inputs, by name: an example's, and torch's dimension."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, Any]] = {}

    def of(self, size: int | str) -> int:
        """The example's."""
        if isinstance(size, int):
            return size
        name, _, least = size.partition(">=")
        if name not in self._known:
            extent = _EXTENTS[len(self._known) % len(_EXTENTS)]
            plain = name.isidentifier()
            dim = torch.export.Dim(name, min=int(least or 1)) if plain else torch.export.Dim.AUTO
            self._known[name] = extent, dim
        return self._known[name][0]

    def dims(self, variable: Variable) -> dict[int, Any]:
        """Torch's dimensions of an input."""
        names = [
            (place, size) for place, size in enumerate(variable.shape) if isinstance(size, str)
        ]
        return {place: self._known[size.partition(">=")[0]][1] for place, size in names}


def _example(variable: Variable, extents: _Extents) -> Tensor:
    return torch.zeros([extents.of(size) for size in variable.shape], dtype=DTYPES[variable.dtype])


class _Forward(nn.Module):
    """A forward program as a module, whose state_dict has the program's names."""

    def __init__(self, program: Program, storage: Storage) -> None:
        super().__init__()
        held = [v.name for v in program.main.variables.values() if v.role in PERSISTENT]
        for name in held:
            _register(self, name, storage.tensors[name].detach())
        self._held = held
        self._inputs = [variable.name for variable in program.main.variables_of(Role.INPUT)]
        outputs = [variable.name for variable in program.main.variables_of(Role.OUTPUT)]
        self.tables = nn.ModuleDict(
            {_key(each.name): _lookups(each, storage) for each in tables_of(program.main)}
        )
        device = next((each.device for each in storage.tensors.values()), torch.device("cpu"))
        kernels: dict[str, Kernel] = {
            "sparse_table": lambda op, **_: op.outputs[0],
            "lookup_table": self._rows,
        }
        self._lowered = lower(program.main.ops, outputs, device, kernels)

    def forward(self, *inputs: Tensor) -> dict[str, Tensor]:
        """The outputs by name."""
        values = {name: _registered(self, name) for name in self._held}
        values |= dict(zip(self._inputs, inputs, strict=True))
        return dict(zip(self._lowered.outputs, self._lowered(values), strict=True))

    def _rows(self, op: Op, w: str, ids: Tensor, padding_idx: int | None = None) -> Tensor:
        rows: Tensor = self.tables[_key(w)](ids)
        if padding_idx is None:
            return rows
        return rows.masked_fill((ids == padding_idx).unsqueeze(-1), 0.0)


def _key(name: str) -> str:
    return re.sub(r"\W", "_", name)


def _parent(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The submodule that has a tensor of a dotted name, made if need be, and the last part."""
    *path, last = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    return module, last


def _register(module: nn.Module, name: str, value: Tensor) -> None:
    parent, last = _parent(module, name)
    parent.register_buffer(last, value)


def _registered(module: nn.Module, name: str) -> Tensor:
    return module.get_buffer(name)


def _lookups(table: Table, storage: Storage) -> LookupModule:
    """A table's rows as an ordinary module."""
    found: tuple[Tensor, Tensor] | None = storage.rows.get(table.name)
    dtype = DTYPES[table.computes_in]
    if found is None:
        found = _of_modules(table, storage)
    ids, rows = found if found is not None else (torch.empty(0, dtype=torch.int64), torch.empty(0))
    order = ids.argsort()
    said = table.initial
    initial = InitialRows(
        said.kind, said.low, said.high, table.seed, table.dim, dtype, DTYPES[table.dtype]
    )
    return LookupModule(rows.reshape(-1, table.dim).to(dtype)[order], ids[order], initial)


def _of_modules(table: Table, storage: Storage) -> tuple[Tensor, Tensor] | None:
    """The rows that the modules of this process hold."""
    modules: Mapping[str, Any] = storage.tables
    for module in modules.get(table.name, ()):
        if hasattr(module, "rows"):
            found: tuple[Tensor, Tensor] | None = module.rows.whole()
            return found
        return torch.arange(len(module.weight)), module.weight.detach().clone()
    return None
