"""The passes of a trainer's programs: communication takes the place of the updates.

The main program in sync mode::

    forward, backward; right after the last op that writes a gradient:
        split       if its parameter is sliced
        send
    send_barrier    every gradient of this step is sent
    recv            one for each updated parameter
    fetch_barrier   every parameter has arrived
    concat          one for each sliced parameter

async mode has no barriers; half_async mode has a send_barrier that is local to the trainer.  In geo
and diloco mode the optimizer ops stay, followed by one send of the deltas, and there is no recv:
parameters arrive between steps.  In a job of several lanes each parameter is sent as its lane's
mode says, and there is every barrier that some lane needs.  With runtime_split_send_recv there is
no split and no concat: send and recv carry the sections.

Lookups of tables, and the gradients of their rows, are in trainer_tables.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from transpiler.ir.graph import Argument, Block, Op, Ref, Role, Variable, freeze, refs
from transpiler.ir.ops import is_optimizer
from transpiler.ir.scaling_ops import UPDATE
from transpiler.ir.updates import gradient_of, optimizer_ops, parameter_of
from transpiler.passes.trainer_tables import (
    declared_tables,
    table_changes,
)
from transpiler.plan.lanes import delta_name
from transpiler.plan.modes import Barrier
from transpiler.plan.placement import name_beside
from transpiler.plan.plan import Deployment, Placement, Plan
from transpiler.program import Program

# ---- trainer averaged ----
#
# The passes of gradients that trainers average among themselves, beside servers (mode
# "collective").
#
# Servers hold these parameters and never update them.  In the main program::
#
#   c_allreduce_avg       before the updates, and before any barrier: the means over the trainers
#   c_sync_comm_stream    waits until the means count
#   the optimizer ops     of these parameters stay
#
# All trainers average the same elements at once, however many gradients there are.  Where a lane is
# sync, the servers decide which trainers are in a step, and the means count only after that: the
# wait and the updates come after fetch_barrier then.  See [Note: a step of both] in
# trainer/gradients/averaging.py.


def average_gradients(program: Program, plan: Plan) -> Program:
    """Averages the gradients of mode collective over the trainers, and waits for the result."""
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
    return _with_ops(program, ops)


def update_when_decided(program: Program, plan: Plan) -> Program:
    """Moves the updates by averages to the end of the step, where servers decide a step."""
    if not plan.averages_follow_servers:
        return program
    last = [op for op in program.main.ops if _awaits(op, plan)]
    return _with_ops(program, [*(op for op in program.main.ops if not _awaits(op, plan)), *last])


def _awaits(op: Op, plan: Plan) -> bool:
    if op.type == "c_sync_comm_stream":
        return True
    return is_optimizer(op.type) and parameter_of(op) in plan.averaged


def _with_ops(program: Program, ops: list[Op]) -> Program:
    """The program with these ops in block 0."""
    block = replace(program.main, ops=tuple(ops), variables=freeze(program.main.variables))
    return program.with_blocks(block, *program.blocks[1:])


# ---- trainer ----


CLIP_OPS = frozenset({"clip", "clip_by_norm", "global_norm_scale", "scale_by"})


def _deployment(program: Program) -> Deployment:
    assert program.deployment is not None, "passes run on a program that knows its deployment"
    return program.deployment


def _place(program: Program) -> dict[str, Argument]:
    """The arguments of an op that addresses every server."""
    deployment = _deployment(program)
    return {"endpoints": deployment.endpoints, "trainer_id": deployment.trainer_id}


def _with(block: Block, ops: Iterable[Op], variables: Iterable[Variable] = ()) -> Block:
    """The block with these ops, and with these variables besides its own."""
    added = {variable.name: variable for variable in variables}
    return replace(block, ops=tuple(ops), variables=freeze({**block.variables, **added}))


def _without(block: Block, dropped: set[str], ops: Iterable[Op]) -> Block:
    """The block with these ops, and without the dropped variables."""
    kept = {name: variable for name, variable in block.variables.items() if name not in dropped}
    return replace(block, ops=tuple(ops), variables=freeze(kept))


def leave_clipping_to_servers(program: Program, plan: Plan) -> Program:
    """Drops the clip ops where the servers clip the merged gradients; optimizer ops then read
    unclipped gradients.
    """
    if not plan.clips_on_servers:
        return program
    raw: dict[str, str] = {}
    dropped: set[str] = set()
    ops = []
    for op in program.main.ops:
        if op.type in CLIP_OPS:
            dropped.update(op.outputs)
            raw.update(zip(op.outputs, refs(op.arguments["x"]), strict=False))
        elif is_optimizer(op.type) and gradient_of(op) in raw:
            ops.append(replace(op, arguments={**op.arguments, "grad": Ref(raw[gradient_of(op)])}))
        else:
            ops.append(op)
    return program.with_blocks(_without(program.main, dropped, ops), *program.blocks[1:])


def clip_shares(program: Program, plan: Plan) -> Program:
    """Lets each trainer clip its own share of the mean where gradients are compressed: see [Note:
    deep gradient compression] in transpiler/optim/dgc.py.
    """
    merged = all(lane.kind.merges_gradients for lane in plan.lanes)
    if not merged or not any(op.type == "dgc" for op in program.main.ops):
        return program
    ops: list[Op] = []
    for op in program.main.ops:
        bound = op.arguments.get("max_norm")
        if op.type in CLIP_OPS and isinstance(bound, int | float):
            local = float(bound) * math.sqrt(plan.trainers)
            op = replace(op, arguments={**op.arguments, "max_norm": local})
        ops.append(op)
    return program.with_blocks(_with(program.main, ops), *program.blocks[1:])


def _sections(placement: Placement) -> tuple[int, ...]:
    return tuple(slice_.end - slice_.begin for slice_ in placement.slices)


def _endpoints(placement: Placement, program: Program) -> tuple[str, ...]:
    deployment = _deployment(program)
    return tuple(deployment.endpoints[slice_.server] for slice_ in placement.slices)


def _sending(
    placement: Placement, gradient: str, program: Program, runtime_split_send_recv: bool
) -> tuple[list[Op], list[Variable]]:
    """The ops that send one gradient, and the slices that they define."""
    arguments: dict[str, Argument] = {
        "x": (Ref(gradient),),
        "endpoints": _endpoints(placement, program),
        "trainer_id": _deployment(program).trainer_id,
    }
    if not placement.split:
        return [Op("send", arguments)], []
    if runtime_split_send_recv:
        return [Op("send", {**arguments, "sections": _sections(placement)})], []
    dtype = program.main.variables[gradient].dtype
    slices = [
        Variable(
            name_beside(placement, slice_, "GRAD"),
            slice_.shape,
            dtype,
            Role.GRADIENT,
            placement.name,
        )
        for slice_ in placement.slices
    ]
    names = tuple(variable.name for variable in slices)
    split = Op("split", {"x": Ref(gradient), "sections": _sections(placement)}, names)
    return [split, Op("send", {**arguments, "x": tuple(map(Ref, names))})], slices


def send_gradients(program: Program, plan: Plan, runtime_split_send_recv: bool = False) -> Program:
    """Sends each gradient right after the last op that writes it, split if its parameter is
    sliced.
    """
    placements = {
        placement.name: placement
        for placement in plan.placements
        if placement.group is not None and not plan.lane_of(placement).kind.steps_on_trainer
    }
    updated = {
        gradient_of(op): parameter_of(op)
        for op in optimizer_ops(program.main)
        if parameter_of(op) in placements
    }
    final = {
        name: index
        for index, op in enumerate(program.main.ops)
        for name in op.outputs
        if name in updated
    }
    ops: list[Op] = []
    variables: list[Variable] = []
    for index, op in enumerate(program.main.ops):
        ops.append(op)
        for gradient in dict.fromkeys(op.outputs):
            if final.get(gradient) == index:
                sending, slices = _sending(
                    placements[updated[gradient]], gradient, program, runtime_split_send_recv
                )
                ops += sending
                variables += slices
    return program.with_blocks(_with(program.main, ops, variables), *program.blocks[1:])


def drop_updates(program: Program, plan: Plan) -> Program:
    """Drops the optimizer ops of the parameters that servers update, and their states, which live
    on the servers.
    """
    gone = {
        placement.name
        for placement in plan.placements
        if placement.group is not None and not plan.lane_of(placement).kind.steps_on_trainer
    }
    states = {
        variable.name for variable in program.main.variables_of(Role.STATE) if variable.of in gone
    }
    kept = [
        op for op in program.main.ops if not (is_optimizer(op.type) and parameter_of(op) in gone)
    ]
    return program.with_blocks(_without(program.main, states, kept), *program.blocks[1:])


def _sending_changes(lane: int, program: Program, plan: Plan) -> Op:
    """The send of one k-step lane's deltas."""
    placements = [
        placement
        for placement in plan.placements
        if placement.lane == lane and placement.group is not None
    ]
    tables = [table for table in plan.tables if table.lane == lane]
    rows = table_changes(tables, _deployment(program).endpoints)
    arguments: dict[str, Argument] = {
        "x": (*(Ref(placement.name) for placement in placements), *rows["x"]),
        "endpoints": (
            *(at for placement in placements for at in _endpoints(placement, program)),
            *rows["endpoints"],
        ),
        "trainer_id": _deployment(program).trainer_id,
        "sections": (
            *(size for placement in placements for size in _sections(placement)),
            *rows["sections"],
        ),
        "delta": (
            *(delta_name(slice_) for placement in placements for slice_ in placement.slices),
            *rows["delta"],
        ),
        "mode": plan.lanes[lane].mode,
        "k_steps": plan.lanes[lane].k_steps,
    }
    return Op("send", arguments)


