"""The data of a program: frozen variables, ops and blocks, as in protos/transpiler/program.proto.

A program is a list of blocks.  A :class:`Block` is a table of variables and a list of ops in the
order in which they run.  An :class:`Op` is a type from the catalogue (``ops.py``) with named
arguments.  Nothing here holds code: a program prints, saves, travels and compares as data.  The
live objects of a process (the tensors behind the names, the optimizer whose schedule moves) are in
its ``Storage`` (``graph.py``), which has no part in the program's meaning.

[Note: names]  ``fc.weight`` is a parameter, as the module names it; ``fc.weight@GRAD`` is its
gradient; ``fc.weight.block0`` and ``fc.weight@GRAD.block0`` are slices of the two;
``fc.weight@GRAD.trainer_1`` is what trainer 1 sent, on a server that merges; ``fc.weight@exp_avg``
is an optimizer state.  No code parses these names: a variable's role and its ``of`` say what it is.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias


class Role(enum.Enum):
    """The kind of a variable; the values are those of the protobuf enum."""

    TEMPORARY = 0
    INPUT = 1  # fed at every step
    PARAMETER = 2  # trained
    BUFFER = 3  # persistent and not trained: running statistics, frozen parameters
    GRADIENT = 4
    STATE = 5  # optimizer state
    DELTA = 6  # the change of a parameter in k steps
    SIZE = 7  # a whole number: the extent of a free dimension
    OUTPUT = 8  # returned by a step
    # rows by id, looked up and trained a few at a time; no process holds them as one tensor
    TABLE = 9


PERSISTENT = frozenset({Role.PARAMETER, Role.BUFFER, Role.STATE})


@dataclass(frozen=True, slots=True)
class Variable:
    """A named tensor of a program, or a whole number that describes one.

    Attributes:
        name: unique in its block and in block 0.
        shape: a str is a size that stays free, such as "batch"; one name has one value throughout
            a step.
        dtype: torch's name without the prefix: "float32", "int64"; "size" for a whole number.
        role: the kind of variable.
        of: for a gradient, state, delta or slice the parameter that it belongs to; otherwise "".

    Example:
        >>> from pserver import Variable
        >>> Variable("x", ("batch", 8), "float32").shape
        ('batch', 8)
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    role: Role = Role.TEMPORARY
    of: str = ""


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is a variable."""

    name: str


@dataclass(frozen=True, slots=True)
class Symbol:
    """An argument that is a word of torch's vocabulary: ``Symbol("dtype", "float32")``.

    Attributes:
        kind: "dtype", "device", "layout" or "memory_format".
        value: torch's word without the prefix; the device "executor" is the one that a program runs
            on.
    """

    kind: str
    value: str


@dataclass(frozen=True, slots=True)
class Literal:
    """An argument that is a constant tensor: row-major, little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


Argument: TypeAlias = (
    "None | bool | int | float | str | Ref | Symbol | Literal | Block | tuple[Argument, ...]"
)


def refs(argument: Argument) -> Iterator[str]:
    """The names of the variables in an argument, in order."""
    if isinstance(argument, Ref):
        yield argument.name
    elif isinstance(argument, tuple):
        for item in argument:
            yield from refs(item)


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of a program.

    Attributes:
        type: its name in the catalogue: "aten.mm", "send", "adam".
        arguments: by the names of the op's schema.
        outputs: the variables that it defines or writes; "" for a result that nothing reads.
        location: the user's line, "train.py:12"; for messages only, so it does not compare.

    Example:
        >>> from pserver import Op
        >>> from transpiler.ir.graph import Ref
        >>> op = Op("scale", {"x": Ref("g"), "scale": 0.5}, ("g",))
        >>> op.inputs, op.attributes
        (('g',), {'scale': 0.5})
    """

    type: str
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    location: str = field(default="", compare=False)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the variables that the op reads, in the order of its arguments."""
        return tuple(name for argument in self.arguments.values() for name in refs(argument))

    @property
    def attributes(self) -> dict[str, Argument]:
        """The arguments that hold no variable."""
        return {
            key: value
            for key, value in self.arguments.items()
            if not any(True for _ in refs(value))
        }


@dataclass(frozen=True, slots=True)
class Block:
    """Variables, and the ops over them in the order in which they run.

    Attributes:
        index: its place in the program.
        variables: by name; those of block 0 are visible in every block.
        ops: in order.

    Example:
        >>> from pserver import Block, Variable
        >>> block = Block(0, {"x": Variable("x", (2,), "float32")}, ())
        >>> [variable.name for variable in block.variables.values()]
        ['x']
    """

    index: int
    variables: Mapping[str, Variable]
    ops: tuple[Op, ...]

    def variables_of(self, *roles: Role) -> list[Variable]:
        """The variables with one of these roles, in the order of their definition."""
        return [variable for variable in self.variables.values() if variable.role in roles]


def freeze(mapping: Mapping[str, Variable]) -> Mapping[str, Variable]:
    """A read-only view of a copy."""
    return MappingProxyType(dict(mapping))
