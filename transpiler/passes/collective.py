"""The passes of a trainer's programs without servers: gradients or parameters are all-reduced.

With ``grad_allreduce`` the main program is::

    forward; the loss's gradient, times 1 / trainers; backward, and in it
    c_allreduce_sum       where a gradient is final: it joins its bucket, and a full bucket starts
    c_sync_comm_stream    before the first use of a sum, by a clip or optimizer op; or, where the
                          plan waits at once, right after its bucket
    clipping, updates     as on a single node, of the mean gradients

Where gradients travel as float16, a cast stands before each sum, and one back after its wait.

With ``local_sgd`` it is the single-node program, then the same sums for the parameters, and for
each a ``scale`` by 1 / trainers; with ``k_steps`` these act in every k-th run, with ``begin_step``
in every run up to that one, too.  An ``c_adapt_k_steps`` at the end lets k follow the loss.  With
``nccl2`` it is the single-node program, unchanged; ``ParallelExecutor`` runs the passes of
``grad_allreduce`` on it.

The startup program binds the process's own values and generates the rings' ids; except with
``nccl2`` it then broadcasts trainer 0's values.

Scaling the loss's gradient rather than the sums lets everything in backward (a hook, a custom
function) see the values that it would see on a single node with all trainers' samples.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from transpiler.ir.graph import Argument, Block, Op, Ref, Role, Symbol, Variable, freeze, refs
from transpiler.ir.ops import is_optimizer
from transpiler.ir.scaling_ops import CHECK, unscaled_from
from transpiler.ir.updates import gradient_of, optimizer_ops, parameter_of
from transpiler.plan.placement import owners, tensor_bytes
from transpiler.plan.plan import Collective, Plan, all_ids, ids_of
from transpiler.program import Program

# ---- collective ----


CLIPS = frozenset({"clip", "clip_by_norm", "global_norm_scale", "scale_by"})
_AFTER_SUMS = CLIPS | {CHECK}  # and the optimizer ops

WIDE = ("float32", "float64")  # dtypes of gradients that may travel as float16


def _with(program: Program, ops: Iterable[Op], *added: Variable) -> Program:
    """The program with these ops in block 0, and with these variables besides its own."""
    variables = freeze(
        {**program.main.variables, **{variable.name: variable for variable in added}}
    )
    return program.with_blocks(
        replace(program.main, ops=tuple(ops), variables=variables), *program.blocks[1:]
    )


def leave_unchanged(program: Program, plan: Plan) -> Program:
    """Changes nothing: with ``nccl2`` the trainer's program is the single-node one."""
    return program


# ---- averaging gradients ----


def raw_gradients(program: Program) -> dict[str, str]:
    """The gradient of each parameter as backward computes it, unclipped and with the loss scale in
    it, by parameter, in the order of the optimizer ops.
    """
    raw = {
        op.outputs[0]: next(refs(op.arguments["x"]))
        for op in program.main.ops
        if op.type in CLIPS - {"global_norm_scale"}
    }
    scaled = {
        name: other
        for op in program.main.ops
        if op.type == CHECK
        for name, other in unscaled_from(op).items()
    }
    unclipped = {
        parameter_of(op): raw.get(gradient_of(op), gradient_of(op))
        for op in optimizer_ops(program.main)
    }
    return {parameter: scaled.get(name, name) for parameter, name in unclipped.items()}


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
    """Scales the loss's gradient by 1 / trainers, so that sums over trainers are means; with
    another ``gradient_scale`` it stays, and they are sums.
    """
    if plan.collective is not None and plan.collective.gradient_scale != "avg":
        return program
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
        if op.type not in _AFTER_SUMS and not is_optimizer(op.type)
        for name in op.inputs
    } & summed
    local = {name: f"{name}@LOCAL" for name in shared}
    ops: list[Op] = []
    for op in program.main.ops:
        if op.type in _AFTER_SUMS or is_optimizer(op.type):
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
    summed = raw_gradients(program).values()
    return _with(program, following(program, summed, lambda name, count: _sum(name, name, count)))


def following(program: Program, names: Collection[str], made: Callable[[str, int], Op]) -> list[Op]:
    """The ops of the main program, with an added one right after the last write of each variable.

    Args:
        names: of the variables.
        made: makes the op for a variable; its second argument is the number of those before it.
    """
    final = {
        name: index
        for index, op in enumerate(program.main.ops)
        for name in op.outputs
        if name in names
    }
    ops: list[Op] = []
    count = 0
    for index, op in enumerate(program.main.ops):
        ops.append(op)
        for name in dict.fromkeys(op.outputs):
            if final.get(name) == index:
                ops.append(made(name, count))
                count += 1
    return ops


