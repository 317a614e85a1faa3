"""The allowed arguments of an op: kinds, and schemas made of kinds.

A kind is a predicate with a name for messages.  Nothing here looks at variables: an argument of the
kind ``VARIABLE`` is a ``Ref``; whether its name is defined is an invariant of programs (verify/).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from transpiler.ir.block import Argument, Block, Literal, Op, Ref, Symbol

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        name: getattr(torch, name)
        for name in (
            *("float64", "float32", "float16", "bfloat16", "complex64", "complex128"),
            *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
        )
    }
)
LAYOUTS = frozenset({"strided"})
MEMORY_FORMATS = frozenset(
    {"contiguous_format", "preserve_format", "channels_last", "channels_last_3d"}
)
LARGEST = 2**63 - 1  # what an integer of the protobuf, and torch's sizes, can hold


@dataclass(frozen=True, slots=True)
class ArgumentKind:
    """A set of arguments, with its name for messages.

    Attributes:
        words: "a variable", "an integer of 0 or more".
        accepts: whether an argument is in the set.
    """

    words: str
    accepts: Callable[[Argument], bool]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument of an op's schema.

    Attributes:
        kind: the set of allowed arguments.
        required: whether the op must have it.
    """

    kind: ArgumentKind
    required: bool = True


@dataclass(frozen=True, slots=True)
class Schema:
    """The arguments and results that an op may have.

    Attributes:
        parameters: by name, in order.
        results: their number; None: any number from ``least`` on.
    """

    parameters: Mapping[str, Parameter]
    results: int | None
    least: int = 0


def _is_int(value: Argument) -> bool:
    return (
        isinstance(value, int) and not isinstance(value, bool) and -LARGEST - 1 <= value <= LARGEST
    )


def _is_real(value: Argument) -> bool:
    return _is_int(value) or isinstance(value, float)


def _is_device(value: str) -> bool:
    return re.fullmatch(r"executor|cpu|cuda(:\d{1,3})?", value) is not None


def _is_literal(value: Argument) -> bool:
    if (
        not isinstance(value, Literal)
        or value.dtype not in DTYPES
        or any(size < 0 for size in value.shape)
    ):
        return False
    return len(value.data) == math.prod(value.shape) * DTYPES[value.dtype].itemsize


def optional(kind: ArgumentKind) -> ArgumentKind:
    """The kind, or None."""
    return ArgumentKind(f"{kind.words} or None", lambda value: value is None or kind.accepts(value))


def either(first: ArgumentKind, second: ArgumentKind) -> ArgumentKind:
    """One kind or the other."""
    return ArgumentKind(
        f"{first.words} or {second.words}",
        lambda value: first.accepts(value) or second.accepts(value),
    )


def many(kind: ArgumentKind) -> ArgumentKind:
    """A list of the kind, possibly empty."""
    return ArgumentKind(
        f"list of ({kind.words})",
        lambda value: isinstance(value, tuple) and all(map(kind.accepts, value)),
    )


def fixed(kind: ArgumentKind, length: int) -> ArgumentKind:
    """A list of ``length`` arguments of the kind."""
    items = many(kind).accepts
    words = f"list of {length} ({kind.words})"
    return ArgumentKind(
        words, lambda value: isinstance(value, tuple) and len(value) == length and items(value)
    )


def word(kind: str, allowed: Callable[[str], bool]) -> ArgumentKind:
    """A :class:`Symbol` of this kind with an allowed value."""
    return ArgumentKind(
        f"a {kind}",
        lambda value: isinstance(value, Symbol) and value.kind == kind and allowed(value.value),
    )


