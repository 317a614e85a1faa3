"""Blocks, ops and their arguments as protobuf messages, and back."""

from __future__ import annotations

from transpiler import program_pb2 as pb
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

DEEPEST = 16  # lists within lists; a block within a list or a block is refused

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
    if isinstance(value, Block):
        return pb.Argument(block=block_to_proto(value))
    if isinstance(value, Ref):
        return pb.Argument(variable=value.name)
    if isinstance(value, Symbol):
        return pb.Argument(symbol=pb.Symbol(kind=value.kind, value=value.value))
    raise TypeError(
        "expected None, bool, int, float, str, Ref, Symbol, Literal, Block or a tuple of them, got "
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
    if kind == "block":
        return update_from_proto(message.block)
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


def _op_from_proto(message: pb.Op, inner: bool = False) -> Op:
    arguments: dict[str, Argument] = {}
    for name, value in message.arguments.items():
        try:
            if inner and value.WhichOneof("value") == "block":
                raise ValueError("expected no block within a block, got one")
            arguments[name] = argument_from_proto(value)
        except ValueError as error:
            raise ValueError(f"op {message.type!r}, argument {name!r}: {error}") from error
    op = Op(
        message.type, in_order(message.type, arguments), tuple(message.outputs), message.location
    )
    if not inner:
        check(op)
    return op


def _variables_from_proto(message: pb.Block) -> dict[str, Variable]:
    variables: dict[str, Variable] = {}
    for variable in map(_variable_from_proto, message.variables):
        if variable.name in variables:
            raise ValueError(f"variable {variable.name!r}: expected one definition, got two")
        variables[variable.name] = variable
    return variables


def block_to_proto(block: Block) -> pb.Block:
    """The message of a block.

    Raises:
        ValueError, TypeError: as :func:`argument_to_proto`.
    """
    return pb.Block(
        index=block.index,
        variables=[_variable_to_proto(variable) for variable in block.variables.values()],
        ops=[_op_to_proto(op) for op in block.ops],
    )


def update_from_proto(message: pb.Block) -> Block:
    """The block of a registered rule, unchecked: the catalogue checks it with the rule.

    Raises:
        ValueError: something in it is not what the format asks for.
    """
    ops = tuple(_op_from_proto(op, inner=True) for op in message.ops)
    return Block(message.index, freeze(_variables_from_proto(message)), ops)


def block_from_proto(index: int, message: pb.Block) -> Block:
    """A block of a program, every op checked against the catalogue.

    Raises:
        ValueError: something in it is not what the catalogue or the format asks for.
    """
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