def _sum(name: str, result: str, bucket: int) -> Op:
    return Op("c_allreduce_sum", {"x": Ref(name), "ring_id": 0, "bucket": bucket}, (result,))


# ---- averaging parameters ----


def average_parameters(program: Program, plan: Plan) -> Program:
    """Replaces every updated parameter, after the updates, by its mean over all trainers: in every
    run, or in those that the plan's rule gives.

    Raises:
        ValueError: the rule follows the loss, and the program computes none.
    """
    assert plan.collective is not None, "passes of a job without servers"
    seldom = seldom_of(plan.collective)
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
    if plan.collective.adaptive:
        if "loss" not in program.main.variables:
            raise ValueError(
                "strategy.adaptive_localsgd: expected a program with a variable 'loss', got none"
            )
        first = plan.collective.steps
        ops.append(Op("c_adapt_k_steps", {"x": Ref("loss"), "ring_id": 0, "k_steps": first}))
    return _with(program, [*program.main.ops, *ops], *sums)


def seldom_of(collective: Collective) -> dict[str, Argument]:
    """The arguments of ops that act in some runs only; none where they act in every one."""
    if collective.steps == 1 and not collective.adaptive:
        return {}
    begin: dict[str, Argument] = {"begin_step": collective.begin} if collective.begin else {}
    return {"k_steps": collective.steps, **begin}


# ---- buckets and waiting ----


def fuse_by_size(program: Program, plan: Plan) -> Program:
    """Lets sums that follow one another share a bucket while their bytes and their number fit and
    their dtypes are equal; buckets take the rings in turn.
    """
    assert plan.collective is not None, "passes of a job without servers"
    variables = program.main.variables
    sums = [op for op in program.main.ops if op.type == "c_allreduce_sum"]
    numbers = iter(_buckets([variables[op.outputs[0]] for op in sums], plan.collective))
    ops: list[Op] = []
    for op in program.main.ops:
        if op.type == "c_allreduce_sum":
            bucket = next(numbers)
            ring = bucket % plan.collective.rings
            op = replace(op, arguments={**op.arguments, "ring_id": ring, "bucket": bucket})
        ops.append(op)
    return _with(program, ops)


def _buckets(tensors: Sequence[Variable], collective: Collective) -> list[int]:
    """The number of each tensor's bucket; the last one is filled first, from its end."""
    most = collective.most or len(tensors)
    last = len(tensors)  # the first tensor of the last bucket, where that has a bound of its own
    room = collective.last_bytes
    while collective.last_bytes and last and len(tensors) - last < most:
        tensor = tensors[last - 1]
        size = tensor_bytes(tensor.shape, tensor.dtype)
        if last < len(tensors) and (size > room or tensor.dtype != tensors[last].dtype):
            break
        room -= size
        last -= 1
    found: list[int] = []
    bucket, filled, count = -1, 0, 0
    for number, tensor in enumerate(tensors):
        size = tensor_bytes(tensor.shape, tensor.dtype)
        full = filled + size > collective.bucket_bytes or count == most or number == last
        if number == 0 or (full and number <= last) or tensor.dtype != tensors[number - 1].dtype:
            bucket, filled, count = bucket + 1, 0, 0
        filled, count = filled + size, count + 1
        found.append(bucket)
    return found


def sum_as_float16(program: Program, plan: Plan) -> Program:
    """Lets gradients of more than 16 bits travel as float16: a cast before each sum, and one back
    before the first op that checks, clips or updates.

    They are divided by the number of trainers already, so that sums do not overflow.
    """
    assert plan.collective is not None, "passes of a job without servers"
    if not plan.collective.dtype:
        return program
    block = program.main
    wide = [
        block.variables[op.outputs[0]]
        for op in block.ops
        if op.type == "c_allreduce_sum" and block.variables[op.outputs[0]].dtype in WIDE
    ]
    common: dict[str, Any] = {"dtype": plan.collective.dtype, "of": "", "role": Role.TEMPORARY}
    halves = {v.name: replace(v, name=f"{v.name}@FP16", **common) for v in wide}
    back = [_cast(halves[v.name].name, v.name, v.dtype) for v in wide]
    ops: list[Op] = []
    for op in block.ops:
        if back and (op.type in _AFTER_SUMS or is_optimizer(op.type)):
            ops, back = [*ops, *back], []
        name = op.outputs[0] if op.type == "c_allreduce_sum" else ""
        if name in halves:
            half = halves[name].name
            ops.append(_cast(name, half, plan.collective.dtype))
            op = replace(op, arguments={**op.arguments, "x": Ref(half)}, outputs=(half,))
        ops.append(op)
    return _with(program, ops, *halves.values())


