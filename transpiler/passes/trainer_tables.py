"""The passes of sparse tables in a trainer's programs: rows are pulled, their gradients are sent.

In the main program::

    split_ids       the ids of all lookups of a table that share one pull, each id once, by server
    prefetch        their rows, from all servers at once
    merge_ids       the rows of each lookup
    ...
    split_ids       the gradient of the rows, by server, right after the op that produces it
    send

With runtime_split_send_recv one ``distributed_lookup_table`` takes the place of the first three,
and the send has the gradient of all rows.  In a k-step lane the optimizer op stays, and the table's
delta is sent with the lane's other deltas.

[Note: one pull]  Lookups of one table share a pull if the ids of all of them can be computed before
the rows of any; the ops that compute ids are moved up where necessary.  Such an op cannot be moved
if it depends on rows, if it draws random numbers, or if a variable that it depends on is changed in
between; its lookup then gets a pull of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from transpiler.ir.effects import changed
from transpiler.ir.graph import Argument, Op, Ref, Role, Variable, freeze, refs
from transpiler.ir.ops import aten_overload
from transpiler.ir.table_ops import gradient_variable, table_name, updates_rows
from transpiler.ir.tables import Table
from transpiler.ir.updates import gradient_of, parameter_of, row_updates
from transpiler.plan.plan import Plan
from transpiler.program import Program


def _deployed(program: Program) -> tuple[tuple[str, ...], int]:
    deployment = program.deployment
    assert deployment is not None and deployment.trainer_id is not None, (
        "passes run on a program that knows its deployment"
    )
    return deployment.endpoints, deployment.trainer_id


def part_names(name: str, servers: int) -> tuple[str, ...]:
    """The names of a variable's parts, one for each server: ``emb@GRAD.server_0``."""
    return tuple(f"{name}.server_{server}" for server in range(servers))


def table_deltas(table: Table, servers: int) -> tuple[str, ...]:
    """The names of the parts of a table's delta, by server."""
    return part_names(f"{table.name}.delta", servers)


# ---- lookups ----


@dataclass(frozen=True, slots=True)
class _Pull:
    """Lookups that share one pull.

    Attributes:
        leader: the number of the first lookup.
        members: the numbers of all, the leader among them.
        moved: the numbers of the ops that are moved before the leader.
    """

    leader: int
    members: tuple[int, ...]
    moved: tuple[int, ...]


class _Order:
    """The dependences among the ops of block 0: which ops a variable comes from.

    Args:
        ops: of block 0.
    """

    def __init__(self, ops: Sequence[Op]) -> None:
        self.ops = ops
        self._writer: dict[str, int] = {}
        for index, op in enumerate(ops):
            for name in op.outputs:
                self._writer.setdefault(name, index)

    def makers(self, names: Iterable[str]) -> set[int]:
        """The numbers of the ops that variables come from, directly or not."""
        found: set[int] = set()
        waiting = list(names)
        while waiting:
            index = self._writer.get(waiting.pop())
            if index is not None and index not in found:
                found.add(index)
                waiting += self.ops[index].inputs
        return found

    def sources(self, names: Iterable[str]) -> set[str]:
        """The variables, and all variables that they come from."""
        given = list(names)
        return {
            *given,
            *(
                name
                for index in self.makers(given)
                for op in [self.ops[index]]
                for name in (*op.inputs, *op.outputs)
            ),
        }

    def moved(self, leader: int, lookup: Op) -> tuple[int, ...] | None:
        """The ops to move before ``leader`` so that the lookup's ids are known there; None if that
        is impossible.

        See [Note: one pull].
        """
        ids = tuple(refs(lookup.arguments["ids"]))
        moved = sorted(index for index in self.makers(ids) if index > leader)
        if any(not _movable(self.ops[index]) for index in moved) or leader in self.makers(ids):
            return None
        if moved:
            own = self.sources(ids)
            for op in self.ops[leader : moved[-1]]:
                if own & self.sources(changed(op)):
                    return None
        return tuple(moved)


def _movable(op: Op) -> bool:
    if not op.type.startswith("aten."):
        return op.type.startswith("sym.") or op.type in ("assign", "assign_value")
    return torch.Tag.nondeterministic_seeded not in aten_overload(op.type).tags and not changed(op)


def _next_pull(ops: Sequence[Op]) -> _Pull | None:
    """The first lookup of the block, and those that share its pull."""
    leader = next((index for index, op in enumerate(ops) if op.type == "lookup_table"), None)
    if leader is None:
        return None
    order, first = _Order(ops), ops[leader]
    members, moved = [leader], set[int]()
    for index, op in enumerate(ops[leader + 1 :], start=leader + 1):
        if op.type == "lookup_table" and _shares(first, op):
            needed = order.moved(leader, op)
            if needed is not None:
                members.append(index)
                moved.update(needed)
    return _Pull(leader, tuple(members), tuple(sorted(moved)))


def _shares(first: Op, other: Op) -> bool:
    return table_name(first) == table_name(other) and first.arguments.get(
        "padding_idx"
    ) == other.arguments.get("padding_idx")


