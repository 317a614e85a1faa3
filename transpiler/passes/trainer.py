"""A trainer's two programs: the single-node ones with communication in place of the updates.

Main program, in sync mode::

    forward and backward, and right after the last op that writes a gradient:  split (if its parameter is sliced), send
    send_barrier    every gradient of this step has left
    recv            one for each updated parameter
    fetch_barrier   everything has arrived
    concat          one for each sliced parameter

Lookups of tables, and the gradients of their rows, are in trainer_tables.py.

In async mode it is the same without the two barriers; in half_async mode with a send_barrier that
is this trainer's own.  In geo and diloco mode the optimizer ops stay, and after them there is one
send of what changes, and nothing else: parameters arrive between steps.  In a job of several lanes
each parameter is sent in the form of its lane, and there is each barrier that a lane asks for.
With ``runtime_split_send_recv`` there is no split and no concat: send and recv carry the
sections.

Every pass takes a program and returns another: none changes what it was given.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from transpiler.ir.graph import Argument, Block, Op, Ref, Role, Variable, freeze, refs
from transpiler.ir.ops import is_optimizer
from transpiler.ir.updates import gradient_of, optimizer_ops, parameter_of
from transpiler.passes.trainer_tables import (
    declared_tables,
    pull_rows,
    send_row_gradients,
    table_changes,
)
from transpiler.plan.lanes import delta_name
from transpiler.plan.modes import Barrier
from transpiler.plan.placement import name_beside
from transpiler.plan.plan import Deployment, Placement, Plan
from transpiler.program import Program
from transpiler.verify.tables import (
    row_gradients_sent_once,
    rows_pulled_once,
    rows_updated_in_one_place,
    tables_declared,
)
from transpiler.verify.trainer import (
    barriers_exactly_where_due,
    changes_sent_once,
    concatenated_after_arrival,
    parameters_received_once,
    received_after_sending,
    sent_exactly_once,
    sent_when_final,
    updated_in_one_place,
)
from transpiler.verify.verify import Stage

CLIP_OPS = frozenset({"clip", "clip_by_norm", "global_norm_scale", "scale_by"})


def _deployment(program: Program) -> Deployment:
    assert program.deployment is not None, "passes run on a program that knows its deployment"
    return program.deployment


def _place(program: Program) -> dict[str, Argument]:
    """The arguments of an op that concerns every server."""
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
    """Where the servers clip the merged gradients, a trainer's clip ops go and its optimizer ops
    read unclipped gradients.
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


def _sections(placement: Placement) -> tuple[int, ...]:
    return tuple(piece.end - piece.begin for piece in placement.slices)


def _endpoints(placement: Placement, program: Program) -> tuple[str, ...]:
    deployment = _deployment(program)
    return tuple(deployment.endpoints[piece.server] for piece in placement.slices)


def _sending(
    placement: Placement, gradient: str, program: Program, runtime_split_send_recv: bool
) -> tuple[list[Op], list[Variable]]:
    """The ops that send one gradient, and the slices that they define; with
    ``runtime_split_send_recv`` the send cuts it.
    """
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
            name_beside(placement, piece, "GRAD"), piece.shape, dtype, Role.GRADIENT, placement.name
        )
        for piece in placement.slices
    ]
    names = tuple(variable.name for variable in slices)
    split = Op("split", {"x": Ref(gradient), "sections": _sections(placement)}, names)
    return [split, Op("send", {**arguments, "x": tuple(map(Ref, names))})], slices


def send_gradients(program: Program, plan: Plan, runtime_split_send_recv: bool = False) -> Program:
    """Right after the last op that writes a gradient, the gradient is split if its parameter is
    sliced, and sent.
    """
    placements = {
        placement.name: placement
        for placement in plan.placements
        if not plan.lane_of(placement).kind.steps_on_trainer
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
    """The optimizer ops of what servers update go, and their states with them: they live on the
    servers.
    """
    gone = {
        placement.name
        for placement in plan.placements
        if not plan.lane_of(placement).kind.steps_on_trainer
    }
    states = {
        variable.name for variable in program.main.variables_of(Role.STATE) if variable.of in gone
    }
    kept = [
        op for op in program.main.ops if not (is_optimizer(op.type) and parameter_of(op) in gone)
    ]
    return program.with_blocks(_without(program.main, states, kept), *program.blocks[1:])


def _sending_changes(lane: int, program: Program, plan: Plan) -> Op:
    """The send of what changes in one lane."""
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
            *(delta_name(piece) for placement in placements for piece in placement.slices),
            *rows["delta"],
        ),
        "mode": plan.lanes[lane].mode,
        "k_steps": plan.lanes[lane].k_steps,
    }
    return Op("send", arguments)


def send_changes(program: Program, plan: Plan) -> Program:
    """After the updates that a trainer runs itself there is one send for each such lane, for every
    ``k_steps`` steps.
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
    """The ops that receive these variables, those that put slices together, and the slices."""
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
        names = tuple(piece.name for piece in placement.slices)
        receives.append(Op("recv", arguments, names))
        if placement.split:
            slices += [
                Variable(piece.name, piece.shape, placement.dtype, Role.TEMPORARY, placement.name)
                for piece in placement.slices
            ]
            concats.append(
                Op("concat", {"x": tuple(map(Ref, names)), "axis": 0}, (placement.name,))
            )
    return receives, concats, slices


def receive_parameters(
    program: Program, plan: Plan, runtime_split_send_recv: bool = False
) -> Program:
    """At the end every parameter that servers update is received, after and before the barriers
    that its lane asks for.
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


def receive_everything(
    program: Program, plan: Plan, runtime_split_send_recv: bool = False
) -> Program:
    """A trainer initialises nothing: it receives every variable that servers hold, so that all
    start from trainer 0's values.

    Tables, which it never holds, are declared.
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


def trainer_passes(runtime_split_send_recv: bool = False) -> tuple[Stage, ...]:
    """The passes that make a trainer's main program."""
    return (
        Stage(leave_clipping_to_servers),
        Stage(
            partial(pull_rows, runtime_split_send_recv=runtime_split_send_recv), (rows_pulled_once,)
        ),
        Stage(
            partial(send_gradients, runtime_split_send_recv=runtime_split_send_recv),
            (sent_exactly_once, sent_when_final),
        ),
        Stage(
            partial(send_row_gradients, runtime_split_send_recv=runtime_split_send_recv),
            (row_gradients_sent_once, rows_updated_in_one_place),
        ),
        Stage(drop_updates, (updated_in_one_place,)),
        Stage(send_changes, (changes_sent_once,)),
        Stage(
            partial(receive_parameters, runtime_split_send_recv=runtime_split_send_recv),
            (
                parameters_received_once,
                received_after_sending,
                barriers_exactly_where_due,
                concatenated_after_arrival,
            ),
        ),
    )


def startup_passes(runtime_split_send_recv: bool = False) -> tuple[Stage, ...]:
    """The passes that make a trainer's startup program."""
    return (
        Stage(
            partial(receive_everything, runtime_split_send_recv=runtime_split_send_recv),
            (
                parameters_received_once,
                barriers_exactly_where_due,
                concatenated_after_arrival,
                tables_declared,
            ),
        ),
    )


TRAINER_PASSES, STARTUP_PASSES = trainer_passes(), startup_passes()