def _cast(name: str, result: str, dtype: str) -> Op:
    return Op("aten._to_copy", {"self": Ref(name), "dtype": Symbol("dtype", dtype)}, (result,))


def wait_before_use(program: Program, plan: Plan) -> Program:
    """Waits for each result in flight right before its first use; where the deployment's execution
    is ordered, right after its bucket has begun.

    There is one wait for each ring; all optimizer ops share one, because they run as one.  Where
    the plan waits at once, there is one right after each bucket of sums.
    """
    if program.deployment is not None and program.deployment.execution.ordered:
        return _waiting_at_once(program)
    block = program.main
    updates = next(
        (index for index, op in enumerate(block.ops) if is_optimizer(op.type)), len(block.ops)
    )
    full = _last_of_buckets(block) if plan.collective and plan.collective.waits else set()
    rings: dict[str, int] = {}
    due: dict[int, dict[int, list[str]]] = {}  # op number -> ring -> variables to wait for
    for index, op in enumerate(block.ops):
        for name in [name for name in dict.fromkeys(op.inputs) if name in rings]:
            due.setdefault(updates if is_optimizer(op.type) else index, {}).setdefault(
                rings.pop(name), []
            ).append(name)
        if op.type in ("c_allreduce_sum", "c_reduce_sum", "c_broadcast"):
            rings[op.outputs[0]] = int(str(op.arguments["ring_id"]))
        if index in full:
            due.setdefault(index + 1, {})[rings[op.outputs[0]]] = list(rings)
            rings.clear()
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


def _last_of_buckets(block: Block) -> set[int]:
    """The numbers of the ops with which a bucket of sums leaves."""
    last = {
        op.arguments["bucket"]: index
        for index, op in enumerate(block.ops)
        if op.type == "c_allreduce_sum"
    }
    return set(last.values())


def _waiting_at_once(program: Program) -> Program:
    begun: dict[Argument, list[tuple[int, Op]]] = {}  # the ops of each message, with their places
    for place, op in enumerate(program.main.ops):
        if op.type in ("c_allreduce_sum", "c_reduce_sum", "c_broadcast"):
            begun.setdefault(op.arguments.get("bucket", op.outputs[0]), []).append((place, op))
    waits: dict[int, Op] = {}
    for message in begun.values():
        names = tuple(op.outputs[0] for _, op in message)
        place, last = message[-1]
        given = {"x": tuple(map(Ref, names)), "ring_id": last.arguments["ring_id"]}
        waits[place] = Op("c_sync_comm_stream", given, names)
    ops: list[Op] = []
    for place, op in enumerate(program.main.ops):
        ops += [op, waits[place]] if place in waits else [op]
    return _with(program, ops)


# ---- collective sharded ----
#
# The passes of a trainer's main program whose updates are sharded over the trainers.
#
# Each trained parameter has an owner among the trainers (transpiler/plan/placement.py).  It alone
# keeps the optimizer's state of the parameter::
#
#   forward; the loss's gradient, times 1 / trainers; backward, and in it
#   c_reduce_sum          where a gradient is final: its owner gets the sum, the mean of gradients
#   clipping, updates     of this trainer's parameters only
#   c_broadcast           of every parameter, from its owner
#
# (Rajbhandari et al.: ZeRO, memory optimizations toward training trillion parameter models, 2020;
# its stage 1.)


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

    return _with_used(program, following(program, roots, reduced))


def update_on_owners(program: Program, plan: Plan) -> Program:
    """Drops the ops that clip and update other trainers' parameters; then the owner of every
    parameter broadcasts it.
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
    return _with_used(program, [*kept, *sends])


def _with_used(program: Program, ops: list[Op]) -> Program:
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


# ---- collective startup ----
#
# The passes of a trainer's startup program without servers: rings, and trainer 0's values.


ID_BYTES = 16


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
