"""The invariants of gradients that trainers average among themselves, beside servers."""

from __future__ import annotations

from collections.abc import Iterator

from transpiler.ir.graph import Op
from transpiler.ir.ops import is_optimizer
from transpiler.ir.updates import gradient_of, optimizer_ops, parameter_of
from transpiler.plan.plan import Plan
from transpiler.program import Program
from transpiler.verify.invariants import Violation, at, numbered

_STAGES = ("c_allreduce_avg", "c_sync_comm_stream")


def gradients_averaged_once(program: Program, plan: Plan) -> Iterator[Violation]:
    """Each gradient of mode collective, and no other, is averaged over the trainers exactly once,
    when it is final, and waited for; its update reads that.
    """
    wanted = {
        gradient_of(op): parameter_of(op)
        for op in optimizer_ops(program.main)
        if parameter_of(op) in plan.averaged
    }
    stages: dict[str, int] = dict.fromkeys(wanted, 0)  # how far each has come
    for index, op in enumerate(program.main.ops):
        for name in op.outputs:
            if name not in wanted and op.type in _STAGES:
                yield Violation(at(0, index, op), name, "no trainer averages it")
            elif name in wanted:
                yield from _next(stages, index, op, name)
        done = len(_STAGES)
        if is_optimizer(op.type) and stages.get(gradient_of(op), done) != done:
            yield Violation(at(0, index, op), gradient_of(op), "it is used before it is the mean")


def _next(stages: dict[str, int], index: int, op: Op, name: str) -> Iterator[Violation]:
    """A gradient is written: by what produces it, or by the next of the two ops."""
    stage = stages[name]
    if op.type not in _STAGES:
        if stage:
            yield Violation(at(0, index, op), name, "it changes after it was averaged")
    elif stage == len(_STAGES) or op.type != _STAGES[stage]:
        due = _STAGES[stage] if stage < len(_STAGES) else "its update"
        yield Violation(at(0, index, op), name, f"expected {due} next")
    else:
        stages[name] = stage + 1


def averaged_before_barriers(program: Program, plan: Plan) -> Iterator[Violation]:
    """A trainer has its averages before it closes a step; where servers decide the step, they count
    after fetch_barrier.
    """
    closes = numbered(program, "send_barrier", "recv", "fetch_barrier")
    first = min((index for index, _ in closes), default=len(program.main.ops))
    last = max((index for index, _ in closes), default=-1)
    for index, op in numbered(program, *_STAGES):
        if op.type == "c_allreduce_avg" and index > first:
            yield Violation(at(0, index, op), op.outputs[0], f"expected it before op {first}")
        elif op.type == "c_sync_comm_stream" and plan.averages_follow_servers and index < last:
            yield Violation(at(0, index, op), op.outputs[0], f"expected it after op {last}")
