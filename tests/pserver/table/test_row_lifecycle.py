"""Promises about who has a row: chances, statistics, samples.

For what follows from each single push see test_table.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pserver.table import lifecycle
from pserver.table.table import SparseTable
from transpiler.ir.rules import Rule
from transpiler.ir.tables import (
    Constant,
    ProbabilityEntry,
    Segment,
    ShowClickEntry,
    Table,
)

SGD = Rule("sgd", {"lr": 1.0})


def made(rule: Rule = SGD, server: int = 0, servers: int = 1, **facts: Any) -> SparseTable:
    facts = {"initial": Constant(0.0), **facts}
    return SparseTable(Table("t", 2, (Segment(0, 2, 0),), **facts), [rule], server, servers)


def read(table: SparseTable, ids: Any) -> list[float]:
    out = np.empty((len(ids), 2), np.float32)
    table.lookup(np.array(ids, np.int64), out)
    return out[:, 0].tolist()


def push(table: SparseTable, ids: Any, statistics: Any = None) -> None:
    given = None if statistics is None else np.array(statistics, np.float32)
    table.update(np.array(ids, np.int64), np.full((len(ids), 2), -1.0, np.float32), [{}], given)


def scanned(table: SparseTable) -> dict[str, np.ndarray]:
    return table.scan(0, 10_000)[0]


def reloaded(table: SparseTable) -> SparseTable:
    """The same table after a save and a load, in which rows came in another order."""
    other = SparseTable(table.table, [SGD])
    other.load({name: column[::-1].copy() for name, column in scanned(table).items()})
    other.restore(table.metadata())
    return other


@pytest.mark.parametrize("probability", [0.2, 0.7])
def test_a_probability_admits_that_part_of_the_ids_and_always_the_same(probability: float):
    """Which ids are admitted depends on seed and id alone, not on the server or on how often they
    are pushed.
    """
    ids = np.arange(20_000)
    table, other = (
        made(entry=ProbabilityEntry(probability)),
        made(entry=ProbabilityEntry(probability), server=1, servers=2),
    )
    push(table, ids)
    push(table, ids)
    push(other, ids[::-1].copy())
    push(other, ids)
    admitted = np.array(read(table, ids)) == 2
    assert admitted.mean() == pytest.approx(probability, abs=0.02)
    assert read(other, ids) == read(table, ids)
    assert not np.array_equal(admitted, _admitted(ids, probability, seed=1))


def _admitted(ids: np.ndarray, probability: float, seed: int) -> np.ndarray:
    table = made(entry=ProbabilityEntry(probability), seed=seed)
    push(table, ids)
    return np.array(read(table, ids)) > 0


def test_statistics_default_to_a_show_and_are_refused_where_nobody_counts():
    """None means shown once and not clicked; statistics for a table without a ShowClickEntry are a
    mistake.
    """
    table = made(entry=ShowClickEntry("show", "click"))
    push(table, [5])
    push(table, [5])
    whole = scanned(table)
    assert (whole["show"].tolist(), whole["click"].tolist()) == ([2], [0])
    with pytest.raises(ValueError, match="statistics: expected none"):
        push(made(), [5], statistics=[[1, 0]])
    with pytest.raises(ValueError, match=r"statistics: expected shape \(1, 2\)"):
        push(table, [5], statistics=[[1, 0, 0]])


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_a_large_table_evicts_among_a_sample_and_repeats(
    eviction: str, monkeypatch: pytest.MonkeyPatch
):
    """Beyond the exact size what goes is old, if not the oldest; one that was saved and loaded
    evicts the same.
    """
    monkeypatch.setattr(lifecycle, "EXACT", 64)
    tables = [made(capacity=2000, eviction=eviction) for _ in range(2)]
    for begin in range(0, 4000, 50):
        if begin in (2500, 3000):
            tables[1] = reloaded(tables[1])
        for table in tables:
            push(table, range(begin, begin + 50))
    whole = [np.sort(scanned(table)["ids"]) for table in tables]
    assert np.array_equal(*whole) and len(whole[0]) == 2000
    assert np.mean(whole[0] >= 2000) > 0.85 and whole[0].min() < 2000


def test_the_bound_holds_on_all_servers():
    """Their shares add up to the table's capacity."""
    shares = [made(capacity=11, server=server, servers=3) for server in range(3)]
    for share in shares:
        push(share, range(100))
    assert sum(map(len, shares)) == 11


def test_assigned_rows_may_be_more_than_the_capacity():
    """Until a push meets an id without a row."""
    table = made(capacity=2)
    table.assign(np.arange(3), np.zeros((3, 2), np.float32))
    push(table, [0])
    assert len(table) == 3
    push(table, [7])
    assert set(scanned(table)["ids"].tolist()) == {0, 7}


def test_a_chunk_of_another_table_is_refused():
    """Another dim, dtype or rule: the message says which array was expected and which came; nothing
    is changed.
    """
    chunk = scanned(made(Rule("adagrad", {"lr": 1.0})))
    with pytest.raises(ValueError, match="table 't': chunk: expected .*, got state.sum"):
        made().load(chunk)
    with pytest.raises(ValueError, match="got no state.exp_avg"):
        made(Rule("adam", {})).load(scanned(made()))
    wide = SparseTable(Table("w", 3, (Segment(0, 3, 0),)), [SGD])
    with pytest.raises(ValueError, match=r"values: expected float32\[0, 3\], got float32\[0, 2\]"):
        wide.load(scanned(made()))
    table = made()
    push(table, [1, 50])
    with pytest.raises(ValueError, match="expected ids from 0 to 9, got 50"):
        made(rows=10).load(scanned(table))
