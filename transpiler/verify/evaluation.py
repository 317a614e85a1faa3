"""The invariants of a trainer's program that evaluates: the clone of its main program for tests."""

from __future__ import annotations

from collections.abc import Iterator

from transpiler.ir.effects import Aliases, changed
from transpiler.ir.graph import PERSISTENT, Role
from transpiler.ir.ops import is_optimizer
from transpiler.plan.plan import Plan
from transpiler.program import Program
from transpiler.verify.invariants import Violation, at
from transpiler.verify.trainer import is_startup

_ARRIVAL = ("recv", "fetch_barrier", "concat")


def is_evaluation(program: Program) -> bool:
    """Whether a trainer's program computes and trains nothing."""
    trained = program.main.variables_of(Role.GRADIENT, Role.STATE, Role.DELTA)
    return not trained and not is_startup(program)


def changes_nothing(program: Program, plan: Plan | None = None) -> Iterator[Violation]:
    """A program that evaluates sends nothing and updates nothing; of persistent variables it writes
    only those that it receives.
    """
    ops = program.main.ops
    memory = Aliases(ops)
    held = {memory.of(v.name) for v in program.main.variables.values() if v.role in PERSISTENT}
    for index, op in enumerate(ops):
        if op.type in ("send", "send_barrier") or is_optimizer(op.type):
            yield Violation(at(0, index, op), "", "expected no message and no update, got one")
        if op.type in _ARRIVAL:
            continue
        for name in (*changed(op), *filter(None, op.outputs)):
            variable = program.main.variables.get(name)
            writes = name in changed(op) and memory.of(name) in held
            if writes or (variable is not None and variable.role in PERSISTENT):
                yield Violation(at(0, index, op), name, "expected it unchanged, got a write")


def received_before_computing(program: Program, plan: Plan) -> Iterator[Violation]:
    """A program that evaluates receives all parameters before it computes anything, and waits for
    them at one fetch_barrier.
    """
    ops = program.main.ops
    arriving = [index for index, op in enumerate(ops) if op.type in _ARRIVAL]
    for place, index in enumerate(arriving):
        if index != place:
            yield Violation(at(0, index, ops[index]), "", "it arrives after an op that computes")
    waits = sum(op.type == "fetch_barrier" for op in ops)
    if waits != int(any(op.type == "recv" for op in ops)):
        yield Violation("", "", f"expected one fetch_barrier if anything is received, got {waits}")
