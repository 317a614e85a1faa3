"""Programs as protobuf messages: data, never code.

``to_proto`` and ``from_proto`` are exact inverses of each other; those of plans are in
``plan_message.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from transpiler import program_pb2 as pb
from transpiler.formats.canonical import canonical as canonical
from transpiler.formats.plan_message import deployment_from_proto as deployment_from_proto
from transpiler.formats.plan_message import deployment_to_proto as deployment_to_proto
from transpiler.formats.plan_message import hparams_from_proto as hparams_from_proto
from transpiler.formats.plan_message import hparams_to_proto as hparams_to_proto
from transpiler.formats.plan_message import plan_from_proto as plan_from_proto
from transpiler.formats.plan_message import plan_to_proto as plan_to_proto
from transpiler.ir.graph import (
    Argument,
    Block,
    Literal,
    Op,
    Ref,
    Role,
    Symbol,
    Variable,
    freeze,
)
from transpiler.ir.ops import check, in_order
from transpiler.ir.schema import LARGEST, describe
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
