"""The passes of a trainer's main program whose updates are sharded over the trainers.

Each trained parameter has an owner among the trainers (transpiler/plan/placement.py).  It alone
keeps the optimizer's state of the parameter::

    forward; the loss's gradient, times 1 / trainers; backward, and in it
    c_reduce_sum          where a gradient is final: its owner gets the sum, the mean of gradients
    clipping, updates     of this trainer's parameters only
    c_broadcast           of every parameter, from its owner

(Rajbhandari et al.: ZeRO, memory optimizations toward training trillion parameter models, 2020;
its stage 1.)
"""

from __future__ import annotations

from dataclasses import replace

from transpiler.ir.graph import Op, Ref, freeze
from transpiler.ir.ops import is_optimizer
from transpiler.ir.updates import gradient_of, parameter_of
from transpiler.passes.collective import CLIPS, following, raw_gradients
from transpiler.plan.placement import owners
from transpiler.plan.plan import Plan
from transpiler.program import Program


def reduce_to_owners(program: Program, plan: Plan) -> Program:
    """Sums each gradient on its parameter's owner right after the last op that writes it; the rings
    take turns.
    """
    assert plan.collective is not None, "passes of a job without servers"
    owner, rings = owners(plan), plan.collective.rings
    roots = {raw: owner[parameter] for parameter, raw in raw_gradients(program).items()}

    def reduced(name: str, count: int) -> Op:
        return Op(
            "c_reduce_sum",
            {"x": Ref(name), "root": roots[name], "ring_id": count % rings},
            (name,),
        )

    return _with(program, following(program, roots, reduced))


def update_on_owners(program: Program, plan: Plan) -> Program:
    """Drops what clips and updates other trainers' parameters; then every parameter is broadcast by
    its owner.
    """
    assert plan.collective is not None and program.deployment is not None, "a trainer's program"
    owner, mine = owners(plan), program.deployment.trainer_id
    others = {name for name, rank in owner.items() if rank != mine}
    unread = {
        gradient_of(op)
        for op in program.main.ops
        if is_optimizer(op.type) and parameter_of(op) in others
    }
    kept = [
        op
        for op in program.main.ops
        if not (is_optimizer(op.type) and parameter_of(op) in others)
        and not (op.type in CLIPS and op.outputs[0] in unread)
    ]
    sends = [
        Op(
            "c_broadcast",
            {"x": Ref(name), "root": rank, "ring_id": index % plan.collective.rings},
            (name,),
        )
        for index, (name, rank) in enumerate(owner.items())
    ]
    return _with(program, [*kept, *sends])


def _with(program: Program, ops: list[Op]) -> Program:
    """The program with these ops in block 0, and with the variables that some op names, or that
    hold values.
    """
    used = {name for op in ops for name in (*op.inputs, *op.outputs)}
    before = {name for op in program.main.ops for name in (*op.inputs, *op.outputs)}
    variables = {
        name: variable
        for name, variable in program.main.variables.items()
        if name in used or name not in before
    }
    block = replace(program.main, ops=tuple(ops), variables=freeze(variables))
    return program.with_blocks(block, *program.blocks[1:])
