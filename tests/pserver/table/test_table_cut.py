"""Promises of a table's cut: it holds what the table held at one moment, whatever comes after."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pserver.table import snapshots
from pserver.table.index import EPOCHS
from pserver.table.snapshots import TableCut
from pserver.table.tiered import open_table
from transpiler.ir.rules import Rule
from transpiler.ir.tables import CountFilterEntry, Normal, Segment, ShowClickEntry, Table

DIM = 4
IDS = np.concatenate([np.arange(400), -1 - np.arange(100), 2**62 + 3 * np.arange(100)])
Chunk = dict[str, np.ndarray]
TABLES: dict[str, dict[str, Any]] = {
    "plain": {},
    "waiting": {"entry": CountFilterEntry(3), "ttl": 8.0},
    "shown": {"entry": ShowClickEntry("show", "click", 1.0, delete_threshold=0.3)},
    "capped": {"capacity": 150, "eviction": "lfu"},
    "halves": {"dtype": "bfloat16"},
    "a range": {"rows": 600},
    "two tiers": {"memory_bytes": 4000},
    "two tiers that wait": {"memory_bytes": 4000, "entry": CountFilterEntry(2), "ttl": 9.0},
}
RULES = {
    "adagrad": Rule("adagrad", {"lr": 0.1}),
    "adam": Rule("adam", {"lr": 0.01}),
    "sgd that begins to decay": Rule("sgd", {"lr": 0.1}),
}


class World:
    """A table, and what happens to it by chance."""

    def __init__(self, kind: str, rule: str, seed: int, root: Path) -> None:
        self.random, self.rule, self.now = np.random.default_rng(seed), rule, 0.0
        table = Table("t", DIM, (Segment(0, DIM, 0),), initial=Normal(0.0, 0.1), **TABLES[kind])
        self.table = open_table(table, [RULES[rule]], root=root)
        self.ids = np.arange(600) if kind == "a range" else IDS

    def some(self, most: int = 60) -> np.ndarray:
        return self.random.choice(self.ids, int(self.random.integers(1, most)), replace=False)

    def step(self, calls: int) -> None:
        """A push, or, seldom, another call that changes the table."""
        for _ in range(calls):
            self.now += 1.0
            ids, what = self.some(), self.random.random()
            rows = self.random.standard_normal((len(ids), DIM)).astype(np.float32)
            if what < 0.8:
                decays = self.rule.startswith("sgd") and self.now > 30
                self.table.update(
                    ids, rows, [{"weight_decay": 0.1} if decays else {}], None, self.now
                )
            elif what < 0.85:
                self.table.add(ids, rows, None, self.now)
            elif what < 0.9:
                self.table.assign(ids, rows)
            elif what < 0.93:
                self.table.shrink(self.now)
            elif what < 0.96:
                self.table.expire(self.now)
            elif what < 0.98:
                self.table.lookup(ids, rows, self.now)
            elif what < 0.995:
                self.table.load(self.table.scan(0, 30)[0])
            else:
                self.table.clear()

    def scanned(self, changed: bool = False) -> Chunk:
        found, cursor = [], 0
        while cursor >= 0:
            chunk, cursor = self.table.scan(cursor, 64, changed)
            found.append(chunk)
        return ordered(found)


def ordered(chunks: list[Chunk]) -> Chunk:
    """All rows, waiting and removed ids, each array in the order of its ids."""
    found = {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}
    whose = {
        name: "waiting.ids" if name.startswith("waiting.") else name if name == "removed" else "ids"
        for name in found
    }
    orders = {name: np.argsort(found[name]) for name in set(whose.values())}
    return {name: column[orders[whose[name]]] for name, column in found.items()}


def same(first: Chunk, second: Chunk) -> None:
    assert first.keys() == second.keys()
    for name, column in first.items():
        assert column.dtype == second[name].dtype, name
        assert np.array_equal(column, second[name]), name


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", TABLES)
def test_a_cut_is_the_table_of_its_moment(
    kind: str, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, whatever is pushed, made, evicted, shrunk or cleared while it is read in pieces;
    and the metadata with it.  Also where more slots are free than a cut notes, and after so many
    saves that rows have old epochs' numbers again.
    """
    settings = ((snapshots.FREE_SLOTS, 0), (0, EPOCHS - 2), (5, EPOCHS - 1))
    for seed, (noted, epoch) in enumerate(settings):
        monkeypatch.setattr(snapshots, "FREE_SLOTS", noted)
        world = World(kind, rule, seed, tmp_path)
        world.step(int(world.random.integers(1, 40)))
        world.table._rows.epoch += epoch
        for changed in (False, True, True):
            expected = world.scanned(changed)
            metadata = json.dumps(world.table.metadata())
            cut = world.table.cut(changed)
            found = []
            while (chunk := cut.read(17)) is not None:
                found.append(chunk)
                world.step(int(world.random.integers(0, 4)))
            cut.close()

            if any(len(column) for column in expected.values()):
                same(ordered(found), expected)
            assert json.dumps(cut.metadata) == metadata and cut.bytes_kept == 0
            world.step(3)


