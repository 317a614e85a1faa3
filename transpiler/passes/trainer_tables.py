"""The passes of sparse tables in a trainer's programs: rows are pulled, their gradients are sent.

In the main program::

    split_ids       the ids of all lookups of a table that share one pull, each id once, by server;
                    one for each of the tables
    prefetch        their rows, of all tables and from all servers at once
    merge_ids       the rows of each lookup; one for each of the tables
    ...
    split_ids       the gradient of the rows, by server, right after the op that produces it
    send

With runtime_split_send_recv one ``distributed_lookup_table`` takes the place of the first three,
and the send has the gradient of all rows.  In a k-step lane the optimizer op stays, and the table's
delta is sent with the lane's other deltas.

[Note: one pull]  Lookups share a pull if the ids of all of them can be computed before the rows of
any; the ops that compute ids are moved up where necessary.  Such an op cannot be moved if it
depends on rows, if it draws random numbers, or if a variable that it depends on is changed in
between; its lookup then gets a pull of its own.  So does a lookup of a table that the pull already
reads with another padding.
"""

from __future__ import annotations

from collections import Counter
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
        groups: the numbers of all lookups, the leader among them, by table.
        moved: the numbers of the ops that are moved before the leader.
    """

    leader: int
    groups: tuple[tuple[int, ...], ...]
    moved: tuple[int, ...]


class _Order:
    """The dependencies among the ops of block 0: the ops that a variable comes from.

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


def _next_pull(ops: Sequence[Op], one_table: bool) -> _Pull | None:
    """The first lookup of the block, and those that share its pull."""
    leader = next((index for index, op in enumerate(ops) if op.type == "lookup_table"), None)
    if leader is None:
        return None
    order = _Order(ops)
    groups, moved = {table_name(ops[leader]): [leader]}, set[int]()
    for index, op in enumerate(ops[leader + 1 :], start=leader + 1):
        if op.type != "lookup_table" or not _shares(ops, groups, op, one_table):
            continue
        needed = order.moved(leader, op)
        if needed is not None:
            groups.setdefault(table_name(op), []).append(index)
            moved.update(needed)
    return _Pull(leader, tuple(map(tuple, groups.values())), tuple(sorted(moved)))


def _shares(
    ops: Sequence[Op], groups: Mapping[str, Sequence[int]], lookup: Op, one_table: bool
) -> bool:
    """Whether a pull of these groups may have a lookup, wherever its ids come from."""
    group = groups.get(table_name(lookup))
    if group is None:
        return not one_table
    return ops[group[0]].arguments.get("padding_idx") == lookup.arguments.get("padding_idx")


def pull_rows(program: Program, plan: Plan, runtime_split_send_recv: bool = False) -> Program:
    """Replaces lookups by pulls, one for all lookups that can share it.

    See [Note: one pull].
    """
    if not plan.tables:
        return program
    ops = [op for op in program.main.ops if op.type != "sparse_table"]
    variables: list[Variable] = []
    counts: Counter[str] = Counter()
    while (pull := _next_pull(ops, runtime_split_send_recv)) is not None:
        groups = [
            _group([ops[index] for index in members], plan, program, counts)
            for members in pull.groups
        ]
        counts.update(group.table.name for group in groups)
        pulling = (
            [_at_run_time(groups[0], program)]
            if runtime_split_send_recv
            else _pulling(groups, program)
        )
        gone = {*pull.moved, *(index for members in pull.groups for index in members)}
        before = [*ops[: pull.leader], *(ops[index] for index in pull.moved), *pulling]
        ops = [
            *before,
            *(op for index, op in enumerate(ops) if index > pull.leader and index not in gone),
        ]
        if not runtime_split_send_recv:
            variables += [each for group in groups for each in group.variables()]
    return _with(program, ops, variables)


@dataclass(frozen=True, slots=True)
class _Group:
    """The lookups of one table in a pull.

    Attributes:
        ids: of all of them.
        outputs: their results.
        padding: the argument that they share; empty if there is none.
        parts, rows: the names of their ids and of these ids' rows, by server.
    """

    table: Table
    ids: tuple[Ref, ...]
    outputs: tuple[str, ...]
    padding: Mapping[str, Argument]
    line: str
    parts: tuple[str, ...]
    rows: tuple[str, ...]

    def variables(self) -> Iterator[Variable]:
        """The parts of ids and rows."""
        for part, row in zip(self.parts, self.rows, strict=True):
            extent = f"{part}_rows"
            yield Variable(part, (extent,), "int64")
            yield Variable(row, (extent, self.table.dim), self.table.computes_in)


def _group(
    lookups: Sequence[Op], plan: Plan, program: Program, counts: Mapping[str, int]
) -> _Group:
    endpoints, _ = _deployed(program)
    first, name = lookups[0], table_name(lookups[0])
    suffix = f"_{counts[name]}" if counts[name] else ""
    return _Group(
        plan.table(name),
        tuple(Ref(each) for op in lookups for each in refs(op.arguments["ids"])),
        tuple(op.outputs[0] for op in lookups),
        {key: value for key, value in first.arguments.items() if key == "padding_idx"},
        first.location,
        part_names(f"{name}@IDS{suffix}", len(endpoints)),
        part_names(f"{name}@ROWS{suffix}", len(endpoints)),
    )


def _at_run_time(group: _Group, program: Program) -> Op:
    """The op of a pull whose ids are split when it runs."""
    endpoints, trainer_id = _deployed(program)
    place: dict[str, Argument] = {"endpoints": endpoints, "trainer_id": trainer_id}
    arguments = {"w": Ref(group.table.name), "ids": group.ids, **place, **group.padding}
    return Op("distributed_lookup_table", arguments, group.outputs, group.line)


def _pulling(groups: Sequence[_Group], program: Program) -> list[Op]:
    """The ops of one pull."""
    endpoints, trainer_id = _deployed(program)
    asked: dict[str, Argument] = {
        "w": tuple(Ref(group.table.name) for group in groups),
        "ids": tuple(Ref(part) for group in groups for part in group.parts),
        "endpoints": endpoints * len(groups),
        "trainer_id": trainer_id,
    }
    rows = tuple(row for group in groups for row in group.rows)
    splits, merges = list[Op](), list[Op]()
    for group in groups:
        parts: dict[str, Argument] = {"ids": tuple(map(Ref, group.parts))}
        parts["rows"] = tuple(map(Ref, group.rows))
        splits.append(Op("split_ids", {"x": group.ids, **group.padding}, group.parts, group.line))
        merged = {"x": group.ids, **parts, **group.padding}
        merges.append(Op("merge_ids", merged, group.outputs, group.line))
    return [*splits, Op("prefetch", asked, rows, groups[0].line), *merges]


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
