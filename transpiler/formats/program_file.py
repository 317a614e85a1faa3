"""Programs as files: a program and the values of its persistent variables in one safetensors file,
whose metadata field ``program`` is the message as JSON.

Optimizer states are values like all others: ``PARAMETER@STATE``.  Such a file cannot hold the
states of a table's rows and of servers: they are refused instead of left out.

A server's program that has served a job holds more: the field ``served``, and the arrays of its
tables as ``TABLE@ARRAYS/ARRAY``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from google.protobuf import json_format
from safetensors import SafetensorError, safe_open

from transpiler import program_pb2 as pb
from transpiler.files.files import whole_file, write_tensors
from transpiler.formats.messages import from_proto, to_proto
from transpiler.ir.graph import PERSISTENT, Block, Role, Storage, Variable
from transpiler.ir.python_functions import refuse
from transpiler.ir.schema import DTYPES
from transpiler.ir.served import Served
from transpiler.ir.table_ops import is_sparse, start_rows
from transpiler.ir.tables import computed_in
from transpiler.plan.plan import Deployment

_FIELD, _SERVED = "program", "served"
_IDS, _ROWS = "@IDS", "@ROWS"  # of a table's rows
_ARRAYS = "@ARRAYS/"  # of a server's part of a table


def _persistent(blocks: Sequence[Block]) -> dict[str, Variable]:
    return {
        name: v for block in blocks for name, v in block.variables.items() if v.role in PERSISTENT
    }


def _values(blocks: Sequence[Block], storage: Storage | None) -> dict[str, torch.Tensor]:
    """The values that this process holds, each in memory of its own, as safetensors requires."""
    held = {} if storage is None else {**storage.tensors, **_states(blocks, storage)}
    values: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name in _persistent(blocks):
        if name in held:
            value = held[name].detach().cpu().contiguous()
            if (
                value.untyped_storage().data_ptr() in seen
                or value.untyped_storage().nbytes() != value.nbytes
            ):
                value = value.clone()
            seen.add(value.untyped_storage().data_ptr())
            values[name] = value
    if storage is None or storage.served is None:
        return values | _rows(blocks[0], storage)
    arrays = {
        f"{table}{_ARRAYS}{name}": array.contiguous()
        for table, held in storage.served.tables.items()
        for name, array in held.arrays.items()
    }
    return values | arrays


def _states(blocks: Sequence[Block], storage: Storage) -> dict[str, torch.Tensor]:
    """The optimizer states that this process holds, by variable."""
    found = {}
    for name, variable in _persistent(blocks).items():
        if variable.role is Role.STATE:
            _refuse_loss(storage, variable.of)
            value = storage.states_of(variable.of).get(_key(variable))
            if value is not None:
                found[name] = torch.as_tensor(value)
    return found


def _key(variable: Variable) -> str:
    """The name that an optimizer has for the state that is this variable."""
    return variable.name.removeprefix(f"{variable.of}@")


def _refuse_loss(storage: Storage, name: str) -> None:
    if name in storage.unsaved:
        raise ValueError(
            f"Program.save: {name!r}: {storage.unsaved[name]}, which a program's file does not "
            "hold: use fleet.save, or save the program before it trains"
        )


def _rows(main: Block, storage: Storage | None) -> dict[str, torch.Tensor]:
    """The first rows of tables that this process holds."""
    found: dict[str, torch.Tensor] = {}
    if storage is None:
        return found
    for variable in main.variables_of(Role.TABLE):
        _refuse_loss(storage, variable.name)
        for module in storage.tables.get(variable.name, ()):
            if _has_row_states(module, storage.optimizer):
                storage.unsaved[variable.name] = "its rows have optimizer state"
                _refuse_loss(storage, variable.name)
        rows = storage.rows.get(variable.name) or start_rows(storage.tables.get(variable.name, ()))
        if rows is not None:
            found[f"{variable.name}{_IDS}"], found[f"{variable.name}{_ROWS}"] = (
                part.clone() for part in rows
            )
    return found


def _has_row_states(module: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether the rows that a module holds have been trained by a rule with states."""
    if is_sparse(module):
        weight = next(module.parameters())
        held = {} if optimizer is None else optimizer.state.get(weight, {})
        return bool(held) and float(held.get("step", 1)) > 0  # Adagrad makes its states early
    return bool(getattr(module, "has_row_states", False))


