"""The passes of gradients that trainers average among themselves, beside servers (mode
"collective").

Servers hold these parameters and never update them.  In the main program::

    c_allreduce_avg       before the updates, and before any barrier: the means over the trainers
    c_sync_comm_stream    waits until the means count
    the optimizer ops     of these parameters stay

All trainers average the same elements at once, however many gradients there are.  Where a lane is
sync, the servers decide which trainers are in a step, and the means count when they have: the wait
and the updates come after fetch_barrier then.  See [Note: a step of both] in
trainer/gradients/averaged_step.py.
"""

from __future__ import annotations

from dataclasses import replace

from transpiler.ir.graph import Argument, Op, Ref, freeze
from transpiler.ir.ops import is_optimizer
from transpiler.ir.updates import gradient_of, optimizer_ops, parameter_of
from transpiler.plan.plan import Plan
from transpiler.program import Program


def average_gradients(program: Program, plan: Plan) -> Program:
    """Averages the gradients of mode collective over the trainers, and waits for that."""
    averaged = [
        gradient_of(op) for op in optimizer_ops(program.main) if parameter_of(op) in plan.averaged
    ]
    if not averaged:
        return program
    ops = list(program.main.ops)
    first = next(index for index, op in enumerate(ops) if is_optimizer(op.type))
    arguments: dict[str, Argument] = {"x": tuple(map(Ref, averaged)), "ring_id": 0}
    kinds = ("c_allreduce_avg", "c_sync_comm_stream")
    ops[first:first] = [Op(kind, arguments, tuple(averaged)) for kind in kinds]
    return _with(program, ops)


def update_when_decided(program: Program, plan: Plan) -> Program:
    """Where servers decide a step, what its averages update is updated at the end."""
    if not plan.averages_follow_servers:
        return program
    last = [op for op in program.main.ops if _awaits(op, plan)]
    return _with(program, [*(op for op in program.main.ops if not _awaits(op, plan)), *last])


def _awaits(op: Op, plan: Plan) -> bool:
    if op.type == "c_sync_comm_stream":
        return True
    return is_optimizer(op.type) and parameter_of(op) in plan.averaged


def _with(program: Program, ops: list[Op]) -> Program:
    """The program with these ops in block 0."""
    block = replace(program.main, ops=tuple(ops), variables=freeze(program.main.variables))
    return program.with_blocks(block, *program.blocks[1:])
