"""What ``pserver plan`` says of a table's rows is what a server allocates."""

from __future__ import annotations

from typing import Any

import pytest

from pserver.table.table import SparseTable
from transpiler.formats.text import row_bytes, server_bytes, table_rows
from transpiler.ir.rules import ROW_RULES, Rule
from transpiler.ir.tables import Segment, ShowClickEntry, Table
from transpiler.plan.plan import Lane, Plan

LIVES: dict[str, dict[str, Any]] = {
    "plain": {},
    "ttl": {"ttl": 60.0},
    "lru": {"capacity": 10},
    "lfu": {"capacity": 10, "eviction": "lfu"},
    "disk": {"memory_bytes": 1001},
    "statistics": {"entry": ShowClickEntry("show", "click")},
    "all": {"ttl": 60.0, "memory_bytes": 4096, "entry": ShowClickEntry("show", "click")},
}


def plan_of(table: Table, rules: list[Rule]) -> Plan:
    return Plan((Lane("sync"),), 3, 2, tuple(rules), (), tables=(table,))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("life", LIVES)
@pytest.mark.parametrize("kind", ROW_RULES)
def test_a_planned_row_weighs_what_a_server_allocates(kind: str, life: str, dtype: str) -> None:
    """Every rule for rows, beside another one, in every life cycle."""
    rules = [Rule(kind, {}, {}), Rule("sgd", {"lr": 0.1}, {})]
    table = Table("t", 5, (Segment(0, 3, 0), Segment(3, 5, 1)), dtype, **LIVES[life])
    layout = SparseTable(table, rules).layout

    element = 4 if dtype == "float32" else 8
    assert row_bytes(plan_of(table, rules), table) == layout.columns * element


@pytest.mark.parametrize(
    ("bounds", "expected", "words"),
    [
        ({}, None, "grows by row"),
        ({"rows": 1001}, 501 * 20, "up to 10.0 KB"),
        ({"capacity": 100}, 50 * 32, "up to 1.6 KB"),
        ({"rows": 10_000, "memory_bytes": 1001}, 501, "up to 501 B, the rest on disk"),
    ],
)
def test_the_memory_of_a_server_is_bounded_or_said_to_grow(
    bounds: dict[str, Any], expected: int | None, words: str
) -> None:
    """By the ids, the capacity or the tier in memory, divided by two servers."""
    table = Table("t", 5, (Segment(0, 5, 0),), **bounds)
    plan = plan_of(table, [Rule("sgd", {"lr": 0.1}, {})])

    assert server_bytes(plan, table) == expected
    assert table_rows(plan)[1][-1] == words
