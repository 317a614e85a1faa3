"""A trained model as one file that torch alone can read: names and tensors, without a trace of the
cluster that trained it.

[Note: an exported table]  A table of a declared range becomes what nn.Embedding has:
``NAME.weight`` [num_embeddings, dim]; rows that were never touched have their initial values there,
less their weight decay.
Where that would be larger than ``MAX_BYTES``, or where ids are any int64, the file has::

    NAME.ids       int64 [n], in ascending order
    NAME.weight    [n, dim], the row of each of these ids
    NAME.initial   uint8 [m], JSON in ASCII: the initializer of all other rows

Where rows are written as int8, ``NAME.weight`` is int8, and ``NAME.scale``, float32 [n], has the
factor of each row.

A table whose ids are strings' has ``NAME.hash``, uint8 [m], JSON in ASCII: the hash, and the
modulus of the ids.  The module's own entries in a state_dict (its proxy parameter, its padding's
row, rows of its own) are in neither form of the file.  trainer/serving.py looks rows up in both
forms.  Rows are gathered in files beside the target, so that no table has to fit into memory.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pserver.storage.single_file import file_to_write
from trainer.serving import InitialRows, LookupModule
from transpiler.files.files import shown, write_object, write_tensors
from transpiler.files.named_errors import naming
from transpiler.ir.graph import PERSISTENT, Op, Role, Storage, Variable
from transpiler.ir.python_functions import refuse
from transpiler.ir.schema import DTYPES
from transpiler.ir.tables import Table
from transpiler.ir.updates import tables_of
from transpiler.lower import Kernel, lower
from transpiler.program import Program

# ---- exported program ----
#
# A forward program in the form of torch.export, to serve a model without this package.


# extents of an example's free sizes: all different, none of them 1
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
        """The example's extent of a size."""
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


# ---- row forms ----
#
# The number formats in which an export writes rows of tables: as they are computed, or shorter.


INT8_MOST = 127
# the user's name of a format, and the dtype of the weight
FORMS: Mapping[str, torch.dtype] = {
    name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16", "int8")
}
BLOCK = 1 << 16  # rows that are handled at a time

Made = Callable[[str, tuple[int, ...], str], Tensor]


def check_form(form: str | None) -> None:
    """Checks that rows can be written in a format.

    Raises:
        ValueError: they cannot.
    """
    if form is not None and form not in FORMS:
        known = ", ".join(map(repr, FORMS))
        raise ValueError(f"rows: expected None or one of {known}, got {form!r}")


def written_as(weight: Tensor, form: str | None, made: Made) -> dict[str, Tensor]:
    """Rows in the format of a file.

    int8 rows are symmetric, with one scale a row: row i is ``weight[i] * scale[i]``, where scale[i]
    is the row's largest magnitude divided by 127.

    Args:
        weight: [n, dim], as rows are computed.
        form: one of ``FORMS``; None: as they are.
        made: makes a tensor, by its name, shape and dtype.

    Returns:
        "weight", and with int8 "scale", float32 [n].
    """
    if form is None or FORMS[form] == weight.dtype:
        return {"weight": weight}
    found = {"weight": made("shorter", tuple(weight.shape), form)}
    if form == "int8":
        found["scale"] = made("scale", (len(weight),), "float32")
    for begin in range(0, len(weight), BLOCK):
        part = slice(begin, begin + BLOCK)
        if form == "int8":
            found["weight"][part], found["scale"][part] = _int8(weight[part])
        else:
            found["weight"][part] = weight[part].to(FORMS[form])
    return found


def _int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    scale = (rows.abs().amax(1) / INT8_MOST).to(torch.float32)
    steps = rows / torch.where(scale == 0, 1.0, scale).unsqueeze(1)
    return steps.round().clamp(-INT8_MOST, INT8_MOST).to(torch.int8), scale


# ---- export ----


MAX_BYTES = 1 << 32


