"""A block without the ops and variables that some results do not need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from transpiler.ir.aten_ops import CHECKS
from transpiler.ir.effects import Memory, changed
from transpiler.ir.graph import Argument, Block, Op, Ref, Role, freeze


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
    """Those ops that give ``wanted`` their values, in their order, and those that check them."""
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
    left_out = {name for op in ops for name in op.outputs}
    left_out -= {name for op in kept for name in op.outputs}
    chosen = {id(op) for op in kept}
    return [
        op
        for op in ops
        if id(op) in chosen or (op.type in CHECKS and left_out.isdisjoint(op.inputs))
    ]


def results_and_inputs(main: Block) -> tuple[list[str], list[str]]:
    """The names of what a step returns, and of what it is given, in order.

    Raises:
        ValueError: it returns nothing.
    """
    wanted = [variable.name for variable in main.variables_of(Role.OUTPUT)]
    if not wanted:
        raise ValueError("expected a program with outputs, got one that returns nothing")
    return wanted, [variable.name for variable in main.variables_of(Role.INPUT)]


def renamed(op: Op, names: Mapping[str, str]) -> Op:
    """The op with other names in place of those of its arguments that are keys of ``names``."""
    if not names or names.keys().isdisjoint(op.inputs):
        return op

    def other(argument: Argument) -> Argument:
        if isinstance(argument, Ref):
            return Ref(names.get(argument.name, argument.name))
        return tuple(map(other, argument)) if isinstance(argument, tuple) else argument

    return replace(op, arguments={key: other(each) for key, each in op.arguments.items()})
