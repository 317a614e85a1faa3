"""The passes of a trainer's programs without servers: gradients or parameters are all-reduced.

With ``grad_allreduce`` the main program is::

    forward; the loss's gradient, times 1 / trainers; backward, and in it
    c_allreduce_sum       where a gradient is final: it joins its bucket, and a full bucket starts
    c_sync_comm_stream    before the first use of a sum, by a clip or optimizer op
    clipping, updates     as on a single node, of the mean gradients

With ``local_sgd`` it is the single-node program, then the same sums for the parameters, and for
each a ``scale`` by 1 / trainers; with ``k_steps`` these act in every k-th run.  With ``nccl2`` it
is the single-node program, unchanged; ``ParallelExecutor`` runs the passes of ``grad_allreduce`` on
it.

The startup program binds the process's own values and generates the rings' ids; except with
``nccl2`` it then broadcasts trainer 0's values.

Scaling the loss's gradient rather than the sums lets everything in backward (a hook, a custom
function) see the values that it would see on a single node with all trainers' samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod

from transpiler.ir.graph import Argument, Block, Op, Ref, Role, Variable, freeze, refs
from transpiler.ir.ops import is_optimizer
from transpiler.ir.updates import gradient_of, optimizer_ops, parameter_of
from transpiler.plan.comm_rings import all_ids, ids_of
from transpiler.plan.placement import element_bytes
from transpiler.plan.plan import Plan
from transpiler.program import Program

CLIPS = frozenset({"clip", "clip_by_norm", "global_norm_scale", "scale_by"})
ID_BYTES = 16


def _with(program: Program, ops: Iterable[Op], *added: Variable) -> Program:
    """The program with these ops in block 0, and with these variables besides its own."""
    variables = freeze(
        {**program.main.variables, **{variable.name: variable for variable in added}}
    )
    return program.with_blocks(
        replace(program.main, ops=tuple(ops), variables=variables), *program.blocks[1:]
    )


def leave_unchanged(program: Program, plan: Plan) -> Program:
    """The program as it is: with ``nccl2`` the trainer's program is the single-node one."""
    return program


# ---- averaging gradients ----


def raw_gradients(program: Program) -> dict[str, str]:
    """The unclipped gradient of each parameter, by parameter, in the order of the optimizer ops."""
    raw = {
        op.outputs[0]: next(refs(op.arguments["x"]))
        for op in program.main.ops
        if op.type in CLIPS - {"global_norm_scale"}
    }
    return {
        parameter_of(op): raw.get(gradient_of(op), gradient_of(op))
        for op in optimizer_ops(program.main)
    }


def loss_gradient(block: Block) -> int:
    """The number of the op with which backward begins: ones in the shape of the loss.

    Raises:
        ValueError: there is no such op.
    """
    seeds = [
        number
        for number, op in enumerate(block.ops)
        if op.type == "aten.ones_like" and op.arguments.get("self") == Ref("loss")
    ]
    if not seeds:
        raise ValueError(
            "transpile: expected a program whose backward begins with aten.ones_like(loss), got "
            "one without"
        )
    return seeds[-1]


def scale_loss_gradient(program: Program, plan: Plan) -> Program:
    """Scales the loss's gradient by 1 / trainers, so that sums over trainers are means."""
    seed = loss_gradient(program.main)
    ops = list(program.main.ops)
    name = ops[seed].outputs[0]
    ops.insert(seed + 1, Op("scale", {"x": Ref(name), "scale": 1.0 / plan.trainers}, (name,)))
    return _with(program, ops)


def separate_gradients(program: Program, plan: Plan) -> Program:
    """Gives a gradient that backward computes with a second variable for that purpose.

    The all-reduce sums in place, so no op of backward may read the variable that is summed.
    """
    summed = set(raw_gradients(program).values())
    shared = {
        name
        for op in program.main.ops
        if op.type not in CLIPS and not is_optimizer(op.type)
        for name in op.inputs
    } & summed
    local = {name: f"{name}@LOCAL" for name in shared}
    ops: list[Op] = []
    for op in program.main.ops:
        if op.type in CLIPS or is_optimizer(op.type):
            ops.append(op)
            continue
        arguments = {key: _renamed(value, local) for key, value in op.arguments.items()}
        ops.append(
            replace(
                op, arguments=arguments, outputs=tuple(local.get(name, name) for name in op.outputs)
            )
        )
        ops += [
            Op("assign", {"x": Ref(local[name])}, (name,)) for name in op.outputs if name in shared
        ]
    added = [
        replace(program.main.variables[name], name=local[name], role=Role.TEMPORARY, of="")
        for name in sorted(shared)
    ]
    return _with(program, ops, *added)


