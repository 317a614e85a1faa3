"""Promises of a table's cut: what it copies, and how much of the table a read looks at.

That it holds what the table held at its moment: see test_table.py.
"""

from __future__ import annotations

import numpy as np
import pytest

from pserver.table import snapshots
from pserver.table.table import SparseTable
from transpiler.ir.rules import Rule
from transpiler.ir.tables import Segment, Table

DIM = 4


def pushed(count: int) -> SparseTable:
    """A table with so many rows."""
    table = SparseTable(Table("t", DIM, (Segment(0, DIM, 0),)), [Rule("adagrad", {"lr": 0.1})])
    push(table, 0, count)
    return table


def push(table: SparseTable, begin: int, end: int) -> None:
    table.update(np.arange(begin, end), np.ones((end - begin, DIM), np.float32), [{}])


def test_a_cut_keeps_only_what_changes_before_it_is_read() -> None:
    """A row is copied once; none that was read, and none that came later."""
    table = pushed(500)
    cut = table.cut()
    assert cut.bytes_kept == 0
    assert cut.read(100) is not None
    push(table, 0, 100)
    push(table, 500, 600)
    assert cut.bytes_kept == 0
    for _ in range(2):
        push(table, 300, 350)
    kept = cut.bytes_kept
    cut.close()

    assert kept == 50 * (8 + 4 * DIM + 4 * DIM)
    assert cut.read(100) is None and table.cut().bytes_kept == 0


@pytest.mark.parametrize("noted", [snapshots.FREE_SLOTS, 0])
@pytest.mark.parametrize("changed", [False, True])
def test_a_read_looks_at_so_many_slots(
    changed: bool, noted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where few rows have changed, or are left: steps do not wait for a whole table."""
    monkeypatch.setattr(snapshots, "FREE_SLOTS", noted)
    table = pushed(600)
    table.mark_saved()
    push(table, 598, 600)
    cut, counts = table.cut(changed), []
    while (chunk := cut.read(50)) is not None:
        counts.append(len(chunk["ids"]))

    assert counts == ([0] * 11 + [2] if changed else [50] * 12)
