"""The pass of gradients that trainers average among themselves, beside servers (mode "collective").

Servers hold these parameters and never update them.  In the main program::

    c_allreduce_sum       right after the last op that writes a gradient: it joins the others
    ...
    c_sync_comm_stream    before the updates: all of them are summed over the trainers
    scale                 each by 1 / trainers
    the optimizer ops     of these parameters stay

All trainers sum the same elements at once, however many gradients there are.
"""

from __future__ import annotations

from dataclasses import replace

from transpiler.ir.graph import Op, Ref, freeze
from transpiler.ir.ops import is_optimizer
from transpiler.ir.updates import gradient_of, optimizer_ops, parameter_of
from transpiler.plan.plan import Plan
from transpiler.program import Program


def average_gradients(program: Program, plan: Plan) -> Program:
    """Sums the gradients that trainers average over all trainers, and divides them by their
    number.
    """
    averaged = [
        gradient_of(op) for op in optimizer_ops(program.main) if parameter_of(op) in plan.averaged
    ]
    if not averaged:
        return program
    final = {
        name: index
        for index, op in enumerate(program.main.ops)
        for name in op.outputs
        if name in averaged
    }
    ops: list[Op] = []
    waited = False
    for index, op in enumerate(program.main.ops):
        if is_optimizer(op.type) and not waited:
            waited = True
            ops += _means(averaged, plan.trainers)
        ops.append(op)
        ops += [
            Op("c_allreduce_sum", {"x": Ref(name), "ring_id": 0, "bucket": 0}, (name,))
            for name in dict.fromkeys(op.outputs)
            if final.get(name) == index
        ]
    block = replace(program.main, ops=tuple(ops), variables=freeze(program.main.variables))
    return program.with_blocks(block, *program.blocks[1:])


def _means(gradients: list[str], trainers: int) -> list[Op]:
    """Waits for the sums, and makes means of them."""
    wait = Op(
        "c_sync_comm_stream",
        {"x": tuple(map(Ref, gradients)), "ring_id": 0},
        tuple(gradients),
    )
    scales = [Op("scale", {"x": Ref(name), "scale": 1.0 / trainers}, (name,)) for name in gradients]
    return [wait, *scales]
