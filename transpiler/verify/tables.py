"""The invariants of sparse tables in a trainer's programs and in a server's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from transpiler.ir.graph import Block, Op, Role, refs
from transpiler.ir.ops import is_optimizer, rule_of_op
from transpiler.ir.table_ops import segment_of, updates_rows
from transpiler.ir.tables import Table
from transpiler.plan.plan import Plan
from transpiler.plan.planner import rows_read, served
from transpiler.program import Program
from transpiler.verify.invariants import Violation, at, numbered, table_of_block

# ---- a trainer's ----


def _servers(program: Program) -> tuple[str, ...]:
    assert program.deployment is not None, "a program of a cluster"
    return program.deployment.endpoints


def _names(op: Op, key: str) -> tuple[str, ...]:
    return tuple(refs(op.arguments.get(key)))


def rows_pulled_once(program: Program, plan: Plan) -> Iterator[Violation]:
    """A trainer looks up no table itself: it pulls rows from all servers, each part of a pull's ids
    once and in the order in which it was split, and merges them for the lookups whose ids it split.
    """
    tables, split = {table.name for table in plan.tables}, dict[tuple[str, ...], Op]()
    asked: dict[tuple[str, ...], tuple[str, ...]] = {}
    for index, op in enumerate(program.main.ops):
        where, name = at(0, index, op), next(iter(_names(op, "w")), "")
        if op.type in ("lookup_table", "sparse_table"):
            yield Violation(
                where, name or next(iter(op.outputs), ""), "the servers hold this table"
            )
        elif op.type in ("prefetch", "distributed_lookup_table"):
            yield from _pull_violations(where, op, _servers(program), tables)
        if op.type == "split_ids" and not _is_gradient(program, op):
            split[op.outputs] = op
        elif op.type == "prefetch":
            for table, ids, rows in _by_table(op):
                if ids not in split or ids in asked:
                    yield Violation(
                        where,
                        table,
                        "expected ids of one split_ids, in its order, that no other prefetch has",
                    )
                asked[ids] = rows
        elif op.type == "merge_ids":
            yield from _merge_violations(
                where, op, split.get(_names(op, "ids")), asked.pop(_names(op, "ids"), ())
            )
    for ids in asked:
        yield Violation("", ids[0], "its rows are pulled and never merged")


def _pull_violations(
    where: str, op: Op, servers: tuple[str, ...], tables: set[str]
) -> Iterator[Violation]:
    """A pull asks for tables of the plan, for each of them once, and asks all servers."""
    names = _names(op, "w")
    for name in names:
        if name not in tables:
            yield Violation(where, name, "it is no table of the plan")
        elif names.count(name) > 1:
            yield Violation(where, name, "expected each table of a prefetch once")
    expected = servers * (len(names) if op.type == "prefetch" else 1)
    if op.arguments["endpoints"] != expected:
        yield Violation(
            where,
            names[0],
            f"expected all servers, {expected}, got {op.arguments['endpoints']}",
        )


def _by_table(op: Op) -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Each table of a prefetch, with the parts of its ids and of its rows."""
    tables, ids = _names(op, "w"), _names(op, "ids")
    count = len(ids) // len(tables)
    for number, name in enumerate(tables):
        part = slice(number * count, (number + 1) * count)
        yield name, ids[part], op.outputs[part]


def _merge_violations(
    where: str, op: Op, split: Op | None, rows: tuple[str, ...]
) -> Iterator[Violation]:
    if split is None or _names(op, "rows") != rows:
        yield Violation(
            where,
            op.outputs[0],
            "expected parts of ids and the rows that were pulled with them, once",
        )
    elif _names(op, "x") != _names(split, "x") or op.arguments.get(
        "padding_idx"
    ) != split.arguments.get("padding_idx"):
        yield Violation(
            where,
            op.outputs[0],
            f"expected the lookups that were split: {', '.join(_names(split, 'x'))}",
        )


def _is_gradient(program: Program, op: Op) -> bool:
    names = _names(op, "x")
    return (
        len(names) == 1
        and names[0] in program.main.variables
        and program.main.variables[names[0]].role is Role.GRADIENT
    )


