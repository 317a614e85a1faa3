"""A server's two programs, from the plan alone: an eager script, which has no graph, gets the same
ones.

Block 0 defines what the server holds and receives, and listens.  Each block after it updates one
slice; they share no variable that any of them writes, so a server may run them in any order or
together.  By the mode of the slice's lane::

    sync                sum over trainers, scale, (clip or norm_scale), the optimizer op
    async, half_async   (dc_compensate), the optimizer op
    geo                 sum of the parameter and a delta
    diloco              sum over trainers, scale by -1/trainers, the outer optimizer op

[Note: backups]  ``dc_compensate`` compares a slice with what the gradient's trainer last received
of it: one backup for each trainer, which begins as the slice's first value and is renewed with
every answer to that trainer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from transpiler.ir.graph import Argument, Block, Op, Ref, Role, Storage, Variable, freeze
from transpiler.ir.rules import state_of
from transpiler.ir.table_ops import table_variable
from transpiler.passes.pserver_tables import (
    append_table_blocks,
    define_tables,
    looks_up,
    rows_at_start,
)
from transpiler.plan.lanes import applied, backup_names, delta_name
from transpiler.plan.placement import name_beside
from transpiler.plan.plan import Deployment, Placement, Plan, Slice
from transpiler.program import Program
from transpiler.verify.pserver import (
    listens_once,
    only_server_ops,
    optimize_blocks_complete,
    slices_held,
)
from transpiler.verify.tables import table_blocks_complete, tables_held
from transpiler.verify.verify import Stage, run, verify


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
        for piece in placement.slices:
            if piece.server == server:
                yield placement, piece


def received(placement: Placement, piece: Slice, plan: Plan) -> tuple[str, ...]:
    """The names under which a slice's gradients or deltas arrive: one for each trainer where a
    server merges, otherwise one.
    """
    lane = plan.lane_of(placement)
    merged = (
        delta_name(piece) if lane.kind.steps_on_trainer else name_beside(placement, piece, "GRAD")
    )
    if not lane.kind.waits_for_all or plan.trainers == 1:
        return (merged,)
    return tuple(f"{merged}.trainer_{trainer}" for trainer in range(plan.trainers))


def _variable(placement: Placement, piece: Slice) -> Variable:
    role = Role.BUFFER if placement.group is None else Role.PARAMETER
    return Variable(piece.name, piece.shape, placement.dtype, role, placement.name)


def _gradients(placement: Placement, piece: Slice, plan: Plan) -> dict[str, Role]:
    """All gradients and deltas of a slice: as they arrive, merged, compensated, clipped."""
    lane = plan.lane_of(placement)
    found = dict.fromkeys(
        received(placement, piece, plan),
        Role.DELTA if lane.kind.steps_on_trainer else Role.GRADIENT,
    )
    if lane.kind.steps_on_trainer:
        found[delta_name(piece)] = Role.DELTA
    if not lane.kind.servers_add:
        found[name_beside(placement, piece, "GRAD")] = Role.GRADIENT
    if lane.dc_asgd:
        found[name_beside(placement, piece, "GRAD@DC")] = Role.GRADIENT
    if plan.clips_on_servers:
        found[name_beside(placement, piece, "GRAD@CLIP")] = Role.GRADIENT
    return found


def _states(placement: Placement, piece: Slice, plan: Plan) -> dict[str, bool]:
    """What a server keeps besides a slice: True for what has its shape, False for a scalar."""
    found = applied(plan, placement)
    states = (
        {}
        if found is None
        else {
            name_beside(placement, piece, key): shaped for key, shaped in state_of(found[1]).items()
        }
    )
    if plan.lane_of(placement).dc_asgd:
        states |= dict.fromkeys(backup_names(piece, plan.trainers), True)
    return states


def define_slices(program: Program, plan: Plan) -> Program:
    """Block 0 defines every slice that the server holds, with its gradients and states."""
    variables: dict[str, Variable] = {}

    def define(variable: Variable) -> None:
        variables[variable.name] = variable

    for placement, piece in held(plan, server_of(program)):
        define(_variable(placement, piece))
        if placement.group is None:
            continue
        for name, role in _gradients(placement, piece, plan).items():
            define(Variable(name, piece.shape, placement.dtype, role, placement.name))
        for name, shaped in _states(placement, piece, plan).items():
            shape, dtype = (piece.shape, placement.dtype) if shaped else ((), "float32")
            define(Variable(name, shape, dtype, Role.STATE, placement.name))
    return program.with_blocks(Block(0, freeze(variables), ()))


def _clip_op(placement: Placement, piece: Slice, plan: Plan) -> Op:
    assert plan.clip is not None
    x, clipped = (
        Ref(name_beside(placement, piece, "GRAD")),
        name_beside(placement, piece, "GRAD@CLIP"),
    )
    if plan.clip.kind == "value":
        return Op("clip", {"x": x, "min": plan.clip.low, "max": plan.clip.high}, (clipped,))
    # The norm spans servers: each tells its part, and the trainers' commit carries the coefficient.
    return Op(
        "norm_scale", {"x": x, "by": placement.name if plan.clip.kind == "norm" else ""}, (clipped,)
    )


def _optimizer_op(placement: Placement, piece: Slice, plan: Plan, grad: str) -> Op:
    found = applied(plan, placement)
    assert found is not None, "a lane whose servers only add has no rule"
    group, rule = found
    arguments: dict[str, Argument] = {"param": Ref(piece.name), "grad": Ref(grad)}
    arguments.update(
        {state: Ref(name_beside(placement, piece, state)) for state in sorted(state_of(rule))}
    )
    arguments.update({"group": group, **rule.hparams, **rule.flags})
    return Op(rule.type, arguments, (piece.name,))


def _merge_ops(placement: Placement, piece: Slice, plan: Plan, grad: str) -> list[Op]:
    """The mean over trainers.

    Of deltas its negative: an outer optimizer goes down what it takes for a gradient.
    """
    lane, several = plan.lane_of(placement), tuple(map(Ref, received(placement, piece, plan)))
    merged, scale = (
        (delta_name(piece), -1.0 / plan.trainers)
        if lane.kind.steps_on_trainer
        else (grad, 1.0 / plan.trainers)
    )
    return [
        Op("sum", {"x": several}, (merged,)),
        Op("scale", {"x": Ref(merged), "scale": scale}, (grad,)),
    ]


def _optimize_ops(placement: Placement, piece: Slice, plan: Plan) -> list[Op]:
    """One slice's update.

    ``scale`` says one over the configured trainers; a server divides by those that committed the
    step.
    """
    lane, grad = plan.lane_of(placement), name_beside(placement, piece, "GRAD")
    if lane.kind.servers_add:
        return [Op("sum", {"x": (Ref(piece.name), Ref(delta_name(piece)))}, (piece.name,))]
    ops = _merge_ops(placement, piece, plan, grad) if lane.kind.waits_for_all else []
    if lane.dc_asgd:
        backups = tuple(map(Ref, backup_names(piece, plan.trainers)))
        arguments: dict[str, Argument] = {
            "grad": Ref(grad),
            "param": Ref(piece.name),
            "backups": backups,
            "factor": lane.dc_asgd,
        }
        grad = name_beside(placement, piece, "GRAD@DC")
        ops.append(Op("dc_compensate", arguments, (grad,)))
    if plan.clips_on_servers:
        ops.append(_clip_op(placement, piece, plan))
        grad = name_beside(placement, piece, "GRAD@CLIP")
    return [*ops, _optimizer_op(placement, piece, plan, grad)]


def append_optimize_blocks(program: Program, plan: Plan) -> Program:
    """One block for each slice that the server updates, in the order of the plan; a single empty
    one if it updates nothing.
    """
    updates = [
        tuple(_optimize_ops(placement, piece, plan))
        for placement, piece in held(plan, server_of(program))
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


PSERVER_PASSES: tuple[Stage, ...] = (
    Stage(define_slices, (slices_held, only_server_ops)),
    Stage(append_optimize_blocks, (optimize_blocks_complete,)),
    Stage(define_tables, (tables_held,)),
    Stage(append_table_blocks, (table_blocks_complete,)),
    Stage(listen, (listens_once,)),
)


def pserver_program(deployment: Deployment) -> Program:
    """The main program of the server ``deployment.server_index``.

    Raises:
        ValueError: the deployment is a trainer's.
    """
    return run(Program((Block(0, freeze({}), ()),), deployment), deployment.plan, PSERVER_PASSES)


def _slice_values(placement: Placement, piece: Slice, storage: Storage) -> torch.Tensor:
    if placement.name not in storage.tensors:
        raise ValueError(
            f"expected a value for {placement.name}, which server {piece.server} holds a part of; "
            "got none"
        )
    value = storage.tensors[placement.name].detach()
    if tuple(value.shape) != placement.shape:
        raise ValueError(
            f"{placement.name}: expected a value of shape {list(placement.shape)}, got "
            f"{list(value.shape)}"
        )
    part = value.reshape(-1)[piece.begin : piece.end].reshape(piece.shape)
    return part.cpu().clone(memory_format=torch.contiguous_format)


def pserver_startup(deployment: Deployment, storage: Storage | None = None) -> Program:
    """The startup program of the server ``deployment.server_index``: one ``init`` for each slice
    and table that it holds.

    States are not initialised: the update rule makes them at its first step, or they are loaded.

    Args:
        storage: the module's live values; the program's storage then holds copies of the slices.
            Without it the program says what is initialised, and not to what: such a server waits
            for trainer 0's values.

    Raises:
        ValueError: the deployment is a trainer's, or a value is missing or of another shape.
    """
    program = Program((Block(0, freeze({}), ()),), deployment)
    slices = list(held(deployment.plan, server_of(program)))
    variables = freeze({piece.name: _variable(placement, piece) for placement, piece in slices})
    tables = {table.name: table_variable(table) for table in deployment.plan.tables}
    names = [*variables, *tables]
    program = program.with_blocks(
        Block(0, freeze({**variables, **tables}), tuple(Op("init", {}, (name,)) for name in names))
    )
    verify(program, deployment.plan)
    if storage is None:
        return program
    values = {piece.name: _slice_values(placement, piece, storage) for placement, piece in slices}
    return replace(
        program,
        storage=Storage(values, storage.optimizer, rows=rows_at_start(deployment.plan, storage)),
    )