def send_changes(program: Program, plan: Plan) -> Program:
    """Appends one send of deltas, due every ``k_steps`` steps, for each lane whose updates the
    trainer runs itself.
    """
    sends = [
        _sending_changes(index, program, plan)
        for index, lane in enumerate(plan.lanes)
        if lane.kind.steps_on_trainer
    ]
    return program.with_blocks(
        _with(program.main, [*program.main.ops, *sends]), *program.blocks[1:]
    )


def _receiving(
    placements: Iterable[Placement], program: Program, runtime_split_send_recv: bool
) -> tuple[list[Op], list[Op], list[Variable]]:
    """The recv ops of these variables, the concat ops of their slices, and the slices."""
    receives, concats, slices = [], [], []
    for placement in placements:
        arguments: dict[str, Argument] = {
            "param": placement.name,
            "endpoints": _endpoints(placement, program),
            "trainer_id": _deployment(program).trainer_id,
        }
        if runtime_split_send_recv and placement.split:
            receives.append(
                Op("recv", {**arguments, "sections": _sections(placement)}, (placement.name,))
            )
            continue
        names = tuple(slice_.name for slice_ in placement.slices)
        receives.append(Op("recv", arguments, names))
        if placement.split:
            slices += [
                Variable(slice_.name, slice_.shape, placement.dtype, Role.TEMPORARY, placement.name)
                for slice_ in placement.slices
            ]
            concats.append(
                Op("concat", {"x": tuple(map(Ref, names)), "axis": 0}, (placement.name,))
            )
    return receives, concats, slices


