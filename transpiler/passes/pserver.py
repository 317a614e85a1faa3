"""The passes of a server's main program.  They read the plan alone, not a single-node program.

Block 0 defines what the server holds and receives, and listens.  Each block after it updates one
slice.  No two blocks share a variable that one of them writes, so a server may run them in any
order or at the same time.  A block's ops, by the mode of the slice's lane::

    sync                sum over trainers, scale, (clip or norm_scale), the optimizer op
    async, half_async   (dc_compensate), the optimizer op
    geo                 sum of the parameter and a delta
    diloco              sum over trainers, scale by -1/trainers, the outer optimizer op

[Note: backups]  ``dc_compensate`` compares a slice with the value of it that the gradient's trainer
last received.  There is one such backup for each trainer.  It begins as the slice's first value and
is renewed with every reply to that trainer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from transpiler.ir.graph import Argument, Block, Op, Ref, Role, Variable, freeze
from transpiler.ir.rules import state_of
from transpiler.passes.pserver_tables import (
    looks_up,
)
from transpiler.plan.lanes import applied, backup_names, delta_name
from transpiler.plan.placement import name_beside
from transpiler.plan.plan import Placement, Plan, Slice
from transpiler.program import Program


def server_of(program: Program) -> int:
    """The index of the server that the program is for.

    Raises:
        ValueError: it is for no server of the plan.
    """
    deployment = program.deployment
    if deployment is None or deployment.server_index is None:
        raise ValueError("expected a deployment with a server_index, got a trainer's or none")
    if (
        len(deployment.endpoints) != deployment.plan.servers
        or not 0 <= deployment.server_index < deployment.plan.servers
    ):
        raise ValueError(
            f"expected one of {deployment.plan.servers} servers, each with an endpoint; "
            f"got server_index {deployment.server_index} and endpoints "
            f"{', '.join(deployment.endpoints)}"
        )
    return deployment.server_index


def held(plan: Plan, server: int) -> Iterator[tuple[Placement, Slice]]:
    """The slices on a server, in the order of the plan."""
    for placement in plan.placements:
        for slice_ in placement.slices:
            if slice_.server == server:
                yield placement, slice_


def received(placement: Placement, slice_: Slice, plan: Plan) -> tuple[str, ...]:
    """The names of a slice's gradients or deltas as they arrive: one for each trainer where the
    server merges, otherwise one.
    """
    lane = plan.lane_of(placement)
    merged = (
        delta_name(slice_) if lane.kind.steps_on_trainer else name_beside(placement, slice_, "GRAD")
    )
    if not lane.kind.waits_for_all or plan.trainers == 1:
        return (merged,)
    return tuple(f"{merged}.trainer_{trainer}" for trainer in range(plan.trainers))


def value_variable(placement: Placement, slice_: Slice) -> Variable:
    """The variable of a slice's values: a PARAMETER, or a BUFFER if no rule updates it."""
    role = Role.BUFFER if placement.group is None else Role.PARAMETER
    return Variable(slice_.name, slice_.shape, placement.dtype, role, placement.name)


def _gradients(placement: Placement, slice_: Slice, plan: Plan) -> dict[str, Role]:
    """All gradients and deltas of a slice: as they arrive, merged, compensated, clipped."""
    lane = plan.lane_of(placement)
    found = dict.fromkeys(
        received(placement, slice_, plan),
        Role.DELTA if lane.kind.steps_on_trainer else Role.GRADIENT,
    )
    if lane.kind.steps_on_trainer:
        found[delta_name(slice_)] = Role.DELTA
    if not lane.kind.servers_add:
        found[name_beside(placement, slice_, "GRAD")] = Role.GRADIENT
    if lane.dc_asgd:
        found[name_beside(placement, slice_, "GRAD@DC")] = Role.GRADIENT
    if plan.clips_on_servers:
        found[name_beside(placement, slice_, "GRAD@CLIP")] = Role.GRADIENT
    return found


def _states(placement: Placement, slice_: Slice, plan: Plan) -> dict[str, bool]:
    """A slice's optimizer states and backups: True for one of its shape, False for a scalar."""
    found = applied(plan, placement)
    states = (
        {}
        if found is None
        else {
            name_beside(placement, slice_, key): shaped
            for key, shaped in state_of(found[1]).items()
        }
    )
    if plan.lane_of(placement).dc_asgd:
        states |= dict.fromkeys(backup_names(slice_, plan.trainers), True)
    return states


def define_slices(program: Program, plan: Plan) -> Program:
    """Block 0 defines every slice that the server holds, with its gradients and states."""
    variables: dict[str, Variable] = {}

    def define(variable: Variable) -> None:
        variables[variable.name] = variable

    for placement, slice_ in held(plan, server_of(program)):
        define(value_variable(placement, slice_))
        if placement.group is None:
            continue
        for name, role in _gradients(placement, slice_, plan).items():
            define(Variable(name, slice_.shape, placement.dtype, role, placement.name))
        for name, shaped in _states(placement, slice_, plan).items():
            shape, dtype = (slice_.shape, placement.dtype) if shaped else ((), "float32")
            define(Variable(name, shape, dtype, Role.STATE, placement.name))
    return program.with_blocks(Block(0, freeze(variables), ()))


