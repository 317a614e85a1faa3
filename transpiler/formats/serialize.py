"""Programs as protobuf messages and as files: data, never code.

``to_proto`` and ``from_proto`` are exact inverses of each other; those of plans are in
``plan_message.py``.  ``save`` and ``load`` keep a program and the values of its persistent
variables in one safetensors file, whose metadata field ``program`` is the message as JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from google.protobuf import json_format
from safetensors import SafetensorError, safe_open

from transpiler import program_pb2 as pb
from transpiler.files.tensor_file import write_tensors
from transpiler.files.whole_file import whole_file
from transpiler.formats.canonical import canonical as canonical
from transpiler.formats.plan_message import deployment_from_proto as deployment_from_proto
from transpiler.formats.plan_message import deployment_to_proto as deployment_to_proto
from transpiler.formats.plan_message import hparams_from_proto as hparams_from_proto
from transpiler.formats.plan_message import hparams_to_proto as hparams_to_proto
from transpiler.formats.plan_message import plan_from_proto as plan_from_proto
from transpiler.formats.plan_message import plan_to_proto as plan_to_proto
from transpiler.ir.graph import (
    PERSISTENT,
    Argument,
    Block,
    Literal,
    Op,
    Ref,
    Role,
    Storage,
    Symbol,
    Variable,
    freeze,
)
from transpiler.ir.ops import check, in_order
from transpiler.ir.schema import DTYPES, LARGEST, describe
from transpiler.ir.table_ops import start_rows
from transpiler.plan.plan import Deployment

DEEPEST = 16  # lists within lists

# ---- arguments ----


def argument_to_proto(value: Argument, depth: int = 0) -> pb.Argument:
    """One argument as a message.

    Raises:
        ValueError: a whole number beyond 64 bits, or lists more than 16 deep.
        TypeError: a type that a program cannot hold.
    """
    if depth > DEEPEST:
        raise ValueError(f"expected lists at most {DEEPEST} deep, got more")
    if value is None:
        return pb.Argument(none=pb.Nothing())
    if isinstance(value, bool):  # before int: a bool is one
        return pb.Argument(boolean=value)
    if isinstance(value, int):
        if not -LARGEST - 1 <= value <= LARGEST:
            raise ValueError(f"expected a whole number of 64 bits, got {value}")
        return pb.Argument(integer=value)
    if isinstance(value, tuple):
        return pb.Argument(
            list=pb.Arguments(items=[argument_to_proto(item, depth + 1) for item in value])
        )
    if isinstance(value, Literal):
        return pb.Argument(tensor=pb.Literal(dtype=value.dtype, shape=value.shape, data=value.data))
    if isinstance(value, float):
        return pb.Argument(real=value)
    return _word_to_proto(value)


def _word_to_proto(value: Argument) -> pb.Argument:
    if isinstance(value, str):
        return pb.Argument(text=value)
    if isinstance(value, Ref):
        return pb.Argument(variable=value.name)
    if isinstance(value, Symbol):
        return pb.Argument(symbol=pb.Symbol(kind=value.kind, value=value.value))
    raise TypeError(
        "expected None, bool, int, float, str, Ref, Symbol, Literal or a tuple of them, got "
        f"{describe(value)}"
    )


def argument_from_proto(message: pb.Argument, depth: int = 0) -> Argument:
    """The argument of a message.

    Raises:
        ValueError: the message holds no value, or lists more than 16 deep.
    """
    kind = message.WhichOneof("value")
    if kind == "none":
        return None
    if kind == "list":
        if depth >= DEEPEST:
            raise ValueError(f"expected lists at most {DEEPEST} deep, got more")
        return tuple(argument_from_proto(item, depth + 1) for item in message.list.items)
    if kind == "variable":
        return Ref(message.variable)
    if kind == "symbol":
        return Symbol(message.symbol.kind, message.symbol.value)
    if kind == "tensor":
        return Literal(message.tensor.dtype, tuple(message.tensor.shape), message.tensor.data)
    if kind is None:
        raise ValueError("expected an argument with a value, got an empty message")
    plain: bool | int | float | str = getattr(message, kind)
    return plain


# ---- blocks ----


def _variable_to_proto(variable: Variable) -> pb.Variable:
    shape = [
        pb.Dimension(symbol=size) if isinstance(size, str) else pb.Dimension(size=size)
        for size in variable.shape
    ]
    return pb.Variable(
        name=variable.name,
        shape=shape,
        dtype=variable.dtype,
        role=variable.role.value,  # type: ignore[arg-type]
        of=variable.of,
    )


def _variable_from_proto(message: pb.Variable) -> Variable:
    if not message.name:
        raise ValueError("expected variables with names, got an empty one")
    shape: list[int | str] = []
    for dimension in message.shape:
        extent = dimension.WhichOneof("extent")
        if extent is None or dimension.size < 0 or (extent == "symbol" and not dimension.symbol):
            got = str(dimension).strip()
            raise ValueError(
                f"variable {message.name!r}: expected sizes of 0 or more and named symbols, got "
                f"{got!r}"
            )
        shape.append(dimension.size if extent == "size" else dimension.symbol)
    try:
        role = Role(int(message.role))
    except ValueError as error:
        raise ValueError(
            f"variable {message.name!r}: expected a role of 0 to {len(Role) - 1}, got "
            f"{message.role}"
        ) from error
    return Variable(message.name, tuple(shape), message.dtype, role, message.of)


def _op_to_proto(op: Op) -> pb.Op:
    message = pb.Op(type=op.type, outputs=op.outputs, location=op.location)
    for name, value in op.arguments.items():
        try:
            message.arguments[name].CopyFrom(argument_to_proto(value))
        except (ValueError, TypeError) as error:
            raise type(error)(f"op {op.type!r}, argument {name!r}: {error}") from error
    return message


def _op_from_proto(message: pb.Op) -> Op:
    arguments: dict[str, Argument] = {}
    for name, value in message.arguments.items():
        try:
            arguments[name] = argument_from_proto(value)
        except ValueError as error:
            raise ValueError(f"op {message.type!r}, argument {name!r}: {error}") from error
    op = Op(
        message.type, in_order(message.type, arguments), tuple(message.outputs), message.location
    )
    check(op)
    return op


def _variables_from_proto(message: pb.Block) -> dict[str, Variable]:
    variables: dict[str, Variable] = {}
    for variable in map(_variable_from_proto, message.variables):
        if variable.name in variables:
            raise ValueError(f"variable {variable.name!r}: expected one definition, got two")
        variables[variable.name] = variable
    return variables


def _block_from_proto(index: int, message: pb.Block) -> Block:
    place = f"block {index}"
    if message.index != index:
        raise ValueError(f"{place}: expected its own index, got {message.index}")
    ops: list[Op] = []
    try:
        variables = _variables_from_proto(message)
        for number, op in enumerate(message.ops):
            place = f"block {index}, op {number}"
            ops.append(_op_from_proto(op))
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    return Block(index, freeze(variables), tuple(ops))


def to_proto(blocks: Sequence[Block], deployment: Deployment | None) -> pb.Program:
    """The message of a program.  Values of variables do not travel with it.

    Raises:
        ValueError: an argument does not fit (a whole number beyond 64 bits, lists too deep, text
            that is not Unicode).
        TypeError: an argument of a type that a program cannot hold.
    """
    try:
        messages = [
            pb.Block(
                index=block.index,
                variables=[_variable_to_proto(variable) for variable in block.variables.values()],
                ops=[_op_to_proto(op) for op in block.ops],
            )
            for block in blocks
        ]
    except UnicodeEncodeError as error:
        raise ValueError(f"expected text that UTF-8 can hold, got {error.object!r}") from error
    where = None if deployment is None else deployment_to_proto(deployment)
    return pb.Program(blocks=messages, deployment=where)


def from_proto(message: object) -> tuple[tuple[Block, ...], Deployment | None]:
    """The blocks and the deployment of a message, every op checked against the catalogue.

    Raises:
        TypeError: it is no ``program_pb2.Program``.
        ValueError: something in it is not what the catalogue or the format asks for; the message
            says where.
    """
    if not isinstance(message, pb.Program):
        raise TypeError(
            f"expected a pserver.transpiler.Program message, got {type(message).__name__}"
        )
    if not message.blocks:
        raise ValueError("expected a program with one block or more, got none")
    blocks = tuple(_block_from_proto(index, block) for index, block in enumerate(message.blocks))
    deployment = (
        deployment_from_proto(message.deployment) if message.HasField("deployment") else None
    )
    return blocks, deployment


# ---- files ----

_FIELD = "program"
_IDS, _ROWS = "@IDS", "@ROWS"  # of a table's rows


def _persistent(blocks: Sequence[Block]) -> dict[str, Variable]:
    return {
        name: v for block in blocks for name, v in block.variables.items() if v.role in PERSISTENT
    }


def _values(blocks: Sequence[Block], storage: Storage | None) -> dict[str, torch.Tensor]:
    """The values that this process holds, each in memory of its own, as safetensors requires."""
    held = {} if storage is None else storage.tensors
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
    return values | _rows(blocks[0], storage)


def _rows(main: Block, storage: Storage | None) -> dict[str, torch.Tensor]:
    """The first rows of tables that this process holds."""
    found: dict[str, torch.Tensor] = {}
    if storage is None:
        return found
    for variable in main.variables_of(Role.TABLE):
        rows = storage.rows.get(variable.name) or start_rows(storage.tables.get(variable.name, ()))
        if rows is not None:
            found[f"{variable.name}{_IDS}"], found[f"{variable.name}{_ROWS}"] = (
                part.clone() for part in rows
            )
    return found


def save(
    blocks: Sequence[Block], deployment: Deployment | None, storage: Storage | None, path: Path
) -> None:
    """Writes the program, and those values of its persistent variables and tables that this process
    holds, to a safetensors file.

    The file appears whole or not at all: it is written under another name in the same directory,
    synced, then renamed.

    Raises:
        OSError: the directory does not exist or cannot be written.
    """
    message = json_format.MessageToJson(
        to_proto(blocks, deployment), indent=None, preserving_proto_field_name=True
    )
    with whole_file(path) as file:
        write_tensors(_values(blocks, storage), file, {_FIELD: message})


def load(path: Path) -> tuple[tuple[Block, ...], Deployment | None, Storage]:
    """Reads what :func:`save` wrote.  The storage holds the file's values, and no optimizer.

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
            values = {name: file.get_tensor(name) for name in file.keys()}
        if _FIELD not in metadata:
            raise ValueError("no program in its metadata")
        blocks, deployment = from_proto(json_format.Parse(metadata[_FIELD], pb.Program()))
        rows = _rows_of(blocks[0], values)
        _check_values(_persistent(blocks), values)
    except (SafetensorError, json_format.ParseError, ValueError) as error:
        raise ValueError(
            f"expected a file that Program.save wrote, got {str(path)!r}: {error}"
        ) from error
    return blocks, deployment, Storage(values, None, rows=rows)


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
                DTYPES.get(table.dtype),
                (len(ids), table.shape[1]),
            )
        ):
            got = f"{ids.dtype}{list(ids.shape)} and {rows.dtype}{list(rows.shape)}"
            raise ValueError(
                f"table {table.name!r}: expected ids and rows of {table.dtype}[n, "
                f"{table.shape[1]}], got {got}"
            )
        found[table.name] = ids, rows
    return found


def _check_values(variables: dict[str, Variable], values: dict[str, torch.Tensor]) -> None:
    for name, value in values.items():
        if name not in variables:
            raise ValueError(f"value {name!r}: the program has no persistent variable of that name")
        variable = variables[name]
        if tuple(value.shape) != variable.shape or DTYPES.get(variable.dtype) != value.dtype:
            got = f"{value.dtype}{list(value.shape)}"
            raise ValueError(
                f"value {name!r}: expected {variable.dtype}{list(variable.shape)}, got {got}"
            )
