"""What a program is: named variables, blocks, ops, as frozen data that mirrors
``protos/transpiler/program.proto``.

A :class:`Program` is a list of blocks.  A :class:`Block` is a table of variables and a list of ops
in the order in which they run.  An :class:`Op` is a type from the catalogue (``ops.py``) with named
arguments.  Nothing here holds code: a program prints, saves, travels and compares as data.  What a
process holds live (the tensors behind the names, the optimizer whose schedule moves) is its
:class:`Storage`, which is no part of the program's meaning.

[Note: names]  ``fc.weight`` is a parameter, as the module names it; ``fc.weight@GRAD`` its
gradient; ``fc.weight.block0`` and ``fc.weight@GRAD.block0`` slices of them;
``fc.weight@GRAD.trainer_1`` what trainer 1 sent, on a server that merges; ``fc.weight@exp_avg`` an
optimizer state.  Nobody parses these names: a variable says by its role and its ``of`` what it is.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

import torch

from transpiler.ir.rules import Rule


class Role(enum.Enum):
    """What a variable is; the values are those of the protobuf enum."""

    TEMPORARY = 0
    INPUT = 1  # fed at every step
    PARAMETER = 2  # trained
    BUFFER = 3  # persistent and not trained: running statistics, frozen parameters
    GRADIENT = 4
    STATE = 5  # optimizer state
    DELTA = 6  # what k steps changed
    SIZE = 7  # a whole number: the extent of a free dimension
    OUTPUT = 8  # what a step returns
    # rows by id, which are looked up and trained a few at a time: nobody holds it as one tensor
    TABLE = 9


PERSISTENT = frozenset({Role.PARAMETER, Role.BUFFER, Role.STATE})


@dataclass(frozen=True, slots=True)
class Variable:
    """A tensor with a name, or (dtype ``"size"``) a whole number that describes one."""

    name: str
    # a str is a size that stays free; one name has one value throughout a step
    shape: tuple[int | str, ...]
    dtype: str  # torch's name without the prefix: "float32", "int64"
    role: Role = Role.TEMPORARY
    of: str = ""  # for a gradient, state, delta or slice: the parameter that it belongs to


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is a variable."""

    name: str


@dataclass(frozen=True, slots=True)
class Symbol:
    """An argument that is a word of torch's vocabulary: ``Symbol("dtype", "float32")``,
    ``Symbol("device", "executor")``.
    """

    kind: str  # "dtype", "device", "layout" or "memory_format"
    value: str


@dataclass(frozen=True, slots=True)
class Literal:
    """An argument that is a constant tensor: row-major, little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


Argument = None | bool | int | float | str | Ref | Symbol | Literal | tuple["Argument", ...]


def refs(argument: Argument) -> Iterator[str]:
    """The names of the variables in an argument, in order."""
    if isinstance(argument, Ref):
        yield argument.name
    elif isinstance(argument, tuple):
        for item in argument:
            yield from refs(item)


@dataclass(frozen=True, slots=True)
class Op:
    """One operation: a type, named arguments, and the variables that it defines (``""`` for a
    result that nobody reads).
    """

    type: str
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    # the user's line, "train.py:12": for messages only
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
    """Variables and the ops over them, in the order in which they run.

    Block 0's variables are visible in every block.
    """

    index: int
    variables: Mapping[str, Variable]
    ops: tuple[Op, ...]

    def variables_of(self, *roles: Role) -> list[Variable]:
        """The variables with one of these roles, in the order of their definition."""
        return [variable for variable in self.variables.values() if variable.role in roles]


class Ruled(Protocol):
    """What has an update rule whose numbers may move."""

    def rule(self) -> Rule:
        """With the present numbers."""


class Storage:
    """The live side of a program in the process that captured it.

    Attributes:
        tensors: parameters, buffers and frozen parameters by name.  They are the module's own
            tensors: training the program trains the module.
        optimizer: the user's optimizer, whose ``param_groups`` a scheduler moves and whose
            ``state`` a single-node run fills.
        tables: the modules that look a table up, by its name: their rows are the table's.
        own: the optimizers of tables' own, in the order of the groups that they add to the
            optimizer's.
        rows: what a server's tables begin with, by name: ids, int64 [n], and values, [n, dim].
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        optimizer: torch.optim.Optimizer | None,
        tables: Mapping[str, Sequence[torch.nn.Module]] | None = None,
        own: Sequence[Ruled] = (),
        rows: Mapping[str, tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> None:
        self.tensors = dict(tensors)
        self.optimizer = optimizer
        self.tables = dict(tables or {})
        self.own = tuple(own)
        self.rows = dict(rows or {})


def freeze(mapping: Mapping[str, Variable]) -> Mapping[str, Variable]:
    """A read-only view of a copy."""
    return MappingProxyType(dict(mapping))