VARIABLE = ArgumentKind("a variable", lambda value: isinstance(value, Ref) and value.name != "")
VARIABLES = ArgumentKind(
    "a list of one or more variables",
    lambda value: isinstance(value, tuple) and len(value) > 0 and all(map(VARIABLE.accepts, value)),
)
INTEGER = ArgumentKind("an integer", _is_int)
INDEX = ArgumentKind(
    "an integer of 0 or more",
    lambda value: isinstance(value, int) and _is_int(value) and value >= 0,
)
COUNT = ArgumentKind(
    "an integer of 1 or more",
    lambda value: isinstance(value, int) and _is_int(value) and value >= 1,
)
NUMBER = ArgumentKind(
    "a finite number",
    lambda value: isinstance(value, int | float) and _is_real(value) and math.isfinite(value),
)
BOUND = ArgumentKind(
    "a number other than nan",
    lambda value: isinstance(value, int | float) and _is_real(value) and value == value,
)
REAL = ArgumentKind("a number", _is_real)
SCALAR = ArgumentKind(
    "a number or a bool", lambda value: isinstance(value, bool) or _is_real(value)
)
BOOLEAN = ArgumentKind("a bool", lambda value: isinstance(value, bool))
TEXT = ArgumentKind("a text", lambda value: isinstance(value, str))
NAME = ArgumentKind(
    "a text that is not empty", lambda value: isinstance(value, str) and value != ""
)
LITERAL = ArgumentKind(
    "a constant tensor (known dtype, as many bytes as its shape asks for)", _is_literal
)
DTYPE = word("dtype", DTYPES.__contains__)
DEVICE = word("device", _is_device)
LAYOUT = word("layout", LAYOUTS.__contains__)
MEMORY_FORMAT = word("memory_format", MEMORY_FORMATS.__contains__)
SIZE = either(INTEGER, VARIABLE)
NOTHING = ArgumentKind("nothing that a program can hold", lambda value: False)


def describe(value: Argument) -> str:
    """An argument in a message: short, with its type."""
    if isinstance(value, Literal):
        return f"a constant {value.dtype}{list(value.shape)} of {len(value.data)} bytes"
    if isinstance(value, Block):
        return f"a block of {len(value.ops)} ops"
    if isinstance(value, tuple) and len(value) > 8:
        return f"a list of {len(value)}, beginning with {', '.join(map(describe, value[:3]))}"
    shown = repr(value)
    return f"{shown if len(shown) <= 200 else shown[:200] + '...'} ({type(value).__name__})"


def where(op: Op) -> str:
    """An op in a message."""
    return f"op {op.type!r}" + (f" ({op.location})" if op.location else "")


def check_against(op: Op, schema: Schema) -> None:
    """Checks the names and kinds of an op's arguments, and the number of its results.

    Raises:
        ValueError: naming the op, the argument, what its schema asks for and what came.
    """
    for name in op.arguments:
        if name not in schema.parameters:
            known = ", ".join(schema.parameters) or "none"
            raise ValueError(
                f"{where(op)}: expected arguments among: {known}; got an argument {name!r}"
            )
    for name, parameter in schema.parameters.items():
        if name not in op.arguments:
            if parameter.required:
                raise ValueError(
                    f"{where(op)}, argument {name!r}: expected {parameter.kind.words}, got none"
                )
        elif not parameter.kind.accepts(op.arguments[name]):
            raise ValueError(
                f"{where(op)}, argument {name!r}: expected {parameter.kind.words}, got "
                f"{describe(op.arguments[name])}"
            )
    _check_results(op, schema)


def _check_results(op: Op, schema: Schema) -> None:
    count = len(op.outputs)
    if schema.results is None and count < schema.least:
        raise ValueError(f"{where(op)}: expected {schema.least} or more results, got {count}")
    if schema.results is not None and count != schema.results:
        raise ValueError(
            f"{where(op)}: expected {schema.results} results, got {count}: "
            f"{', '.join(op.outputs[:8])}"
        )
    named = [name for name in op.outputs if name]
    if len(named) != len(set(named)):
        raise ValueError(
            f"{where(op)}: expected results with names of their own, got {', '.join(named[:8])}"
        )
