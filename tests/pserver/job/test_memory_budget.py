"""What rows may take of a server's memory, which nobody knows before they are pushed to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pserver.errors import Refused
from pserver.job.program import MemoryBudget, check_parts
from pserver.limits import Limits, machine_bytes
from pserver.table.tiered import open_table
from transpiler.ir.rules import Rule
from transpiler.ir.tables import Segment, Table
from transpiler.program_pb2 import Program

DIM, RULES = 8, [Rule("sgd", {"lr": 0.1}, {})]


def table(name: str = "emb", **bounds: Any) -> Any:
    return open_table(Table(name, DIM, (Segment(0, DIM, 0),), **bounds), RULES)


def push(to: Any, first: int, count: int) -> None:
    ids = np.arange(first, first + count)
    to.update(ids, np.ones((count, DIM), np.float32), [{}])


def test_slices_and_all_tables_share_one_limit() -> None:
    """What two tables hold, and what is to come, stay below what the slices leave."""
    tables = {"a": table("a"), "b": table("b")}
    push(tables["a"], 0, 100)
    push(tables["b"], 0, 200)
    held = tables["a"].bytes_held + tables["b"].bytes_held
    room = 50 * tables["a"].row_bytes
    budget = MemoryBudget(1000 + held + room, 1000, tables)

    budget.check({"a": 30, "b": 20})
    with pytest.raises(Refused, match="new ones of table 'a', 'b'.*--max-memory"):
        budget.check({"a": 30, "b": 21})


def test_room_that_was_granted_is_not_given_twice() -> None:
    """A part of the room is given to pushes without a look; rows that are loaded may take it."""
    rows = table()
    budget = MemoryBudget(rows.bytes_held + 1000 * rows.row_bytes, 0, {"emb": rows})
    assert budget.has_room({"emb": 1}) and budget.has_room({"emb": 2})

    budget.check({"emb": 900})
    loaded = 0
    while budget.left >= 12 * rows.row_bytes:
        push(rows, loaded, 1)
        loaded += 1
    assert not budget.has_room({"emb": 12})


def test_a_bounded_table_asks_for_its_bound_only(tmp_path: Path) -> None:
    """Rows beyond a capacity replace others; those beyond ``memory_bytes`` go to disk."""
    bounded = {"full": table("full", capacity=10), "tiered": table("tiered", memory_bytes=4096)}
    for each in bounded.values():
        push(each, 0, 10)
        assert each.growth(0) == 0

    assert bounded["full"].growth(10**9) == 0
    assert bounded["tiered"].growth(10**9) <= 4096


@pytest.mark.parametrize(
    ("text", "expected"), [("1000000", 10**6), ("max", None), (None, None), (str(2**62), None)]
)
def test_a_container_may_have_less_than_the_machine(
    tmp_path: Path, text: str | None, expected: int | None
) -> None:
    """The smaller number counts; without a container there is only the machine's."""
    if text is not None:
        (tmp_path / "memory.max").write_text(f"{text}\n")
    whole = machine_bytes(tmp_path / "nowhere")
    assert machine_bytes(tmp_path / "memory.max") == (expected or whole)


def test_a_program_of_too_many_parts_is_refused() -> None:
    """Before objects are made of them."""
    message = Program()
    for _ in range(3):
        message.blocks.add().ops.add()
    check_parts(message, Limits(program_parts=6))
    with pytest.raises(Refused, match="up to 5 ops, variables, slices, lanes and tables, got 6"):
        check_parts(message, Limits(program_parts=5))
