"""Laws that every program and every plan obeys, and what it means to break one.

A law is a function of a program and its plan that yields what is wrong; the first sentence of its
docstring is the law.
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
    """One violation: where (an op, or "" for the program as a whole), of which variable, and in
    what way.
    """

    op: str
    variable: str
    why: str


Invariant = Callable[[Program, Plan], Iterator[Violation]]


class IllegalProgram(ValueError):
    """A program breaks a law.  The message names the law, the op and the variable."""

    def __init__(self, law: str, fault: Violation) -> None:
        place = ", ".join(part for part in (fault.op, fault.variable) if part)
        super().__init__(f"{place or 'program'}: {fault.why} (law: {law})")
        self.law = law
        self.fault = fault


def at(block: int, index: int, op: Op) -> str:
    """An op in a message."""
    return f"op {index} of block {block} ({op.type}{', ' + op.location if op.location else ''})"


def numbered(program: Program, *types: str) -> list[tuple[int, Op]]:
    """The ops of block 0 that have one of these types, with their positions."""
    return [(index, op) for index, op in enumerate(program.main.ops) if op.type in types]


def _given(program: Program) -> set[str]:
    """What is there before the first op runs: fed, held, or (on a server) received."""
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
    """The table that a block of a server's program is for; "" for one of a slice."""
    names = (name for op in block.ops for name in (*op.inputs, *op.outputs))
    return next(
        (
            name
            for name in names
            if name in main.variables and main.variables[name].role is Role.TABLE
        ),
        "",
    )


def _unheld(block: Block, main: Block) -> Iterator[tuple[int, Op, str]]:
    for index, op in enumerate(block.ops):
        for name in (*op.inputs, *filter(None, op.outputs)):
            if name not in block.variables and name not in main.variables:
                yield index, op, name


def defined_before_use(program: Program, plan: Plan | None = None) -> Iterator[Violation]:
    """Every variable that an op reads or writes is in the block's table or block 0's, and is there
    before it is read.
    """
    given = _given(program)
    for block in program.blocks:
        for index, op, name in _unheld(block, program.main):
            yield Violation(
                at(block.index, index, op),
                name,
                "expected a defined variable, got a name that no table has",
            )
        present = set(given)
        for index, op in enumerate(block.ops):
            for name in op.inputs:
                if name not in present:
                    yield Violation(
                        at(block.index, index, op),
                        name,
                        "it is read before any op has given it a value",
                    )
            present.update(op.outputs)


def slices_tile(program: Program, plan: Plan) -> Iterator[Violation]:
    """The slices of a variable follow one another without gap or overlap and cover it; names differ
    and servers exist.
    """
    seen: set[str] = set()
    for placement in plan.placements:
        edge = 0
        for piece in placement.slices:
            if piece.begin != edge or piece.end < piece.begin:
                yield Violation(
                    "",
                    piece.name,
                    f"expected a slice from element {edge}, got [{piece.begin}, {piece.end})",
                )
            edge = piece.end
            if math.prod(piece.shape) != piece.end - piece.begin:
                yield Violation(
                    "",
                    piece.name,
                    f"expected {piece.end - piece.begin} elements, got shape {list(piece.shape)}",
                )
            if piece.name in seen:
                yield Violation("", piece.name, "two slices have this name")
            if not 0 <= piece.server < plan.servers:
                yield Violation(
                    "",
                    piece.name,
                    f"expected a server from 0 to {plan.servers - 1}, got {piece.server}",
                )
            seen.add(piece.name)
        if edge != math.prod(placement.shape):
            yield Violation(
                "",
                placement.name,
                f"expected slices of {math.prod(placement.shape)} elements in all, got {edge}",
            )
