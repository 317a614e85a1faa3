"""The invariant of gradients that trainers average among themselves, beside servers."""

from __future__ import annotations

from collections.abc import Iterator

from transpiler.ir.graph import Op
from transpiler.ir.ops import is_optimizer
from transpiler.ir.updates import gradient_of, optimizer_ops, parameter_of
from transpiler.plan.plan import Plan
from transpiler.program import Program
from transpiler.verify.invariants import Violation, at

_SHARED = ("c_allreduce_sum", "c_sync_comm_stream", "scale")


def gradients_averaged_once(program: Program, plan: Plan) -> Iterator[Violation]:
    """Each gradient of mode collective, and no other, is summed over the trainers exactly once,
    when it is final, waited for, and divided by their number; its update reads that.
    """
    wanted = {
        gradient_of(op): parameter_of(op)
        for op in optimizer_ops(program.main)
        if parameter_of(op) in plan.averaged
    }
    stages: dict[str, int] = dict.fromkeys(wanted, 0)  # how far each has come
    for index, op in enumerate(program.main.ops):
        for name in op.outputs:
            if name not in wanted and op.type in ("c_allreduce_sum", "c_sync_comm_stream"):
                yield Violation(at(0, index, op), name, "no trainer averages it")
            elif name in wanted:
                yield from _next(stages, index, op, name, plan.trainers)
        if is_optimizer(op.type) and stages.get(gradient_of(op), 3) != 3:
            yield Violation(at(0, index, op), gradient_of(op), "it is used before it is the mean")


def _next(
    stages: dict[str, int], index: int, op: Op, name: str, trainers: int
) -> Iterator[Violation]:
    """A gradient is written: by what produces it, or by the next of the three ops."""
    stage = stages[name]
    if op.type not in _SHARED or (op.type == "scale" and stage == 0):
        if stage:
            yield Violation(at(0, index, op), name, "it changes after it was summed")
    elif stage == len(_SHARED) or op.type != _SHARED[stage]:
        due = _SHARED[stage] if stage < len(_SHARED) else "its update"
        yield Violation(at(0, index, op), name, f"expected {due} next")
    elif op.type == "scale" and op.arguments["scale"] != 1.0 / trainers:
        yield Violation(
            at(0, index, op),
            name,
            f"expected the mean of {trainers} trainers, got a factor of {op.arguments['scale']}",
        )
    else:
        stages[name] = stage + 1
