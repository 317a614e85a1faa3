"""A trainer's two programs: the single-node ones with communication in place of the updates.

Main program, in sync mode (async is the same without the two barriers)::

    forward and backward, and right after the last op that writes a gradient:  split (if its parameter is sliced), send
    send_barrier    every gradient of this step has left
    recv            one for each updated parameter
    fetch_barrier   everything has arrived
    concat          one for each sliced parameter

Every pass takes a program and returns another: none changes what it was given.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from transpiler.ops import is_optimizer
from transpiler.placement import name_beside
from transpiler.plan import Deployment, Placement, Plan
from transpiler.planning import gradient_of, optimizer_ops, parameter_of
from transpiler.program import Argument, Block, Op, Program, Ref, Role, Variable, freeze, refs
from transpiler.trainer_laws import (
    barriers_exactly_in_sync,
    concatenated_after_arrival,
    no_update_on_a_trainer,
    parameters_initialised,
    parameters_received_once,
    received_after_sending,
    sent_exactly_once,
    sent_when_final,
)
from transpiler.verify import Stage

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
    """Where the servers clip the merged gradients, a trainer's clip ops go and its optimizer ops read unclipped gradients."""
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


def _sending(placement: Placement, gradient: str, program: Program) -> tuple[list[Op], list[Variable]]:
    """The ops that send one gradient, and the slices that they define."""
    deployment = _deployment(program)
    whole = program.main.variables[gradient]
    endpoints = tuple(deployment.endpoints[piece.server] for piece in placement.slices)
    arguments: dict[str, Argument] = {"x": (Ref(gradient),), "endpoints": endpoints, "trainer_id": deployment.trainer_id}
    if not placement.split:
        return [Op("send", arguments)], []
    slices = [
        Variable(name_beside(placement, piece, "GRAD"), piece.shape, whole.dtype, Role.GRADIENT, placement.name)
        for piece in placement.slices
    ]
    names = tuple(variable.name for variable in slices)
    sections = tuple(piece.end - piece.begin for piece in placement.slices)
    split = Op("split", {"x": Ref(gradient), "sections": sections}, names)
    return [split, Op("send", {**arguments, "x": tuple(map(Ref, names))})], slices


def send_gradients(program: Program, plan: Plan) -> Program:
    """Right after the last op that writes a gradient, the gradient is split if its parameter is sliced, and sent."""
    placements = {placement.name: placement for placement in plan.placements}
    updated = {gradient_of(op): placements[parameter_of(op)] for op in optimizer_ops(program)}
    final = {name: index for index, op in enumerate(program.main.ops) for name in op.outputs if name in updated}
    ops: list[Op] = []
    variables: list[Variable] = []
    for index, op in enumerate(program.main.ops):
        ops.append(op)
        for gradient in dict.fromkeys(op.outputs):
            if final.get(gradient) == index:
                sending, slices = _sending(updated[gradient], gradient, program)
                ops += sending
                variables += slices
    return program.with_blocks(_with(program.main, ops, variables), *program.blocks[1:])


def drop_updates(program: Program, plan: Plan) -> Program:
    """The optimizer ops go, and the optimizer states with them: they live on the servers."""
    states = {variable.name for variable in program.main.variables_of(Role.STATE)}
    kept = [op for op in program.main.ops if not is_optimizer(op.type)]
    return program.with_blocks(_without(program.main, states, kept), *program.blocks[1:])


def _receiving(placements: Iterable[Placement], program: Program) -> tuple[list[Op], list[Op], list[Variable]]:
    """The ops that receive these variables, those that put slices together, and the slices."""
    deployment = _deployment(program)
    receives, concats, slices = [], [], []
    for placement in placements:
        endpoints = tuple(deployment.endpoints[piece.server] for piece in placement.slices)
        arguments: dict[str, Argument] = {"param": placement.name, "endpoints": endpoints, "trainer_id": deployment.trainer_id}
        names = tuple(piece.name for piece in placement.slices)
        receives.append(Op("recv", arguments, names))
        if placement.split:
            slices += [
                Variable(piece.name, piece.shape, placement.dtype, Role.TEMPORARY, placement.name) for piece in placement.slices
            ]
            concats.append(Op("concat", {"x": tuple(map(Ref, names)), "axis": 0}, (placement.name,)))
    return receives, concats, slices


def receive_parameters(program: Program, plan: Plan) -> Program:
    """At the end every updated parameter is received; in sync mode after a barrier of the sends, and before one of its own."""
    updated = [placement for placement in plan.placements if placement.group is not None]
    receives, concats, slices = _receiving(updated, program)
    if plan.mode == "sync":
        receives = [Op("send_barrier", _place(program)), *receives, Op("fetch_barrier", _place(program))]
    ops = [*program.main.ops, *receives, *concats]
    return program.with_blocks(_with(program.main, ops, slices), *program.blocks[1:])


def receive_everything(program: Program, plan: Plan) -> Program:
    """After its own initialisation a trainer receives every variable that servers hold: all trainers start from trainer 0's."""
    receives, concats, slices = _receiving(plan.placements, program)
    ops = [*program.main.ops, *receives, Op("fetch_barrier", _place(program)), *concats]
    return program.with_blocks(_with(program.main, ops, slices), *program.blocks[1:])


TRAINER_PASSES: tuple[Stage, ...] = (
    Stage(leave_clipping_to_servers),
    Stage(send_gradients, (sent_exactly_once, sent_when_final)),
    Stage(drop_updates, (no_update_on_a_trainer,)),
    Stage(
        receive_parameters,
        (parameters_received_once, received_after_sending, barriers_exactly_in_sync, concatenated_after_arrival),
    ),
)

STARTUP_PASSES: tuple[Stage, ...] = (
    Stage(
        receive_everything,
        (parameters_initialised, parameters_received_once, barriers_exactly_in_sync, concatenated_after_arrival),
    ),
)
