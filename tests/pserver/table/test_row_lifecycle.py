"""Promises about who has a row: admission, statistics, time to live, capacity; and what was
changed.
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
    CountFilterEntry,
    ProbabilityEntry,
    Segment,
    ShowClickEntry,
    Table,
    Uniform,
)

SGD = Rule("sgd", {"lr": 1.0})
CTR = ShowClickEntry(
    "show",
    "click",
    threshold=0.0,
    nonclk_coeff=0.1,
    click_coeff=1.0,
    decay=0.5,
    delete_threshold=0.25,
)


def made(rule: Rule = SGD, server: int = 0, servers: int = 1, **facts: Any) -> SparseTable:
    facts = {"initial": Constant(0.0), **facts}
    return SparseTable(Table("t", 2, (Segment(0, 2, 0),), **facts), [rule], server, servers)


def read(table: SparseTable, ids: Any, now: float = 0.0) -> list[float]:
    out = np.empty((len(ids), 2), np.float32)
    table.lookup(np.array(ids, np.int64), out, now)
    return out[:, 0].tolist()


def push(
    table: SparseTable, ids: Any, gradient: float = -1.0, statistics: Any = None, now: float = 0.0
) -> None:
    given = None if statistics is None else np.array(statistics, np.float32)
    table.update(
        np.array(ids, np.int64), np.full((len(ids), 2), gradient, np.float32), [{}], given, now
    )


def scanned(table: SparseTable, limit: int = 1000, **facts: Any) -> dict[str, np.ndarray]:
    chunks, cursor = [], 0
    while cursor >= 0:
        chunk, cursor = table.scan(cursor, limit, **facts)
        chunks.append(chunk)
    return {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}


def reloaded(table: SparseTable) -> SparseTable:
    """The same table after a save and a load."""
    other = SparseTable(table.table, [SGD])
    other.load(scanned(table, limit=3))
    other.restore(table.metadata())
    return other


def test_with_a_count_of_three_the_third_push_is_the_first_that_is_applied():
    """Until then an id reads its initial value, has no row, and the pushes to it are counted as
    refused.
    """
    table = made(entry=CountFilterEntry(3))
    push(table, [1, 2])
    push(table, [1])
    assert len(table) == 0 and read(table, [1, 2]) == [0, 0]
    push(table, [1, 2])
    assert read(table, [1, 2]) == [1, 0] and len(table) == 1
    push(table, [1, 2])
    assert read(table, [1, 2]) == [2, 1]
    counters = table.counters()
    assert (counters["admitted"], counters["refused"], counters["pushes"], counters["waiting"]) == (
        2,
        4,
        7,
        0,
    )


def test_ids_that_wait_are_saved_and_loaded():
    """A table that was saved between the second push and the third admits with the third."""
    table = made(entry=CountFilterEntry(3))
    push(table, [1, 2, 3])
    push(table, [1])
    table = reloaded(table)
    assert table.counters()["waiting"] == 3
    push(table, [1, 2])
    assert read(table, [1, 2]) == [1, 0]


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


def test_an_id_is_admitted_once_its_score_is_high_enough():
    """Shows and clicks of refused pushes count: with 0.1 for a show and 1 for a click, 11 shows or
    one click make 1.0.
    """
    table = made(entry=ShowClickEntry("show", "click", threshold=1.0))
    for _ in range(9):
        push(table, [1, 2], statistics=[[1, 0], [1, 0]])
    assert read(table, [1, 2]) == [0, 0]
    push(table, [1, 2], statistics=[[1, 0], [1, 1]])
    assert read(table, [1, 2]) == [1, 1]
    push(table, [3], statistics=[[1, 1]])
    assert read(table, [3]) == [1]
    whole = scanned(table)
    facts = dict(
        zip(whole["ids"].tolist(), zip(whole["show"], whole["click"], strict=True), strict=True)
    )
    assert facts == {1: (10, 0), 2: (10, 1), 3: (1, 1)}


def test_statistics_fade_and_what_scores_too_low_or_was_not_seen_goes():
    """The score is (show - click) * 0.1 + click; a day halves both; below 0.25, or unseen for more
    than 30 days, a row goes.
    """
    table = made(entry=CTR)
    push(table, [1, 2, 3], statistics=[[9, 0], [9, 2], [1000, 1000]])
    assert table.shrink(now=0.0) == 0  # scores 0.45, 1.35, 500
    assert table.shrink(now=0.0) == 1  # 0.225, 0.675, 250
    assert read(table, [1, 2, 3]) == [0, 1, 1]
    push(table, [2], statistics=[[0, 0]])
    assert table.shrink(now=0.0, days=0.0, threshold=1.0) == 1
    assert read(table, [2, 3]) == [0, 1]
    push(table, [4], statistics=[[1000, 1000]])
    # 3 was not seen for 31 days
    assert reloaded(table).shrink(now=0.0, days=29.0, threshold=0.0) == 1
    assert table.shrink(now=0.0, days=30.5, threshold=0.0) == 2
    assert (len(table), table.counters()["shrunk"]) == (0, 4)
    push(table, [1])
    assert read(table, [1]) == [1]  # anew


def test_statistics_default_to_a_show_and_are_refused_where_nobody_counts():
    """None means shown once and not clicked; statistics for a table without a ShowClickEntry are a
    mistake.
    """
    table = made(entry=CTR)
    push(table, [5])
    push(table, [5])
    whole = scanned(table)
    assert (whole["show"].tolist(), whole["click"].tolist()) == ([2], [0])
    with pytest.raises(ValueError, match="statistics: expected none"):
        push(made(), [5], statistics=[[1, 0]])
    with pytest.raises(ValueError, match=r"statistics: expected shape \(1, 2\)"):
        push(table, [5], statistics=[[1, 0, 0]])


def test_a_row_lives_for_so_long_after_its_last_push():
    """Afterwards it reads its initial value, and the next push makes it anew; ``expire`` gives its
    memory back.
    """
    table = made(ttl=10.0)
    push(table, [1, 2], now=0.0)
    push(table, [1], now=8.0)
    assert read(table, [1, 2], now=10.0) == [2, 1]
    assert read(table, [1, 2], now=10.5) == [2, 0]
    push(table, [2], now=11.0)
    assert read(table, [1, 2], now=11.0) == [2, 1]
    assert reloaded(table).expire(now=19.0) == 1
    assert table.expire(now=18.5) == 1 and len(table) == 1
    assert table.expire(now=100.0) == 1 and len(table) == 0
    assert table.counters()["expired"] == 3


def test_waiting_has_an_end_too():
    """With a time to live, pushes that lie further apart do not add up to a count."""
    table = made(ttl=10.0, entry=CountFilterEntry(2))
    push(table, [1, 2], now=0.0)
    push(table, [1], now=20.0)
    assert len(table) == 0
    table.expire(now=20.0)
    assert table.counters()["waiting"] == 1
    push(table, [1], now=25.0)
    assert read(table, [1], now=25.0) == [1]


def test_a_full_table_evicts_exactly_the_least_recently_pushed():
    """Against a plain list in the order of pushes: after every call the rows that are there are the
    last of the list.
    """
    table, order, random = made(capacity=40), [], np.random.default_rng(0)
    for _ in range(200):
        ids = random.permutation(100)[: random.integers(1, 12)].tolist()
        push(table, ids)
        order = [one for one in order if one not in ids] + ids
        assert set(scanned(table)["ids"].tolist()) == set(order[-40:])
    evicted = table.counters()["evicted"]
    assert evicted == table.counters()["admitted"] - 40
    gone = next(one for one in range(100) if one not in order[-40:])
    assert read(table, [gone]) == [0]
    push(table, [gone])
    assert read(table, [gone]) == [1]


def test_a_full_table_evicts_exactly_the_least_often_pushed():
    """Of those pushed to equally often, the one that waited longest."""
    table = made(capacity=3, eviction="lfu")
    for ids in ([1, 2, 3], [1], [2], [1]):
        push(table, ids)
    push(table, [4])  # 3 had one push
    assert set(scanned(table)["ids"].tolist()) == {1, 2, 4}
    push(table, [5])  # 4 had one
    push(table, [5])
    push(table, [6])  # 2 and 5 had two
    assert set(scanned(table)["ids"].tolist()) == {1, 5, 6}


def test_a_call_with_more_ids_than_there_is_room_for_keeps_the_last():
    """It is as if the ids had come one after another; nothing is applied to a row that had to
    go.
    """
    table = made(capacity=4)
    push(table, [1, 2])
    push(table, [3, 4, 5, 6, 7, 1])
    assert len(table) == 4
    assert read(table, [3, 4, 5, 6, 7, 2]) == [0, 0, 1, 1, 1, 0]
    push(table, [1])
    assert len(table) == 4


def test_a_large_table_evicts_among_a_sample_and_repeats(monkeypatch: pytest.MonkeyPatch):
    """Beyond the exact size what goes is old, if not the oldest; two runs evict the same; and the
    bound holds on all servers.
    """
    monkeypatch.setattr(lifecycle, "EXACT", 64)
    tables = [made(capacity=5000) for _ in range(2)]
    for begin in range(0, 10_000, 50):
        for table in tables:
            push(table, range(begin, begin + 50))
    whole = [scanned(table)["ids"] for table in tables]
    assert np.array_equal(*whole) and len(whole[0]) == 5000
    assert np.mean(whole[0] >= 5000) > 0.85 and whole[0].min() < 5000
    shares = [made(capacity=11, server=server, servers=3) for server in range(3)]
    for share in shares:
        push(share, range(100))
    assert sum(map(len, shares)) == 11


def test_what_has_changed_since_a_save_makes_the_next_one():
    """A full copy with the changes loaded into it reads like the table: rows pushed to, made,
    removed, made again, waiting.
    """
    table = made(entry=CountFilterEntry(2), ttl=100.0, initial=Uniform(-1, 1))
    for now in (0.0, 10.0):
        push(table, range(50), now=now)
    push(table, [90, 91], now=10.0)
    copy = SparseTable(table.table, [SGD])
    copy.load(scanned(table))
    table.mark_saved()
    assert [len(column) for column in scanned(table, changed_since_save=True).values()] == [
        0
    ] * len(scanned(table, changed_since_save=True))
    push(table, [3, 60, 90], now=60.0)
    push(table, [60], now=105.0)
    assert table.expire(now=120.0) == 49
    push(table, [7], now=121.0)
    push(table, [7, 8], now=122.0)
    changes = scanned(table, limit=4, changed_since_save=True)
    assert set(changes["ids"].tolist()) == {3, 60, 90, 7} and set(
        changes["waiting.ids"].tolist()
    ) == {8}
    assert set(changes["removed"].tolist()) == {*range(50), 91} - {3, 7, 8}
    copy.load(changes)
    assert np.array_equal(read(copy, range(100), 122.0), read(table, range(100), 122.0))
    assert (len(copy), copy.counters()["waiting"]) == (len(table), table.counters()["waiting"])
    table.mark_saved()
    table.clear()
    assert set(scanned(table, changed_since_save=True)["removed"].tolist()) == {3, 60, 90, 7, 8}


def test_added_changes_are_pushes_and_assigned_values_are_not():
    """What is added is admitted and counted like a gradient; what is assigned is there whatever the
    entry says.
    """
    table = made(entry=CountFilterEntry(2), capacity=3)
    one = np.ones((1, 2), np.float32)
    table.add(np.array([4]), one)
    assert read(table, [4]) == [0]
    table.add(np.array([4]), one)
    assert read(table, [4]) == [1] and table.step == 0
    table.assign(np.array([4, 5]), np.full((2, 2), 7, np.float32))
    assert read(table, [4, 5]) == [7, 7]
    assert table.counters()["pushes"] == 2
    push(table, [5])
    assert read(table, [5]) == [8]


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