def save(
    blocks: Sequence[Block], deployment: Deployment | None, storage: Storage | None, path: Path
) -> None:
    """Writes the program, and those values of its persistent variables and tables that this process
    holds, to a safetensors file.

    The file appears whole or not at all: it is written under another name in the same directory,
    synced, then renamed.

    Raises:
        OSError: the directory does not exist or cannot be written.
        ValueError: there is optimizer state that the file could not hold, or an op that calls
            Python code.
    """
    for block in blocks:
        refuse("Program.save", block.ops)
    message = json_format.MessageToJson(
        to_proto(blocks, deployment), indent=None, preserving_proto_field_name=True
    )
    fields = {_FIELD: message}
    if storage is not None and storage.served is not None:
        fields[_SERVED] = storage.served.text()
    with whole_file(path) as file:
        write_tensors(_values(blocks, storage), file, fields)


def load(path: Path) -> tuple[tuple[Block, ...], Deployment | None, Storage]:
    """Reads a file of :func:`save`.  The storage holds the file's values and optimizer states, and
    no optimizer.  A server's optimizer states are among its values: no optimizer of torch's steps
    them here.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged or holds no program, an op is not in the catalogue, or a
            value does not fit its variable.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"expected a file that Program.save wrote, got no file at {str(path)!r}"
        )
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # memory of its own: in the file tensors begin anywhere, and the alignment can change
            # the last bit of a product
            values = {name: file.get_tensor(name).clone() for name in file.keys()}
        if _FIELD not in metadata:
            raise ValueError("no program in its metadata")
        blocks, deployment = from_proto(json_format.Parse(metadata[_FIELD], pb.Program()))
        for block in blocks:
            refuse("Program.load", block.ops)
        served = _served_of(blocks[0], metadata, values)
        rows = _rows_of(blocks[0], values)
        check_values(_persistent(blocks), values)
    except (SafetensorError, json_format.ParseError, ValueError) as error:
        raise ValueError(
            f"expected a file that Program.save wrote, got {str(path)!r}: {error}"
        ) from error
    states: dict[str, dict[str, torch.Tensor]] = {}
    for name, variable in _persistent(blocks).items() if not _is_server(deployment) else ():
        if variable.role is Role.STATE and name in values:
            states.setdefault(variable.of, {})[_key(variable)] = values.pop(name)
    storage = Storage(values, None, rows=rows, states=states)
    storage.served, storage.steps = served, 0 if served is None else served.step
    return blocks, deployment, storage


def _is_server(deployment: Deployment | None) -> bool:
    return deployment is not None and deployment.server_index is not None


def _served_of(
    main: Block, metadata: dict[str, str], values: dict[str, torch.Tensor]
) -> Served | None:
    """The progress of a server's job; the arrays of its tables are taken out of the values."""
    if _SERVED not in metadata:
        return None
    arrays: dict[str, dict[str, torch.Tensor]] = {}
    for table in main.variables_of(Role.TABLE):
        prefix = f"{table.name}{_ARRAYS}"
        names = [name for name in values if name.startswith(prefix)]
        arrays[table.name] = {name.removeprefix(prefix): values.pop(name) for name in names}
    return Served.from_text(metadata[_SERVED], arrays)


def _rows_of(
    main: Block, values: dict[str, torch.Tensor]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The rows of tables, taken out of a file's values."""
    found = {}
    for table in main.variables_of(Role.TABLE):
        if f"{table.name}{_IDS}" not in values or f"{table.name}{_ROWS}" not in values:
            continue
        ids, rows = values.pop(f"{table.name}{_IDS}"), values.pop(f"{table.name}{_ROWS}")
        if (
            ids.dtype != torch.int64
            or ids.dim() != 1
            or (rows.dtype, rows.shape)
            != (
                DTYPES.get(computed_in(table.dtype)),
                (len(ids), table.shape[1]),
            )
        ):
            got = f"{ids.dtype}{list(ids.shape)} and {rows.dtype}{list(rows.shape)}"
            raise ValueError(
                f"table {table.name!r}: expected ids and rows of {computed_in(table.dtype)}[n, "
                f"{table.shape[1]}], got {got}"
            )
        found[table.name] = ids, rows
    return found


def check_values(variables: Mapping[str, Variable], values: Mapping[str, torch.Tensor]) -> None:
    """Checks values against their variables.

    Raises:
        ValueError: there is no variable of a name, or it has another shape or dtype.
    """
    for name, value in values.items():
        if name not in variables:
            raise ValueError(f"value {name!r}: the program has no persistent variable of that name")
        variable = variables[name]
        if tuple(value.shape) != variable.shape or DTYPES.get(variable.dtype) != value.dtype:
            got = f"{value.dtype}{list(value.shape)}"
            raise ValueError(
                f"value {name!r}: expected {variable.dtype}{list(variable.shape)}, got {got}"
            )
