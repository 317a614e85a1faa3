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

from torch import Tensor

from transpiler.ir.graph import Argument, Block, Op, Ref, Role, Storage, Variable, freeze
from transpiler.ir.rules import state_of
from transpiler.ir.table_ops import gradient_variable, start_rows, table_variable, update_op
from transpiler.ir.tables import Table
from transpiler.plan.lanes import applied, backup_names, delta_name
from transpiler.plan.placement import name_beside
from transpiler.plan.plan import Placement, Plan, Slice
from transpiler.plan.planner import rows_read, served
from transpiler.program import Program

# ---- pserver tables ----
#
# The passes of sparse tables in a server's program: one block updates rows, one answers lookups.
#
# Every server holds a part of every table: the rows whose ids it owns.  The block that updates rows
# is like that of a slice, on gradients of rows: sum and scale over trainers in sync mode, a clip
# op, one optimizer op for each segment of columns; in geo mode one sum of the table and a delta; in
# diloco the outer optimizer op, of all columns, on the negative mean of the trainers' deltas.
#  Where delays are compensated there is a variable for each trainer, with the rows that it has last
# looked up; see [Note: rows as they were read] in pserver/table/table.py.


def arriving(table: Table, plan: Plan) -> tuple[str, ...]:
    """The names of a table's gradients or deltas as they arrive: one for each trainer where the
    server merges, otherwise one.
    """
    lane = plan.lanes[table.lane]
    merged = f"{table.name}.delta" if lane.kind.steps_on_trainer else f"{table.name}@GRAD"
    if not lane.kind.waits_for_all or plan.trainers == 1:
        return (merged,)
    return tuple(f"{merged}.trainer_{trainer}" for trainer in range(plan.trainers))


def define_tables(program: Program, plan: Plan) -> Program:
    """Defines every table in block 0, with its gradients or deltas, and the ids of lookups."""
    found: dict[str, Variable] = {}
    for table in plan.tables:
        lane = plan.lanes[table.lane]
        role = Role.DELTA if lane.kind.steps_on_trainer else Role.GRADIENT
        names = dict.fromkeys(arriving(table, plan), role)
        if lane.kind.outer_optimizer:
            names |= {f"{table.name}.delta": Role.DELTA, f"{table.name}@GRAD": Role.GRADIENT}
        if not lane.kind.steps_on_trainer:
            names |= dict.fromkeys([f"{table.name}@GRAD"], Role.GRADIENT)
            if lane.dc_asgd:
                names |= dict.fromkeys(rows_read(table, plan.trainers), Role.INPUT)
                names[f"{table.name}@GRAD@DC"] = Role.GRADIENT
            if plan.clips_on_servers:
                names[f"{table.name}@GRAD@CLIP"] = Role.GRADIENT
        made = [
            table_variable(table),
            *(gradient_variable(table, name, role) for name, role in names.items()),
        ]
        made.append(
            Variable(f"{table.name}@IDS", (f"{table.name}_asked",), "int64", Role.INPUT, table.name)
        )
        found |= {variable.name: variable for variable in made}
    block = replace(program.main, variables=freeze({**program.main.variables, **found}))
    return program.with_blocks(block, *program.blocks[1:])


def _update_ops(table: Table, plan: Plan) -> list[Op]:
    lane, grad = plan.lanes[table.lane], f"{table.name}@GRAD"
    several = tuple(map(Ref, arriving(table, plan)))
    if lane.kind.servers_add:
        return [Op("sum", {"x": (Ref(table.name), *several)}, (table.name,))]
    ops = []
    if lane.kind.waits_for_all:
        # of changes the negative mean: an outer optimizer descends along its gradient
        merged, sign = (f"{table.name}.delta", -1) if lane.kind.steps_on_trainer else (grad, 1)
        ops = [
            Op("sum", {"x": several}, (merged,)),
            Op("scale", {"x": Ref(merged), "scale": sign / plan.trainers}, (grad,)),
        ]
        ops = ops if lane.averages else ops[:1]
    if lane.dc_asgd:
        compensated: dict[str, Argument] = {
            "grad": Ref(grad),
            "param": Ref(table.name),
            "backups": tuple(map(Ref, rows_read(table, plan.trainers))),
            "factor": lane.dc_asgd,
        }
        grad = f"{grad}@DC"
        ops.append(Op("dc_compensate", compensated, (grad,)))
    if plan.clips_on_servers and plan.clip is not None:
        x, clipped = Ref(grad), f"{grad}@CLIP"
        if plan.clip.kind == "value":
            arguments: dict[str, Argument] = {"x": x, "min": plan.clip.low, "max": plan.clip.high}
            ops.append(Op("clip", arguments, (clipped,)))
        else:
            ops.append(
                Op(
                    "norm_scale",
                    {"x": x, "by": table.name if plan.clip.kind == "norm" else ""},
                    (clipped,),
                )
            )
        grad = clipped
    return [*ops, *(update_op(table.name, grad, *each) for each in served(table, plan))]


def _lookup_block(table: Table, index: int) -> Block:
    rows = Variable(
        f"{table.name}@ROWS", (f"{table.name}_asked", table.dim), table.computes_in, of=table.name
    )
    op = Op("lookup_table", {"w": Ref(table.name), "ids": Ref(f"{table.name}@IDS")}, (rows.name,))
    return Block(index, freeze({rows.name: rows}), (op,))


def append_table_blocks(program: Program, plan: Plan) -> Program:
    """Appends for each table a block that updates rows, then for each one that looks rows up."""
    blocks = program.blocks
    blocks += [
        Block(len(blocks) + at, freeze({}), tuple(_update_ops(table, plan)))
        for at, table in enumerate(plan.tables)
    ]
    blocks += [_lookup_block(table, len(blocks) + at) for at, table in enumerate(plan.tables)]
    return program.with_blocks(*blocks)


def looks_up(block: Block) -> bool:
    """Whether a block answers lookups."""
    return [op.type for op in block.ops] == ["lookup_table"]


def rows_at_start(plan: Plan, storage: Storage) -> dict[str, tuple[Tensor, Tensor]]:
    """The first rows of tables, by name, if the capturing process holds some: ids, int64 [n], and
    values, [n, dim].
    """
    found = {
        table.name: start_rows(storage.tables[table.name])
        for table in plan.tables
        if table.name in storage.tables
    }
    return {name: rows for name, rows in found.items() if rows is not None}


# ---- pserver ----


def server_of(program: Program) -> int:
    """The index of the server that the program is for.

    Raises:
        ValueError: it is not for a server of the plan.
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
    """Defines in block 0 every slice that the server holds, with its gradients and states."""
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
    along its gradient.
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
    """Appends a block for each slice that the server updates, in the order of the plan; a single
    empty one if it updates nothing.
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
    """Ends block 0 in the one ``listen_and_serv``, which runs the blocks after it."""
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
