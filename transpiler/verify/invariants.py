"""The invariants of every program and plan, and the error of a program that violates one.

An invariant is a function of a program and its plan that yields the violations it finds.  The first
sentence of its docstring is the invariant in words, which the error quotes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from transpiler.ir.graph import PERSISTENT, Block, Op, Role
from transpiler.plan.plan import Plan
from transpiler.program import Program


@dataclass(frozen=True, slots=True)
class Violation:
    """One place in a program where an invariant does not hold.

    Attributes:
        op: the op, as :func:`at` describes it, or the block; "" for the program as a whole.
        variable: its name; "" if the violation concerns none.
        why: what was expected and what came.
    """

    op: str
    variable: str
    why: str


Invariant = Callable[[Program, Plan], Iterator[Violation]]


class IllegalProgram(ValueError):
    """A program violates an invariant; the message names the op, the variable and the invariant.

    Attributes:
        invariant: its sentence, without the full stop.
        violation: the first that was found.
    """

    def __init__(self, invariant: str, violation: Violation) -> None:
        place = ", ".join(part for part in (violation.op, violation.variable) if part)
        super().__init__(f"{place or 'program'}: {violation.why} (invariant: {invariant})")
        self.invariant = invariant
        self.violation = violation


def at(block: int, index: int, op: Op) -> str:
    """An op in a message."""
    return f"op {index} of block {block} ({op.type}{', ' + op.location if op.location else ''})"


def numbered(program: Program, *types: str) -> list[tuple[int, Op]]:
    """The ops of block 0 that have one of these types, with their positions."""
    return [(index, op) for index, op in enumerate(program.main.ops) if op.type in types]


def _given(program: Program) -> set[str]:
    """The variables that have a value before the first op runs: fed, held, or received by a
    server.
    """
    given = {
        v.name
        for v in program.main.variables.values()
        if v.role in PERSISTENT or v.role is Role.INPUT
    }
    if program.deployment is not None:
        given.update(v.name for v in program.main.variables_of(Role.TABLE))
    if program.deployment is not None and program.deployment.server_index is not None:
        given.update(v.name for v in program.main.variables_of(Role.GRADIENT, Role.DELTA))
    return given


def table_of_block(block: Block, main: Block) -> str:
    """The table that a block of a server's program updates or looks up; "" for a slice's block."""
    names = (name for op in block.ops for name in (*op.inputs, *op.outputs))
    return next(
        (
            name
            for name in names
            if name in main.variables and main.variables[name].role is Role.TABLE
        ),
        "",
    )


def _undefined(block: Block, main: Block) -> Iterator[tuple[int, Op, str]]:
    for index, op in enumerate(block.ops):
        for name in (*op.inputs, *filter(None, op.outputs)):
            if name not in block.variables and name not in main.variables:
                yield index, op, name


def defined_before_use(program: Program, plan: Plan | None = None) -> Iterator[Violation]:
    """Every variable that an op reads or writes is in the block's table or block 0's, and has a
    value before it is read.
    """
    given = _given(program)
    for block in program.blocks:
        for index, op, name in _undefined(block, program.main):
            yield Violation(
                at(block.index, index, op),
                name,
                "expected a defined variable, got a name that neither block defines",
            )
        present = set(given)
        for index, op in enumerate(block.ops):
            for name in op.inputs:
                if name not in present:
                    yield Violation(
                        at(block.index, index, op),
                        name,
                        "it is read before an op gives it a value",
                    )
            present.update(op.outputs)


def slices_tile(program: Program, plan: Plan) -> Iterator[Violation]:
    """The slices of a variable follow one another without gap or overlap and cover it; names differ
    and servers exist.
    """
    seen: set[str] = set()
    for placement in plan.placements:
        edge = 0
        for slice_ in placement.slices:
            if slice_.begin != edge or slice_.end < slice_.begin:
                yield Violation(
                    "",
                    slice_.name,
                    f"expected a slice from element {edge}, got [{slice_.begin}, {slice_.end})",
                )
            edge = slice_.end
            elements = slice_.end - slice_.begin
            if math.prod(slice_.shape) != elements:
                yield Violation(
                    "",
                    slice_.name,
                    f"expected {elements} elements, got shape {list(slice_.shape)}",
                )
            if slice_.name in seen:
                yield Violation("", slice_.name, "two slices have this name")
            if not 0 <= slice_.server < plan.servers:
                yield Violation(
                    "",
                    slice_.name,
                    f"expected a server from 0 to {plan.servers - 1}, got {slice_.server}",
                )
            seen.add(slice_.name)
        if edge != math.prod(placement.shape):
            yield Violation(
                "",
                placement.name,
                f"expected slices of {math.prod(placement.shape)} elements in all, got {edge}",
            )