def receive_parameters(
    program: Program, plan: Plan, runtime_split_send_recv: bool = False
) -> Program:
    """Receives at the end every parameter that servers update, after and before the barriers that
    its lane needs.
    """
    updated = [
        p
        for p in plan.placements
        if p.group is not None and not plan.lane_of(p).kind.steps_on_trainer
    ]
    barriers = {lane.kind.send_barrier for lane in plan.lanes}
    receives, concats, slices = _receiving(updated, program, runtime_split_send_recv)
    if Barrier.LOCAL in barriers:
        receives = [Op("send_barrier", {**_place(program), "half_async": True}), *receives]
    if Barrier.ALL in barriers:
        receives = [Op("send_barrier", _place(program)), *receives]
    if any(lane.kind.fetch_barrier for lane in plan.lanes):
        receives = [*receives, Op("fetch_barrier", _place(program))]
    ops = [*program.main.ops, *receives, *concats]
    return program.with_blocks(_with(program.main, ops, slices), *program.blocks[1:])


def update_scale_last(program: Program, plan: Plan) -> Program:
    """Moves the update of the loss scale to the end of the step, when it is known whether another
    trainer's gradients have overflowed.
    """
    last = [op for op in program.main.ops if op.type == UPDATE]
    ops = [op for op in program.main.ops if op.type != UPDATE]
    return program.with_blocks(_with(program.main, [*ops, *last]), *program.blocks[1:])


def receive_first(program: Program, plan: Plan, runtime_split_send_recv: bool = False) -> Program:
    """Receives every parameter that servers update before an evaluating program computes, also
    those that it does not read: they arrive together.
    """
    updated = [
        p
        for p in plan.placements
        if p.group is not None and not plan.lane_of(p).kind.steps_on_trainer
    ]
    receives, concats, slices = _receiving(updated, program, runtime_split_send_recv)
    barrier = [Op("fetch_barrier", _place(program))] if receives else []
    held = [Variable(p.name, p.shape, p.dtype, Role.PARAMETER) for p in updated]
    ops = [*receives, *barrier, *concats, *program.main.ops]
    return program.with_blocks(_with(program.main, ops, [*held, *slices]))


def receive_everything(
    program: Program, plan: Plan, runtime_split_send_recv: bool = False
) -> Program:
    """Replaces the init ops: a trainer receives every variable that servers hold, so that all
    trainers start from trainer 0's values.

    Tables, which a trainer never holds, are declared.
    """
    receives, concats, slices = _receiving(plan.placements, program, runtime_split_send_recv)
    kept = [op for op in program.main.ops if op.type != "init"]
    ops = [
        *receives,
        Op("fetch_barrier", _place(program)),
        *concats,
        *declared_tables(program),
        *kept,
    ]
    return program.with_blocks(_with(program.main, ops, slices), *program.blocks[1:])