@dataclass(frozen=True, slots=True)
class TableRows:
    """A table to be exported.

    Attributes:
        chunks: all its rows, each once: "ids" int64 [m] and "values" [m, dim], as a lookup reads
            them.
        padding_idx: an id that reads ``padding_row`` ([dim], zeros where it is None) instead of a
            row.
        reader: reads rows of any ids, int64 [n], as [n, dim], where steps have changed untouched
            rows; None: these have their initial values.
    """

    table: Table
    chunks: Iterable[Mapping[str, np.ndarray]]
    padding_idx: int | None = None
    padding_row: torch.Tensor | None = None
    reader: Callable[[np.ndarray], np.ndarray] | None = None

    def checked(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Ids and values, including the padding's.

        Raises:
            ValueError: rows of another width or dtype, or an id outside of the table's range.
        """
        table = self.table
        for chunk in self.chunks:
            ids, values = chunk["ids"], chunk["values"]
            if values.shape != (len(ids), table.dim) or values.dtype != table.computes_in:
                expected = f"{table.computes_in} [{len(ids)}, {table.dim}]"
                raise ValueError(
                    f"table {table.name!r}: expected rows {expected}, got {values.dtype} "
                    f"{list(values.shape)}"
                )
            if (
                table.rows is not None
                and len(ids)
                and not (0 <= ids.min() and ids.max() < table.rows)
            ):
                said = f"expected ids from 0 to {table.rows - 1}, got {ids.min()} to {ids.max()}"
                raise ValueError(f"table {table.name!r}: {said}")
            stays = ids != self.padding_idx
            yield (ids, values) if stays.all() else (ids[stays], values[stays])
        if self.padding_idx is not None:
            row = (
                np.zeros(table.dim)
                if self.padding_row is None
                else self.padding_row.detach().cpu().numpy()
            )
            yield np.array([self.padding_idx]), row[None].astype(table.computes_in)


def export(
    path: str | os.PathLike[str],
    tensors: Mapping[str, torch.Tensor],
    tables: Mapping[str, TableRows] | None = None,
    max_bytes: int = MAX_BYTES,
    rows: str | None = None,
) -> None:
    """Writes a state_dict to the file ``path``: whole, or not at all.

    Args:
        path: or a URL.  "NAME.safetensors" is written for ``safetensors.torch.load_file``, any
            other name for ``torch.load``.
        tables: by the name of their module.  See [Note: an exported table].
        max_bytes: of a table's weight that has all rows of its range; where it would be larger,
            its ids are listed.
        rows: the number format of tables: "float32", "float64", "bfloat16", "float16" or "int8";
            None: that in which they are computed.

    Raises:
        ValueError: ``rows`` is something else, a table's name is another tensor's, or an id is
            outside of its table's range.
        OSError: the file cannot be written; an existing file stays.
    """
    check_form(rows)
    wanted = {
        name: tensor for name, tensor in tensors.items() if not _of_module(name, tables or {})
    }
    plain = {
        name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in wanted.items()
    }
    with file_to_write(path) as file:
        for index, (name, table) in enumerate((tables or {}).items()):
            place = file.parent / str(index)
            for key, tensor in _tensors_of(table, place, max_bytes, rows).items():
                full = _prefix(name) + key
                if full in plain:
                    raise ValueError(
                        f"{shown(path)}: {full}: expected one tensor of this name, got a table's "
                        "and another"
                    )
                plain[full] = tensor
        if file.suffix == ".safetensors":
            write_tensors(plain, file)
        else:
            write_object(plain, file)


def _prefix(module: str) -> str:
    return f"{module}." if module else ""


def _of_module(name: str, tables: Iterable[str]) -> bool:
    """Whether a tensor is an embedding's own entry in a state_dict."""
    own = [
        name.removeprefix(_prefix(module)) for module in tables if name.startswith(_prefix(module))
    ]
    return any(key in ("proxy", "padding_row") or key.startswith("table.") for key in own)


def _tensors_of(
    rows: TableRows, scratch: Path, max_bytes: int, form: str | None
) -> dict[str, torch.Tensor]:
    table = rows.table
    itemsize = FORMS[form or table.computes_in].itemsize
    if table.rows is not None and table.rows * table.dim * itemsize <= max_bytes:
        found = {"weight": _whole(rows, table.rows, scratch)}
    else:
        found = _listed(rows, scratch)

    def made(name: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        return _mapped(scratch.with_suffix(f".{name}"), shape, dtype)

    return {**found, **written_as(found["weight"], form, made)}


def _whole(rows: TableRows, count: int, scratch: Path) -> torch.Tensor:
    """All rows of the range."""
    from pserver.table.rows import initial_values  # imports numba, which few exports need

    table = rows.table
    weight = _mapped(scratch.with_suffix(".weight"), (count, table.dim), table.computes_in)
    values = weight.numpy()
    for begin in range(0, count, BLOCK):
        ids = np.arange(begin, min(begin + BLOCK, count))
        if rows.reader is None:
            initial_values(table, ids, values[begin : begin + BLOCK])
        else:
            values[begin : begin + BLOCK] = rows.reader(ids)
    for ids, held in rows.checked():
        values[ids] = held
    return weight


def _listed(rows: TableRows, scratch: Path) -> dict[str, torch.Tensor]:
    """The existing rows, in the order of their ids."""
    table, count = rows.table, 0
    with (
        naming(scratch),
        scratch.with_suffix(".ids").open("wb") as ids_file,
        scratch.with_suffix(".rows").open("wb") as rows_file,
    ):
        for ids, values in rows.checked():
            count += len(ids)
            ids_file.write(ids.tobytes())
            rows_file.write(values.tobytes())
    unordered = _mapped(scratch.with_suffix(".ids"), (count,), "int64").numpy()
    gathered = _mapped(scratch.with_suffix(".rows"), (count, table.dim), table.computes_in).numpy()
    order = np.argsort(unordered)
    weight = _mapped(scratch.with_suffix(".weight"), (count, table.dim), table.computes_in)
    for begin in range(0, count, BLOCK):
        weight.numpy()[begin : begin + BLOCK] = gathered[order[begin : begin + BLOCK]]
    said = asdict(table.initial) | {"seed": table.seed, "held": table.dtype}
    initial = json.dumps(said).encode()
    return {
        "ids": torch.from_numpy(unordered[order]),
        "weight": weight,
        "initial": torch.frombuffer(bytearray(initial), dtype=torch.uint8),
    }


def _mapped(path: Path, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """A tensor whose memory is a file, allocated whole: a full disk raises here and not at a later
    write.
    """
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    with naming(path), path.open("ab") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, count * getattr(torch, dtype).itemsize)
    return torch.from_file(str(path), shared=True, size=count, dtype=getattr(torch, dtype)).view(
        shape
    )