def row_gradients_sent_once(program: Program, plan: Plan) -> Iterator[Violation]:
    """The gradient of each table that servers update is sent exactly once, to all servers, when it
    is final, either unsplit or split once into a part for each server.
    """
    unsent = {
        table.name for table in plan.tables if not plan.lanes[table.lane].kind.steps_on_trainer
    }
    last = {name: index for index, op in enumerate(program.main.ops) for name in op.outputs}
    split = {
        op.outputs: op
        for op in program.main.ops
        if op.type == "split_ids" and _is_gradient(program, op)
    }
    for index, op in numbered(program, "send"):
        if "table" not in op.arguments:
            continue
        where, name, x = at(0, index, op), str(op.arguments["table"]), _names(op, "x")
        if name not in unsent:
            yield Violation(
                where, name, "it is sent a second time, or is no table that servers update"
            )
        unsent.discard(name)
        gradients = _names(split[x], "x") if x in split else x
        for gradient in (*gradients, *x):
            found = program.main.variables.get(gradient)
            if found is None or found.role is not Role.GRADIENT or found.of != name:
                yield Violation(
                    where,
                    gradient,
                    f"expected the gradient of {name}, or its parts as they were split",
                )
            elif last.get(gradient, index) >= index:
                yield Violation(
                    where, gradient, "it is sent before the op that produces it has run"
                )
        if op.arguments["endpoints"] != _servers(program):
            yield Violation(
                where,
                name,
                f"expected all servers, {_servers(program)}, got {op.arguments['endpoints']}",
            )
    for name in sorted(unsent):
        yield Violation("", f"{name}@GRAD", "it is never sent")


def rows_updated_in_one_place(program: Program, plan: Plan) -> Iterator[Violation]:
    """A trainer updates the rows of the tables of its k-step lanes, all their columns once, and of
    no others.
    """
    due = {
        table.name: table for table in plan.tables if plan.lanes[table.lane].kind.steps_on_trainer
    }
    found: Counter[str] = Counter()
    for index, op in enumerate(program.main.ops):
        if not updates_rows(op):
            continue
        (name,) = op.outputs
        if name not in due or segment_of(op) not in due[name].segments:
            yield Violation(
                at(0, index, op),
                name,
                "the servers update these rows" if name not in due else "no such segment",
            )
        found[name] += 1
    for name, table in due.items():
        if found[name] != len(table.segments):
            yield Violation(
                "",
                name,
                f"expected {len(table.segments)} updates on this trainer, got {found[name]}",
            )


def tables_declared(program: Program, plan: Plan) -> Iterator[Violation]:
    """A trainer's startup program declares each table of the plan once, by a fake_init, and
    initialises none.
    """
    counts = Counter(name for _, op in numbered(program, "fake_init") for name in op.outputs)
    for name in {**{table.name: 1 for table in plan.tables}, **counts}:
        if counts[name] != 1 or name not in {table.name for table in plan.tables}:
            yield Violation(
                "", name, f"expected one fake_init of a table of the plan, got {counts[name]}"
            )
    for index, op in numbered(program, "init"):
        yield Violation(
            at(0, index, op), next(iter(op.outputs), ""), "a trainer initialises nothing"
        )


# ---- a server's ----


def tables_held(program: Program, plan: Plan) -> Iterator[Violation]:
    """Block 0 of a server defines every table of the plan, and no other: each server holds a part
    of each.
    """
    defined = {variable.name: variable for variable in program.main.variables_of(Role.TABLE)}
    tables = {table.name: table for table in plan.tables}
    for name in sorted(defined.keys() ^ tables.keys()):
        yield Violation(
            "",
            name,
            "it is no table of the plan"
            if name in defined
            else "expected a variable, because every server holds a part of it, got none",
        )
    for name in defined.keys() & tables.keys():
        found, table = defined[name], tables[name]
        rows = found.shape[0] if len(found.shape) == 2 else None
        if (
            (found.dtype, found.shape[1:]) != (table.dtype, (table.dim,))
            or (table.rows or rows) != rows
            or rows is None
        ):
            yield Violation(
                "",
                name,
                f"expected {table.dtype}[{table.rows or 'any'}, {table.dim}], got "
                f"{found.dtype}{found.shape}",
            )


