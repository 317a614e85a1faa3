"""The passes of a trainer's startup program without servers: rings, and trainer 0's values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from transpiler.ir.graph import Argument, Op, Ref, Variable, freeze
from transpiler.ir.scaling_ops import CHECK
from transpiler.plan.plan import Plan, all_ids, ids_of
from transpiler.program import Program

CLIPS = frozenset({"clip", "clip_by_norm", "global_norm_scale", "scale_by"})
_AFTER_SUMS = CLIPS | {CHECK}  # and the optimizer ops
ID_BYTES = 16
WIDE = ("float32", "float64")  # dtypes of gradients that may travel as float16


def _with(program: Program, ops: Iterable[Op], *added: Variable) -> Program:
    """The program with these ops in block 0, and with these variables besides its own."""
    variables = freeze(
        {**program.main.variables, **{variable.name: variable for variable in added}}
    )
    return program.with_blocks(
        replace(program.main, ops=tuple(ops), variables=variables), *program.blocks[1:]
    )


def generate_ids(program: Program, plan: Plan) -> Program:
    """Appends the op with which trainer 0 generates an id for every ring and sends it to the
    others.
    """
    collective, deployment = plan.collective, program.deployment
    assert collective is not None and deployment is not None, "passes of a job without servers"
    names = all_ids(collective)
    arguments: dict[str, Argument] = {
        "endpoints": deployment.endpoints,
        "trainer_id": deployment.trainer_id,
        "nccl_comm_num": collective.rings,
        "use_hierarchical_allreduce": collective.inner > 0,
        "hierarchical_allreduce_inter_nranks": collective.inner,
    }
    added = [Variable(name, (ID_BYTES,), "uint8") for name in names]
    return _with(program, [*program.main.ops, Op("gen_nccl_id", arguments, names)], *added)


def init_rings(program: Program, plan: Plan) -> Program:
    """Appends the op that initialises each ring with its ids."""
    collective, deployment = plan.collective, program.deployment
    assert collective is not None and deployment is not None, "passes of a job without servers"
    common: dict[str, Argument] = {"nranks": plan.trainers, "trainer_id": deployment.trainer_id}
    inits = [
        Op(
            "c_comm_init",
            {"x": tuple(map(Ref, ids_of(collective, ring))), "ring_id": ring, **common},
        )
        for ring in range(collective.rings)
    ]
    return _with(program, [*program.main.ops, *inits])


def broadcast_parameters(program: Program, plan: Plan) -> Program:
    """Broadcasts every parameter and buffer from trainer 0, over the rings in turn."""
    assert plan.collective is not None, "passes of a job without servers"
    rings = plan.collective.rings
    ops = [
        Op(
            "c_broadcast",
            {"x": Ref(placement.name), "root": 0, "ring_id": index % rings},
            (placement.name,),
        )
        for index, placement in enumerate(plan.placements)
    ]
    return _with(program, [*program.main.ops, *ops])


def fuse_broadcasts(program: Program, plan: Plan) -> Program:
    """Lets the values of one ring travel together, where the deployment asks for it."""
    if program.deployment is None or not program.deployment.execution.fuses_broadcasts:
        return program
    ops = [
        replace(op, arguments={**op.arguments, "bucket": op.arguments["ring_id"]})
        if op.type == "c_broadcast"
        else op
        for op in program.main.ops
    ]
    return _with(program, ops)
