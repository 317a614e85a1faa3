"""Promises about a table that was saved and loaded: its rows lie in other places of memory, and it
goes on as the one that was saved, to the bit.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from pserver.table import lifecycle, updater
from pserver.table.counts import joint
from pserver.table.deferred import HparamHistory, adam_factors
from pserver.table.index import KEYS, Index
from pserver.table.table import SparseTable
from tests.pserver.table.test_table_cut import ordered, same
from transpiler.ir.rules import Rule
from transpiler.ir.tables import CountFilterEntry, Normal, Segment, ShowClickEntry, Table

DIM = 4
KINDS: dict[str, dict[str, Any]] = {
    "capped": {"capacity": 300},
    "capped, lfu": {"capacity": 300, "eviction": "lfu"},
    "capped halves": {"capacity": 300, "dtype": "bfloat16"},
    "capped, waits and expires": {"capacity": 300, "entry": CountFilterEntry(2), "ttl": 40.0},
    "capped, shown": {
        "capacity": 300,
        "entry": ShowClickEntry("s", "c", threshold=0.5, delete_threshold=0.2),
    },
    "halves": {"dtype": "float16"},
}
RULES = {
    "adagrad": Rule("adagrad", {"lr": 0.1}),
    "adam": Rule("adam", {"lr": 0.01}),
    "momentum": Rule("momentum", {"lr": 0.01, "momentum": 0.9}),
}


class Life:
    """What happens to a table, and to those that go on from its saves."""

    def __init__(self, kind: str, rule: str) -> None:
        table = Table("t", DIM, (Segment(0, DIM, 0),), initial=Normal(0.0, 0.1), **KINDS[kind])
        self.made = lambda: SparseTable(table, [RULES[rule]])
        self.random, self.now, self.tables = np.random.default_rng(5), 0.0, [self.made()]

    def go_on(self, steps: int) -> None:
        """Steps with rates of their own, and other calls, the same for all tables."""
        for _ in range(steps):
            self.now += 1.0
            ids = self.random.choice(900, int(self.random.integers(1, 60)), replace=False)
            rows = self.random.standard_normal((len(ids), DIM)).astype(np.float32)
            rate, what = float(self.random.uniform(0.01, 0.1)), self.random.random()
            for table in self.tables:
                if what < 0.8:
                    table.update(ids, rows.copy(), [{"lr": rate}], None, self.now)
                elif what < 0.9:
                    table.add(ids, rows, None, self.now)
                elif what < 0.95:
                    table.assign(ids[:5], rows[:5])
                elif what < 0.97:
                    table.shrink(self.now)
                else:
                    table.expire(self.now)

    def save_and_load(self) -> None:
        """One more table, from a save of the first; chunks come in another order."""
        cut, copy = self.tables[0].cut(), self.made()
        chunks = []
        while (chunk := cut.read(37)) is not None:
            chunks.append({name: column[::-1].copy() for name, column in chunk.items()})
        copy.restore(json.loads(json.dumps(cut.metadata)))
        cut.close()
        for at in self.random.permutation(len(chunks)):
            copy.load(chunks[at])
        self.tables.append(copy)


def held(table: SparseTable) -> dict[str, np.ndarray]:
    chunks, cursor = [], 0
    while cursor >= 0:
        chunk, cursor = table.scan(cursor, 1000)
        chunks.append(chunk)
    return ordered(chunks)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_table_goes_on_as_the_saved_one(
    kind: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are evicted among a sample, rounded at random, or catch up in turn, where every
    step has a rate of its own.
    """
    monkeypatch.setattr(lifecycle, "EXACT", 64)
    monkeypatch.setattr(lifecycle, "EACH", 3)
    monkeypatch.setattr(updater, "KEPT", 30)
    monkeypatch.setattr(updater, "PERIOD", 50)
    life = Life(kind, rule)
    for steps in (70, 61, 140):
        life.go_on(steps)
        life.save_and_load()
    life.go_on(130)

    first, *others = life.tables
    assert first.counters()["evicted"] > 100 or "capped" not in kind
    assert len(first.metadata()["history"]) < 130
    for other in others:
        same(held(first), held(other))
        assert other.metadata() == first.metadata()


def test_ids_in_a_range_of_keys_are_those_whatever_came_and_went():
    """Each id is in exactly one of the ranges that part all keys, and in the same one in every
    index that has it.
    """
    random = np.random.default_rng(2)
    ids = random.integers(-(2**62), 2**62, 20_000)
    first, second = Index(), Index()
    first.insert(ids, 0, 0)
    second.insert(np.arange(30_000), 0, 0)
    second.remove(np.arange(30_000))
    second.insert(random.permutation(ids), 0, 0)
    bounds = np.sort(np.append(random.integers(0, KEYS, 300), [0, 1, 2**32, KEYS])).tolist()

    found = []
    for begin, end in zip(bounds, bounds[1:], strict=False):
        mine, theirs = (each.ids.array[each.within(begin, end)] for each in (first, second))
        assert set(mine.tolist()) == set(theirs.tolist())
        found += mine.tolist()
    assert sorted(found) == sorted(ids.tolist())
    assert len(first.within(5, 5)) == 0 == len(Index().within(0, KEYS))


def test_an_older_checkpoint_begins_the_turn_anew():
    """Its metadata names a slot, which holds another row by now; and so does that of a table whose
    servers differ in whose turn it is.
    """
    life = Life("halves", "momentum")
    life.go_on(40)
    said = life.tables[0].metadata()
    table = life.made()
    table.restore(
        {name: each for name, each in said.items() if name != "swept"} | {"sweep": [7, 3]}
    )

    assert table.metadata()["swept"] == 0 and table.metadata()["sweep"] == [0, 3]
    assert joint([said | {"swept": 5}, said | {"swept": 5}])["swept"] == 5
    assert joint([said | {"swept": 5}, said | {"swept": 6}])["swept"] == 0


def test_a_history_that_has_forgotten_is_as_one_that_was_loaded():
    """To the bit, the sums of logarithms among it: so rows catch up alike."""
    random = np.random.default_rng(3)
    first, second = (HparamHistory([5], [4], [adam_factors], np.float32) for _ in range(2))
    for step in range(1, 400):
        if random.random() < 0.7:
            line = random.uniform(0.1, 0.9, 5)
        first.append(step, [line.tolist()])
        if step in (150, 300):
            first.forget_before(step - 60)
    second.restore(json.loads(json.dumps(first.plain())))

    assert 60 < len(first) < 160
    for mine, theirs in zip(first.arguments(0), second.arguments(0), strict=True):
        assert mine.tobytes() == theirs.tobytes()