def _expected_types(table: Table, plan: Plan) -> list[str]:
    lane = plan.lanes[table.lane]
    if lane.kind.servers_add:
        return ["sum"]
    merging = ["sum", "scale"] if lane.kind.waits_for_all else []
    merging = merging if lane.averages else ["sum"]
    merging += ["dc_compensate"] if lane.dc_asgd else []
    clipping = (
        []
        if not plan.clips_on_servers or plan.clip is None
        else ["clip" if plan.clip.kind == "value" else "norm_scale"]
    )
    return [*merging, *clipping, *(rule.type for _, rule in served(table, plan))]


def _expected_arguments(op: Op, table: Table, plan: Plan) -> dict[str, object]:
    """The arguments that a merging or clipping op must have."""
    lane, clip = plan.lanes[table.lane], plan.clip
    if op.type == "sum" and lane.kind.servers_add:
        return {"x": (table.name, f"{table.name}.delta")}
    if op.type == "sum":
        one = f"{table.name}.delta" if lane.kind.steps_on_trainer else f"{table.name}@GRAD"
        names = tuple(f"{one}.trainer_{trainer}" for trainer in range(plan.trainers))
        return {"x": names if plan.trainers > 1 else (one,)}
    if op.type == "scale":
        return {"scale": (-1.0 if lane.kind.steps_on_trainer else 1.0) / plan.trainers}
    if op.type == "norm_scale" and clip is not None:
        return {"by": table.name if clip.kind == "norm" else ""}
    if op.type == "dc_compensate":
        backups = rows_read(table, plan.trainers)
        return {"param": (table.name,), "backups": backups, "factor": lane.dc_asgd}
    return {"min": clip.low, "max": clip.high} if op.type == "clip" and clip is not None else {}


def _update_violations(block: Block, table: Table, plan: Plan) -> Iterator[Violation]:
    types, expected = [op.type for op in block.ops], _expected_types(table, plan)
    if types != expected:
        yield Violation(
            f"block {block.index}",
            table.name,
            f"expected {', '.join(expected)}; got {', '.join(types)}",
        )
        return
    before = ""
    updates = iter(served(table, plan))
    for index, op in enumerate(block.ops):
        where = at(block.index, index, op)
        if before and before not in op.inputs:
            yield Violation(where, before, "it does not read what the op before it gives")
        if is_optimizer(op.type):
            segment, rule = next(updates)
            if (
                not updates_rows(op)
                or segment_of(op) != segment
                or rule_of_op(op) != rule
                or op.outputs != (table.name,)
            ):
                yield Violation(where, table.name, f"expected {segment} by {rule}")
            continue
        before = op.outputs[0]
        for key, wanted in _expected_arguments(op, table, plan).items():
            got = _names(op, key) or op.arguments.get(key)
            if got != wanted:
                yield Violation(where, table.name, f"{key}: expected {wanted}, got {got}")


def _lookup_violations(block: Block, table: Table) -> Iterator[Violation]:
    op = block.ops[0]
    if len(block.ops) > 1 or _names(op, "w") != (table.name,) or "padding_idx" in op.arguments:
        yield Violation(
            at(block.index, 0, op),
            table.name,
            "expected one lookup of this table, of all ids that trainers ask for",
        )


def table_blocks_complete(program: Program, plan: Plan) -> Iterator[Violation]:
    """Each table has exactly two blocks on a server: one that updates it, complete for the mode,
    and one that looks rows up.
    """
    tables, found = {table.name: table for table in plan.tables}, Counter[tuple[str, bool]]()
    for block in program.blocks[1:]:
        name = table_of_block(block, program.main)
        if not name:
            continue
        if name not in tables:
            yield Violation(f"block {block.index}", name, "it is no table of the plan")
            continue
        looks_up = block.ops[0].type == "lookup_table"
        found[name, looks_up] += 1
        yield from (
            _lookup_violations(block, tables[name])
            if looks_up
            else _update_violations(block, tables[name], plan)
        )
    for name in tables:
        for looks_up, what in ((False, "updates it"), (True, "looks it up")):
            if found[name, looks_up] != 1:
                yield Violation(
                    "", name, f"expected one block that {what}, got {found[name, looks_up]}"
                )