def _clip_op(placement: Placement, slice_: Slice, plan: Plan) -> Op:
    assert plan.clip is not None
    x, clipped = (
        Ref(name_beside(placement, slice_, "GRAD")),
        name_beside(placement, slice_, "GRAD@CLIP"),
    )
    if plan.clip.kind == "value":
        return Op("clip", {"x": x, "min": plan.clip.low, "max": plan.clip.high}, (clipped,))
    # The norm spans servers: each replies with its part, and the trainers' commit carries the
    # coefficient.
    return Op(
        "norm_scale", {"x": x, "by": placement.name if plan.clip.kind == "norm" else ""}, (clipped,)
    )


def _optimizer_op(placement: Placement, slice_: Slice, plan: Plan, grad: str) -> Op:
    found = applied(plan, placement)
    assert found is not None, "a lane whose servers only add has no rule"
    group, rule = found
    arguments: dict[str, Argument] = {"param": Ref(slice_.name), "grad": Ref(grad)}
    arguments.update(
        {state: Ref(name_beside(placement, slice_, state)) for state in sorted(state_of(rule))}
    )
    arguments.update({"group": group, **rule.arguments})
    return Op(rule.type, arguments, (slice_.name,))


def _merge_ops(placement: Placement, slice_: Slice, plan: Plan, grad: str) -> list[Op]:
    """The mean, or sum, over trainers; of deltas its negative, because an outer optimizer descends
    along the gradient that it is given.
    """
    lane, several = plan.lane_of(placement), tuple(map(Ref, received(placement, slice_, plan)))
    merged, scale = (
        (delta_name(slice_), -1.0 / plan.trainers)
        if lane.kind.steps_on_trainer
        else (grad, 1.0 / plan.trainers)
    )
    ops = [
        Op("sum", {"x": several}, (merged,)),
        Op("scale", {"x": Ref(merged), "scale": scale}, (grad,)),
    ]
    return ops if lane.averages else ops[:1]


def _optimize_ops(placement: Placement, slice_: Slice, plan: Plan) -> list[Op]:
    """The ops of one slice's update.

    ``scale`` holds 1 / the configured trainers; a server divides by the number of trainers that
    committed the step.
    """
    lane, grad = plan.lane_of(placement), name_beside(placement, slice_, "GRAD")
    if lane.kind.servers_add:
        return [Op("sum", {"x": (Ref(slice_.name), Ref(delta_name(slice_)))}, (slice_.name,))]
    ops = _merge_ops(placement, slice_, plan, grad) if lane.kind.waits_for_all else []
    if lane.dc_asgd:
        backups = tuple(map(Ref, backup_names(slice_, plan.trainers)))
        arguments: dict[str, Argument] = {
            "grad": Ref(grad),
            "param": Ref(slice_.name),
            "backups": backups,
            "factor": lane.dc_asgd,
        }
        grad = name_beside(placement, slice_, "GRAD@DC")
        ops.append(Op("dc_compensate", arguments, (grad,)))
    if plan.clips_on_servers:
        ops.append(_clip_op(placement, slice_, plan))
        grad = name_beside(placement, slice_, "GRAD@CLIP")
    return [*ops, _optimizer_op(placement, slice_, plan, grad)]


def append_optimize_blocks(program: Program, plan: Plan) -> Program:
    """One block for each slice that the server updates, in the order of the plan; a single empty
    one if it updates nothing.
    """
    updates = [
        tuple(_optimize_ops(placement, slice_, plan))
        for placement, slice_ in held(plan, server_of(program))
        if placement.group is not None
    ] or ([] if plan.tables else [()])
    return program.with_blocks(
        program.main, *(Block(index, freeze({}), ops) for index, ops in enumerate(updates, start=1))
    )


def listen(program: Program, plan: Plan) -> Program:
    """Block 0 ends in the one ``listen_and_serv``, which runs the blocks after it."""
    server = server_of(program)
    assert program.deployment is not None
    arguments: dict[str, Argument] = {
        "endpoint": program.deployment.endpoints[server],
        "server_index": server,
        "trainers": plan.trainers,
        "mode": plan.mode,
        "optimize_blocks": tuple(
            block.index for block in program.blocks[1:] if not looks_up(block)
        ),
    }
    if plan.tables:
        arguments["prefetch_blocks"] = tuple(
            block.index for block in program.blocks[1:] if looks_up(block)
        )
    main = replace(program.main, ops=(*program.main.ops, Op("listen_and_serv", arguments)))
    return program.with_blocks(main, *program.blocks[1:])
