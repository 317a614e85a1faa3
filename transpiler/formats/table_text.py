"""The tables of a plan as readable text: their rows, what a row weighs on a server and on its way.

A row's record has its values, its states in their order, and words of 8 bytes that its life cycle
needs.  The index of ids comes on top: 24 to 40 bytes a row.
"""

from __future__ import annotations

from collections.abc import Sequence

from transpiler.ir.rules import ROW_RULES
from transpiler.ir.tables import ShowClickEntry, Table
from transpiler.plan.placement import element_bytes
from transpiler.plan.plan import Plan

ID_BYTES = 8  # of an id in a message
WORD_BYTES = 8
HEAD = ("table", "ids", "row", "update", "lane", "a row holds", "looked up", "sent", "on a server")


def row_bytes(plan: Plan, table: Table) -> int:
    """The bytes of one row's record on a server."""
    element, moves = element_bytes(table.computes_in), False
    columns = -(-table.dim * element_bytes(table.dtype) // element)
    for segment in table.segments:
        rule = plan.groups[segment.group]
        spec = ROW_RULES[rule.type]
        columns += sum(segment.end - segment.begin if full else 1 for full in spec.states.values())
        moves |= spec.moves_untouched(spec.complete(rule))
    words = moves + _words(table)
    if not words:
        return columns * element
    return -(-columns * element // WORD_BYTES) * WORD_BYTES + words * WORD_BYTES


def _words(table: Table) -> int:
    """How many words a row's life cycle needs: times, order and number of pushes, statistics."""
    bounded = table.capacity is not None or table.memory_bytes is not None
    counted = table.capacity is not None and table.eviction == "lfu"
    statistics = 3 if isinstance(table.entry, ShowClickEntry) else 0
    return (table.ttl is not None) + bounded + counted + statistics


def server_bytes(plan: Plan, table: Table) -> int | None:
    """The most bytes of a table's rows in the memory of one server, where the ids spread evenly;
    None where the table has no bound.
    """
    if table.memory_bytes is not None:
        return -(-table.memory_bytes // plan.servers)
    bounds = [rows for rows in (table.rows, table.capacity) if rows is not None]
    return -(-min(bounds) // plan.servers) * row_bytes(plan, table) if bounds else None


def table_rows(plan: Plan) -> Sequence[tuple[str, ...]]:
    """A line of cells for each table, below a head.

    "looked up" and "sent" are bytes of one row on the way to and from one trainer, the id included;
    "on a server" is the most memory that its rows take there.
    """
    from_plan = [(table, row_bytes(plan, table)) for table in plan.tables]
    return [HEAD, *(_cells(plan, table, record) for table, record in from_plan)]


def _cells(plan: Plan, table: Table, record: int) -> tuple[str, ...]:
    adds = plan.lanes[table.lane].kind.servers_add
    sent = table.computes_in if adds else table.gradients_in
    ways = [size(ID_BYTES + table.dim * element_bytes(each)) for each in (table.dtype, sent)]
    held = server_bytes(plan, table)
    bound = "grows by row" if held is None else f"up to {size(held)}"
    if table.memory_bytes is not None:
        bound += ", the rest on disk"
    return (
        table.name,
        "any" if table.rows is None else f"0 to {table.rows - 1}",
        f"{table.dtype}[{table.dim}]",
        ", ".join(dict.fromkeys(plan.groups[segment.group].type for segment in table.segments)),
        str(table.lane),
        size(record),
        *ways,
        bound,
    )


def size(count: int) -> str:
    """Bytes as readable text: ``"1.5 MB"``."""
    value, unit = float(count), "B"
    for larger in ("KB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