def test_updates_are_those_of_a_table_without_a_cut(tmp_path: Path) -> None:
    """A cut reads: the table that is cut and one that is not hold the same bits."""
    worlds = [World("shown", "adam", 3, tmp_path) for _ in range(2)]
    for world in worlds:
        world.step(20)
    cut = worlds[0].table.cut()
    for world in worlds:
        world.step(20)
    while cut.read(7) is not None:
        pass

    same(worlds[0].scanned(), worlds[1].scanned())


def test_a_cut_keeps_only_what_changes_before_it_is_read(tmp_path: Path) -> None:
    """A row is copied once; none that was read, and none that came later."""
    world = World("plain", "adagrad", 0, tmp_path)
    rows = np.zeros((500, DIM), np.float32)
    world.table.update(np.arange(500), rows, [{}])
    cut = world.table.cut()
    assert cut.bytes_kept == 0
    assert cut.read(100) is not None
    world.table.update(np.arange(100), rows[:100], [{}])
    world.table.update(np.arange(500, 600), rows[:100], [{}])
    assert cut.bytes_kept == 0
    for _ in range(2):
        world.table.update(np.arange(300, 350), rows[:50], [{}])
    kept = cut.bytes_kept
    cut.close()

    assert kept == 50 * (8 + 4 * DIM + 4 * DIM)
    assert cut.read(100) is None and world.table.cut().bytes_kept == 0


@pytest.mark.parametrize("noted", [snapshots.FREE_SLOTS, 0])
@pytest.mark.parametrize("changed", [False, True])
def test_a_read_looks_at_so_many_slots(
    changed: bool, noted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where few rows have changed, or are left: steps do not wait for a whole table."""
    monkeypatch.setattr(snapshots, "FREE_SLOTS", noted)
    world = World("plain", "adagrad", 1, tmp_path)
    world.table.update(IDS, np.ones((len(IDS), DIM), np.float32), [{}], None, 1.0)
    world.table.mark_saved()
    world.table.update(IDS[-2:], np.ones((2, DIM), np.float32), [{}], None, 2.0)
    cut, counts = world.table.cut(changed), []
    while (chunk := cut.read(50)) is not None:
        counts.append(len(chunk["ids"]))

    assert counts == ([0] * 11 + [2] if changed else [50] * 12)


def test_a_chain_of_cuts_makes_the_last_one(tmp_path: Path) -> None:
    """A whole cut and those of what changed since the one before, loaded one after the other."""
    world = World("waiting", "adagrad", 1, tmp_path)
    other = World("waiting", "adagrad", 1, tmp_path)
    for changed in (False, True, True, True):
        world.step(15)
        cut = world.table.cut(changed)
        expected, chunks = world.scanned(), list(every(cut))
        for chunk in chunks:
            other.table.load(chunk)
        cut.close()

        same(other.scanned(), expected)


def every(cut: TableCut) -> Iterator[Chunk]:
    while (chunk := cut.read(50)) is not None:
        yield chunk
