"""Promises of a table in two tiers: it keeps to its memory; a disk that refuses changes nothing.

That every number is that of a table without a budget: see test_table.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pserver.table import tiered, updater
from pserver.table.index import KEYS
from pserver.table.table import SparseTable
from pserver.table.tiered import TieredTable, open_table
from tests.pserver.table.test_table import joined, same, scanned
from tests.support.row_rules import RULES
from transpiler.ir.rules import Rule
from transpiler.ir.tables import Normal, Segment, Table

DIM = 4
BUDGET = 3600  # bytes: of some 50 rows
IDS = np.concatenate([np.arange(500), np.arange(-100, 0), 2**62 + 3 * np.arange(100)])
TABLE = Table("emb", DIM, (Segment(0, 1, 0), Segment(1, DIM, 1)), initial=Normal(0.0, 0.1))
PERIOD, KEPT = 40, 30


class Story:
    """The same pushes, each with a rate of its own, for a table and one in two tiers."""

    def __init__(self, name: str, root: Path) -> None:
        self.rule = RULES[name]
        by = [Rule("sgd", {"lr": 0.05}), self.rule]
        self.plain = SparseTable(TABLE, by)
        self.tiered = open_table(replace(TABLE, memory_bytes=BUDGET), by, root=root)
        assert isinstance(self.tiered, TieredTable)
        self.random = np.random.default_rng(4)

    def push(self) -> None:
        # more of the first ids than of the last ones, as clicks have them
        places = np.unique((self.random.random(40) ** 2 * len(IDS)).astype(int))
        ids = IDS[self.random.permutation(places)]
        gradients = self.random.standard_normal((len(ids), DIM)).astype(np.float32)
        rate = self.rule.hparams["lr"] * self.random.uniform(0.5, 1.0)
        for each in (self.plain, self.tiered):
            each.update(ids, gradients.copy(), ({}, {"lr": rate}))

    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            self.push()

    def check(self) -> None:
        same(joined(scanned(self.plain)), joined(scanned(self.tiered)), but="order")
        whole = [joined(scanned(each, materialized=True)) for each in (self.plain, self.tiered)]
        same(*whole, but="order")


@pytest.fixture
def short_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updater, "KEPT", KEPT)
    monkeypatch.setattr(updater, "PERIOD", PERIOD)


def full(batch: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_table_of_ten_times_the_budget_keeps_to_it(tmp_path: Path) -> None:
    """Most of its rows are on disk, and a lookup leaves them there."""
    story = Story("adagrad", tmp_path)
    story.go_on(60)
    counts, before = story.tiered.counters(), story.tiered.bytes_held
    found = [np.empty((len(IDS), DIM), np.float32) for _ in range(2)]
    for each, out in zip((story.plain, story.tiered), found, strict=True):
        each.lookup(IDS, out)

    assert np.array_equal(*found)
    assert len(story.tiered) > 10 * story.tiered.max_rows
    assert counts["spilled"] > counts["fetched"] > 100
    assert story.tiered.counters()["cold"] == counts["cold"]
    empty = SparseTable(TABLE, [story.rule, story.rule]).bytes_held
    assert before - empty < min(5 * BUDGET, story.plain.bytes_held - empty)


def test_a_full_disk_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step for which rows would have to leave memory raises; once there is room again, training
    goes on as if nothing was.
    """
    story = Story("adagrad", tmp_path)
    story.go_on(20)
    ids = np.arange(10_000, 10_050)
    with monkeypatch.context() as patch:
        patch.setattr(story.tiered._cold, "_write", full)
        with pytest.raises(OSError, match="No space left"):
            story.tiered.update(ids, np.ones((50, DIM), np.float32), ({}, {}), None, 0.0)
    story.check()
    story.go_on(5)
    story.check()


@pytest.mark.usefixtures("short_histories")
def test_a_full_disk_stops_a_turn_before_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows on disk that are to catch up cannot: the step raises and has changed nothing."""
    story = Story("adam, decay", tmp_path)
    story.go_on(60)
    rows = story.tiered._rows.index
    ids = rows.ids.array[rows.listed(0, 5)[0]]
    said = story.tiered.metadata()
    with monkeypatch.context() as patch:
        patch.setattr(story.tiered._cold, "_write", full)
        with pytest.raises(OSError, match="No space left"):
            story.tiered.update(ids, np.ones((5, DIM), np.float32), ({}, {}), None, 0.0)

    assert story.tiered.metadata() == said
    story.check()
    story.go_on(60)
    story.check()


def test_a_turn_takes_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows with the same turn come into memory a block at a time."""
    monkeypatch.setattr(updater, "KEPT", KEPT)
    monkeypatch.setattr(updater, "PERIOD", 2)
    monkeypatch.setattr(tiered, "BLOCK", 16)
    story = Story("momentum", tmp_path)
    story.go_on(60)

    assert story.tiered._rows.index.used <= story.tiered.max_rows + 16
    story.check()


@pytest.mark.usefixtures("short_histories")
def test_every_turn_visits_each_row_on_disk_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In ``PERIOD`` steps, about the same number with each: none waits for a whole turn."""
    story = Story("adam", tmp_path)
    story.go_on(KEPT - 1)

    def step_of_no_row() -> None:
        nothing = np.empty(0, np.int64), np.empty((0, DIM), np.float32)
        story.tiered.update(*nothing, ({}, {"lr": story.random.uniform(0.01, 0.02)}))

    step_of_no_row()
    cold, visited = story.tiered._cold, []
    ids = np.sort(np.concatenate([chunk["ids"] for chunk in cold.within(0, KEYS, 100)]))
    with monkeypatch.context() as patch:
        replace_ = cold.replace
        patch.setattr(
            cold, "replace", lambda chunk: (visited.append(chunk["ids"]), replace_(chunk))
        )
        for _ in range(PERIOD):
            step_of_no_row()

    assert np.sort(np.concatenate(visited)).tolist() == ids.tolist()
    assert len(ids) == len(cold) > 200 and max(map(len, visited)) < 4 * len(ids) / PERIOD


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    """A budget with a capacity, and a tiered table without a budget: a ValueError that says what
    was expected.
    """
    with pytest.raises(
        ValueError, match="capacity and memory_bytes: expected one of the two, got both"
    ):
        replace(TABLE, memory_bytes=100, capacity=5)
    by = [RULES["sgd"], RULES["sgd"]]
    with pytest.raises(ValueError, match="expected memory_bytes, got None"):
        TieredTable(TABLE, by, root=tmp_path)

    assert type(open_table(TABLE, by)) is SparseTable and list(tmp_path.iterdir()) == []
