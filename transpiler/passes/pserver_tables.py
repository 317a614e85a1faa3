"""The passes of sparse tables in a server's program: one block updates rows, one answers lookups.

Every server holds a part of every table: the rows whose ids it owns.  The block that updates rows
is like that of a slice, on gradients of rows: sum and scale over trainers in sync mode, a clip op,
one optimizer op for each segment of columns; in geo mode one sum of the table and a delta; in
diloco the outer optimizer op, of all columns, on the negative mean of the trainers' deltas.  Where
delays are compensated there is a variable for each trainer, with the rows that it has last looked
up; see [Note: rows as they were read] in pserver/table/table.py.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from transpiler.ir.graph import Argument, Block, Op, Ref, Role, Storage, Variable, freeze
from transpiler.ir.table_ops import gradient_variable, start_rows, table_variable, update_op
from transpiler.ir.tables import Table
from transpiler.plan.plan import Plan
from transpiler.plan.planner import rows_read, served
from transpiler.program import Program


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
    """Block 0 defines every table, its gradients or deltas, and the ids that are looked up."""
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
        # of changes the negative mean: an outer optimizer descends along what it is given
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
    """The first rows of tables, by name, where the capturing process holds some: ids, int64 [n],
    and values, [n, dim].
    """
    found = {
        table.name: start_rows(storage.tables[table.name])
        for table in plan.tables
        if table.name in storage.tables
    }
    return {name: rows for name, rows in found.items() if rows is not None}