def pull_rows(program: Program, plan: Plan, runtime_split_send_recv: bool = False) -> Program:
    """Replaces lookups by pulls, one for all lookups of a table that can share it.

    See [Note: one pull].
    """
    if not plan.tables:
        return program
    ops = [op for op in program.main.ops if op.type != "sparse_table"]
    variables: list[Variable] = []
    counts: dict[str, int] = {}
    while (pull := _next_pull(ops)) is not None:
        name = table_name(ops[pull.leader])
        number = counts[name] = counts.get(name, -1) + 1
        pulling, made = _pulling(
            [ops[index] for index in pull.members],
            plan.table(name),
            number,
            program,
            runtime_split_send_recv,
        )
        gone = {*pull.members, *pull.moved}
        before = [*ops[: pull.leader], *(ops[index] for index in pull.moved), *pulling]
        ops = [
            *before,
            *(op for index, op in enumerate(ops) if index > pull.leader and index not in gone),
        ]
        variables += made
    return _with(program, ops, variables)


def _pulling(
    lookups: Sequence[Op],
    table: Table,
    number: int,
    program: Program,
    runtime_split_send_recv: bool,
) -> tuple[list[Op], list[Variable]]:
    """The ops of one pull, and the parts of ids and rows that they define."""
    endpoints, trainer_id = _deployed(program)
    padding = {key: value for key, value in lookups[0].arguments.items() if key == "padding_idx"}
    ids = tuple(Ref(name) for op in lookups for name in refs(op.arguments["ids"]))
    outputs, line = tuple(op.outputs[0] for op in lookups), lookups[0].location
    place: dict[str, Argument] = {"endpoints": endpoints, "trainer_id": trainer_id}
    if runtime_split_send_recv:
        arguments = {"w": Ref(table.name), "ids": ids, **place, **padding}
        return [Op("distributed_lookup_table", arguments, outputs, line)], []
    suffix = f"_{number}" if number else ""
    parts = part_names(f"{table.name}@IDS{suffix}", len(endpoints))
    rows = part_names(f"{table.name}@ROWS{suffix}", len(endpoints))
    of_parts, of_rows = tuple(map(Ref, parts)), tuple(map(Ref, rows))
    variables = []
    for part, row in zip(parts, rows, strict=True):
        extent = f"{part}_rows"
        variables.append(Variable(part, (extent,), "int64"))
        variables.append(Variable(row, (extent, table.dim), table.dtype))
    return [
        Op("split_ids", {"x": ids, **padding}, parts, line),
        Op("prefetch", {"w": Ref(table.name), "ids": of_parts, **place}, rows, line),
        Op("merge_ids", {"x": ids, "ids": of_parts, "rows": of_rows, **padding}, outputs, line),
    ], variables


# ---- gradients ----


def send_row_gradients(
    program: Program, plan: Plan, runtime_split_send_recv: bool = False
) -> Program:
    """Sends each gradient of rows right after the last op that writes it, split by server, and
    drops the ops that update the rows.
    """
    served = {
        table.name: table
        for table in plan.tables
        if not plan.lanes[table.lane].kind.steps_on_trainer
    }
    sent = {
        gradient_of(op): served[parameter_of(op)]
        for op in row_updates(program.main)
        if parameter_of(op) in served
    }
    last = {
        name: index
        for index, op in enumerate(program.main.ops)
        for name in op.outputs
        if name in sent
    }
    ops: list[Op] = []
    variables: list[Variable] = []
    for index, op in enumerate(program.main.ops):
        if updates_rows(op) and parameter_of(op) in served:
            continue
        ops.append(op)
        for gradient in (name for name in dict.fromkeys(op.outputs) if last.get(name) == index):
            table, (endpoints, trainer_id) = sent[gradient], _deployed(program)
            x: tuple[Ref, ...] = (Ref(gradient),)
            if not runtime_split_send_recv:
                parts = part_names(gradient, len(endpoints))
                variables += [gradient_variable(table, part) for part in parts]
                ops.append(Op("split_ids", {"x": x}, parts))
                x = tuple(map(Ref, parts))
            ops.append(
                Op(
                    "send",
                    {"x": x, "endpoints": endpoints, "trainer_id": trainer_id, "table": table.name},
                )
            )
    return _with(program, ops, variables)


def _with(program: Program, ops: Iterable[Op], variables: Iterable[Variable]) -> Program:
    added = {variable.name: variable for variable in variables}
    block = replace(
        program.main, ops=tuple(ops), variables=freeze({**program.main.variables, **added})
    )
    return program.with_blocks(block, *program.blocks[1:])


# ---- startup ----


def declared_tables(program: Program) -> Iterator[Op]:
    """A fake_init for each table: a trainer holds no rows."""
    for variable in program.main.variables_of(Role.TABLE):
        yield Op("fake_init", {}, (variable.name,))


def table_changes(
    tables: Sequence[Table], endpoints: Sequence[str]
) -> Mapping[str, tuple[Argument, ...]]:
    """The arguments that a k-step lane's send has for the lane's tables."""
    servers = len(endpoints)
    return {
        "x": tuple(Ref(table.name) for table in tables),
        "endpoints": tuple(endpoint for _ in tables for endpoint in endpoints),
        "sections": (0,) * (servers * len(tables)),  # as many rows as were touched
        "delta": tuple(name for table in tables for name in table_deltas(table, servers)),
    }
