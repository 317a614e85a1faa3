"""Promises about a sparse table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pserver.table import index
from pserver.table.rows import initial_rows
from pserver.table.table import SparseTable
from transpiler.ir.rules import Rule
from transpiler.ir.tables import Constant, Normal, Segment, Table, Uniform

ADAGRAD = Rule("adagrad", {"lr": 0.1})


def made(
    dim: int = 4, rule: Rule = ADAGRAD, server: int = 0, servers: int = 1, **metadata: Any
) -> SparseTable:
    return SparseTable(Table("t", dim, (Segment(0, dim, 0),), **metadata), [rule], server, servers)


def read(table: SparseTable, ids: Any, now: float = 0.0) -> np.ndarray:
    ids = np.asarray(ids, np.int64)
    out = np.full((len(ids), table.table.dim), np.nan, table.table.dtype)
    table.lookup(ids, out, now)
    return out


def push(table: SparseTable, ids: Any, gradient: float | np.ndarray = 1.0, **metadata: Any) -> None:
    ids = np.asarray(ids, np.int64)
    gradients = np.full((len(ids), table.table.dim), gradient, table.table.dtype)
    table.update(ids, gradients, [{}] * len(table.table.segments), **metadata)


def chunks(table: SparseTable, limit: int = 1000, **metadata: Any) -> list[dict[str, np.ndarray]]:
    found, cursor = [], 0
    while cursor >= 0:
        chunk, cursor = table.scan(cursor, limit, **metadata)
        found.append(chunk)
    return found


def random_ids(count: int, seed: int = 0) -> np.ndarray:
    return np.unique(np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, count))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("initial", [Constant(0.25), Uniform(-2, 3), Normal(1, 0.5)])
def test_initial_values_depend_on_seed_and_id_alone(initial: Any, dtype: str):
    """The same on one server or seven, in whatever order; another seed gives others; and they are
    distributed as said.
    """
    ids = random_ids(4000)
    expected = np.empty((len(ids), 3), dtype)
    initial_rows(initial, 11, ids, expected)
    table = made(3, initial=initial, seed=11, dtype=dtype)
    push(table, ids[::-1].copy(), 0.0)
    assert np.array_equal(read(table, ids), expected)
    other = made(3, initial=initial, seed=11, dtype=dtype, server=3, servers=7)
    assert np.array_equal(read(other, ids), expected)
    low, high = initial.low, initial.high
    mean, deviation = {
        "constant": (low, 0.0),
        "uniform": ((low + high) / 2, (high - low) / 12**0.5),
        "normal": (low, high),
    }[initial.kind]
    assert expected.mean() == pytest.approx(mean, abs=4 * (deviation + 1e-9) / 100)
    assert expected.std() == pytest.approx(deviation, rel=0.05)
    if initial.kind != "constant":
        assert not np.array_equal(
            read(made(3, initial=initial, seed=12, dtype=dtype), ids), expected
        )
        assert abs(np.corrcoef(expected[:, 0], expected[:, 1])[0, 1]) < 0.08
        assert abs(np.corrcoef(expected[1:, 0], expected[:-1, 0])[0, 1]) < 0.08


def test_a_table_grows_and_every_row_is_found_again():
    """Any 64 bits are an id; after many thousand rows each reads what was written to it, and no
    other id does.
    """
    table = made(2, initial=Constant(-1.0))
    ids = np.concatenate([random_ids(30_000), np.arange(30_000), np.arange(30_000) * 2**32 + 1])
    ids = np.unique(np.concatenate([ids, [-(2**63), 2**63 - 1]]))
    values = np.random.default_rng(3).normal(size=(len(ids), 2)).astype(np.float32)
    order = np.random.default_rng(4).permutation(len(ids))
    for part in np.array_split(order, 9):
        table.assign(ids[part], values[part])
    assert len(table) == len(ids)
    assert np.array_equal(read(table, ids), values)
    others = np.setdiff1d(random_ids(1000, seed=9), ids)
    assert (read(table, others) == -1.0).all()


def test_tables_leave_addresses_to_others(monkeypatch: pytest.MonkeyPatch):
    """On a machine with much memory the many tables of a model fit into a process's addresses."""
    monkeypatch.setattr(index, "reservable", lambda: 2**44)
    tables = [made(2) for _ in range(200)]
    ids = random_ids(100)
    for number, table in enumerate(tables):
        table.assign(ids, np.full((len(ids), 2), number, np.float32))
    assert all((read(table, ids) == number).all() for number, table in enumerate(tables))


def test_bad_input_is_refused_and_changes_nothing():
    """Each mistake says the table, what was expected and what came."""
    table = made(rows=10)
    ids, good = np.arange(3), np.zeros((3, 4), np.float32)
    with pytest.raises(ValueError, match="table 't': expected ids from 0 to 9, got 10"):
        read(table, [1, 10, 11])
    with pytest.raises(ValueError, match="table 't': expected ids from 0 to 9, got -1"):
        push(table, [1, -1])
    with pytest.raises(TypeError, match="table 't': expected ids of int64, got an array of int32"):
        table.update(ids.astype(np.int32), good, [{}])
    with pytest.raises(ValueError, match=r"expected ids of one dimension, got shape \(3, 1\)"):
        table.update(ids[:, None], good, [{}])
    with pytest.raises(ValueError, match="expected each id once, got 7 again"):
        push(table, [1, 7, 7])
    with pytest.raises(ValueError, match=r"gradients: expected shape \(3, 4\), got \(3, 5\)"):
        table.update(ids, np.zeros((3, 5), np.float32), [{}])
    with pytest.raises(TypeError, match="gradients: expected float32, got an array of float64"):
        table.update(ids, good.astype(np.float64), [{}])
    with pytest.raises(ValueError, match="contiguous"):
        table.update(ids, np.zeros((4, 3), np.float32).T, [{}])
    with pytest.raises(ValueError, match="contiguous"):
        table.lookup(np.arange(6)[::2], good)
    assert len(table) == 0 and table.step == 0
    push(table, [1, 7])
    with pytest.raises(ValueError, match="expected each id once, got 7 again"):
        push(table, [7, 1, 7])
    assert table.step == 1
