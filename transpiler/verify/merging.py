"""The invariant of gradients that are merged over runs."""

from __future__ import annotations

from collections.abc import Iterator

from transpiler.ir.ops import COLLECTIVE, is_optimizer
from transpiler.plan.plan import Plan
from transpiler.program import Program
from transpiler.verify.invariants import Violation, at, numbered

_LEAVES = COLLECTIVE | {"send", "send_barrier"}


def merged_once(program: Program, plan: Plan | None = None) -> Iterator[Violation]:
    """Gradients are merged over runs once or not at all, and what updates or leaves the process
    stands behind that.
    """
    merges = numbered(program, "gradient_merge")
    for index, op in merges[1:]:
        yield Violation(at(0, index, op), op.outputs[0], "a run would end at two ops")
    for index, op in enumerate(program.main.ops[: merges[0][0]] if merges else ()):
        if is_optimizer(op.type) or op.type in _LEAVES:
            name = next(iter((*op.outputs, *op.inputs)), "")
            yield Violation(at(0, index, op), name, "it acts in every run")