def _renamed(argument: Argument, names: Mapping[str, str]) -> Argument:
    if isinstance(argument, Ref):
        return Ref(names.get(argument.name, argument.name))
    return (
        tuple(_renamed(item, names) for item in argument)
        if isinstance(argument, tuple)
        else argument
    )


def sum_gradients(program: Program, plan: Plan) -> Program:
    """Sums each gradient over all trainers right after the last op that writes it, in a bucket of
    its own.
    """
    summed = set(raw_gradients(program).values())
    final = {
        name: index
        for index, op in enumerate(program.main.ops)
        for name in op.outputs
        if name in summed
    }
    ops: list[Op] = []
    count = 0
    for index, op in enumerate(program.main.ops):
        ops.append(op)
        for name in dict.fromkeys(op.outputs):
            if final.get(name) == index:
                ops.append(_sum(name, name, count))
                count += 1
    return _with(program, ops)


def _sum(name: str, result: str, bucket: int) -> Op:
    return Op("c_allreduce_sum", {"x": Ref(name), "ring_id": 0, "bucket": bucket}, (result,))


# ---- averaging parameters ----


def average_parameters(program: Program, plan: Plan) -> Program:
    """Replaces every updated parameter, after the updates, by its mean over all trainers: in every
    run, or in every k-th.
    """
    assert plan.collective is not None, "passes of a job without servers"
    seldom: dict[str, Argument] = (
        {"k_steps": plan.collective.steps} if plan.collective.steps > 1 else {}
    )
    names = [placement.name for placement in plan.placements if placement.group is not None]
    sums = [
        replace(program.main.variables[name], name=f"{name}@SUM", role=Role.TEMPORARY, of=name)
        for name in names
    ]
    pairs = list(zip(names, sums, strict=True))
    sums_of = [_sum(name, total.name, bucket) for bucket, (name, total) in enumerate(pairs)]
    ops = [replace(op, arguments={**op.arguments, **seldom}) for op in sums_of]
    ops += [
        Op("scale", {"x": Ref(total.name), "scale": 1.0 / plan.trainers, **seldom}, (name,))
        for name, total in pairs
    ]
    return _with(program, [*program.main.ops, *ops], *sums)


# ---- buckets and waiting ----


def fuse_by_size(program: Program, plan: Plan) -> Program:
    """Lets sums that follow one another share a bucket while their bytes fit and their dtypes are
    equal; buckets take the rings in turn.
    """
    assert plan.collective is not None, "passes of a job without servers"
    bucket, filled, dtype = -1, 0, ""
    ops: list[Op] = []
    for op in program.main.ops:
        if op.type == "c_allreduce_sum":
            variable = program.main.variables[op.outputs[0]]
            size = prod(
                extent for extent in variable.shape if isinstance(extent, int)
            ) * element_bytes(variable.dtype)
            if (
                bucket < 0
                or variable.dtype != dtype
                or filled + size > plan.collective.bucket_bytes
            ):
                bucket, filled, dtype = bucket + 1, 0, variable.dtype
            filled += size
            ring = bucket % plan.collective.rings
            op = replace(op, arguments={**op.arguments, "ring_id": ring, "bucket": bucket})
        ops.append(op)
    return _with(program, ops)


def wait_before_use(program: Program, plan: Plan) -> Program:
    """Waits for each result in flight right before its first use.

    There is one wait for each ring; all optimizer ops share one, because they run as one.
    """
    block = program.main
    updates = next(
        (index for index, op in enumerate(block.ops) if is_optimizer(op.type)), len(block.ops)
    )
    rings: dict[str, int] = {}
    due: dict[int, dict[int, list[str]]] = {}  # op number -> ring -> variables to wait for
    for index, op in enumerate(block.ops):
        for name in [name for name in dict.fromkeys(op.inputs) if name in rings]:
            due.setdefault(updates if is_optimizer(op.type) else index, {}).setdefault(
                rings.pop(name), []
            ).append(name)
        if op.type in ("c_allreduce_sum", "c_broadcast"):
            rings[op.outputs[0]] = int(str(op.arguments["ring_id"]))
    for name, ring in rings.items():
        due.setdefault(len(block.ops), {}).setdefault(ring, []).append(name)
    ops: list[Op] = []
    for index in range(len(block.ops) + 1):
        for ring, names in sorted(due.get(index, {}).items()):
            ops.append(
                Op(
                    "c_sync_comm_stream",
                    {"x": tuple(map(Ref, names)), "ring_id": ring},
                    tuple(names),
                )
            )
        ops += block.ops[index : index + 1]
    return _with(program, ops)


# ---- startup ----


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
