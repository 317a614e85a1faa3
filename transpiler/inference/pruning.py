"""A block without the ops and variables that some results do not need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from transpiler.ir.effects import Memory, changed
from transpiler.ir.graph import Block, Op, Role, freeze


def pruned(main: Block, wanted: Iterable[str], inputs: Iterable[str] = ()) -> Block:
    """The block with those ops alone that give ``wanted`` their values, in their order.

    An op that changes a variable in place stays if a later one reads that memory.

    Args:
        main: block 0 of a program.
        wanted: names of variables.
        inputs: inputs that stay although nothing reads them.
    """
    ops = needed(main.ops, wanted)
    named = {name for op in ops for name in (*op.inputs, *filter(None, op.outputs))}
    named |= {*wanted, *inputs}
    variables = {name: each for name, each in main.variables.items() if name in named}
    return replace(main, ops=tuple(ops), variables=freeze(variables))


def needed(ops: Sequence[Op], wanted: Iterable[str]) -> list[Op]:
    """Those ops that give ``wanted`` their values, in their order."""
    memory, names = Memory(ops), set(wanted)
    touched = {memory.of(name) for name in names}
    kept: list[Op] = []
    for op in reversed(ops):
        gives = not names.isdisjoint(op.outputs)
        if not gives and not any(memory.of(name) in touched for name in changed(op)):
            continue
        kept.append(op)
        names.difference_update(op.outputs)
        names.update(op.inputs)
        touched.update(map(memory.of, op.inputs))
    return kept[::-1]


def results_and_inputs(main: Block) -> tuple[list[str], list[str]]:
    """The names of what a step returns, and of what it is given, in order.

    Raises:
        ValueError: it returns nothing.
    """
    wanted = [variable.name for variable in main.variables_of(Role.OUTPUT)]
    if not wanted:
        raise ValueError("expected a program with outputs, got one that returns nothing")
    return wanted, [variable.name for variable in main.variables_of(Role.INPUT)]
