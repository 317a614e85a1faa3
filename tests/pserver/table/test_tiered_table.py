"""Promises of a table in two tiers: every number is that of a table without a budget, whatever is
on disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pserver.checkpoint import checkpoint
from pserver.storage.place import place_at
from pserver.table.table import SparseTable
from pserver.table.tiered import TieredTable, open_table
from transpiler.ir.rules import Rule
from transpiler.ir.tables import CountFilterEntry, Normal, Segment, ShowClickEntry, Table

DIM = 4
BUDGET = 3600  # bytes: of some 50 rows
IDS = np.concatenate([np.arange(500), np.arange(-100, 0), 2**62 + 3 * np.arange(100)])
RULES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "sgd": ("sgd", {"lr": 0.1}),
    "decay from step 20 on": ("sgd", {"lr": 0.1}),
    "momentum": ("momentum", {"lr": 0.1, "momentum": 0.9}),
    "adagrad": ("adagrad", {"lr": 0.1}),
    "adam": ("adam", {"lr": 0.01}),
    "ftrl": ("ftrl", {"lr": 0.1, "l1": 0.01}),
}

Chunk = dict[str, np.ndarray]


def table(**options: Any) -> Table:
    return Table(
        "emb", DIM, (Segment(0, 1, 0), Segment(1, DIM, 1)), initial=Normal(0.0, 0.1), **options
    )


def rules(kind: str = "adagrad", **hparams: Any) -> list[Rule]:
    return [Rule("sgd", {"lr": 0.05}), Rule(kind, {"lr": 0.1, **hparams})]


def whole(
    of: SparseTable, changed_since_save: bool = False, materialized: bool = False, limit: int = 50
) -> Chunk:
    """All chunks, each array in the order of its ids, without what only a table with a budget
    knows: the order of pushes.
    """
    chunks, cursor = [], 0
    while cursor >= 0:
        chunk, cursor = of.scan(cursor, limit, changed_since_save, materialized)
        chunks.append(chunk)
    found = {
        name: np.concatenate([chunk[name] for chunk in chunks])
        for name in chunks[0]
        if name != "order"
    }
    orders = {
        name: np.argsort(found[name]) for name in ("ids", "waiting.ids", "removed") if name in found
    }
    whose = {
        name: "removed"
        if name == "removed"
        else "waiting.ids"
        if name.startswith("waiting.")
        else "ids"
        for name in found
    }
    return {name: column[orders[whose[name]]] for name, column in found.items()}


def same(first: Chunk, second: Chunk) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert first[name].dtype == second[name].dtype and np.array_equal(
            first[name], second[name]
        ), name


def pair(of: Table, by: list[Rule], root: Path) -> tuple[SparseTable, TieredTable]:
    tiered = open_table(replace(of, memory_bytes=BUDGET), by, root=root)
    assert isinstance(tiered, TieredTable)
    return SparseTable(of, by), tiered


class Story:
    """The same pushes and lookups for two tables."""

    def __init__(
        self, tables: tuple[SparseTable, TieredTable], statistics: bool = False, seed: int = 4
    ) -> None:
        self.plain, self.tiered = tables
        self.random = np.random.default_rng(seed)
        self.statistics = statistics
        self.now = 0.0

    def ids(self, count: int) -> np.ndarray:
        """More of the first ids than of the last ones, as clicks have them."""
        return IDS[np.unique((self.random.random(count) ** 2 * len(IDS)).astype(int))]

    def push(self, hparams: Any = ({}, {})) -> None:
        ids = self.random.permutation(self.ids(40))
        gradients = self.random.standard_normal((len(ids), DIM)).astype(np.float32)
        statistics = (
            self.random.integers(0, 3, (len(ids), 2)).astype(np.float32)
            if self.statistics
            else None
        )
        self.now += 1.0
        for each in (self.plain, self.tiered):
            each.update(
                ids,
                gradients.copy(),
                hparams,
                None if statistics is None else statistics.copy(),
                self.now,
            )

    def look(self) -> None:
        ids = self.random.choice(IDS, 90)
        found = [np.empty((90, DIM), np.float32) for _ in range(2)]
        for each, out in zip((self.plain, self.tiered), found, strict=True):
            each.lookup(ids, out, self.now)
        assert np.array_equal(*found)

    def check(self) -> None:
        self.look()
        assert len(self.plain) == len(self.tiered)
        assert (
            self.tiered.counters()["rows"] - self.tiered.counters()["cold"]
            <= self.tiered.max_rows + 40
        )
        same(whole(self.plain), whole(self.tiered))
        same(whole(self.plain, materialized=True), whole(self.tiered, materialized=True))
        mine, theirs = self.tiered.counters(), self.plain.counters()
        assert {name: mine[name] for name in theirs} == theirs


@pytest.mark.slow
@pytest.mark.parametrize("kind", RULES)
def test_a_table_of_ten_times_the_budget_trains_as_one_without(tmp_path: Path, kind: str) -> None:
    """Lookups and whole tables are equal to the bit after every few steps; a lookup leaves rows on
    disk where they are.
    """
    name, hparams = RULES[kind]
    story = Story(pair(table(), rules(name, **hparams), tmp_path))
    for step in range(60):
        story.push(
            ({}, {"weight_decay": 0.1 if kind.startswith("decay") and step >= 20 else 0.0})
            if name == "sgd"
            else ({}, {})
        )
        story.look()
        if step % 20 == 19:
            story.check()
    counts = story.tiered.counters()
    before = counts["cold"]
    story.look()

    assert (
        len(story.tiered) > 10 * story.tiered.max_rows
        and counts["spilled"] > counts["fetched"] > 100
    )
    assert (
        story.tiered.counters()["cold"] == before == len(story.tiered) - (counts["rows"] - before)
    )
    empty = SparseTable(story.plain.table, rules(name, **hparams)).bytes_held
    assert story.tiered.bytes_held - empty < min(5 * BUDGET, story.plain.bytes_held - empty)


def test_rows_of_a_range_that_move_at_every_step(tmp_path: Path) -> None:
    """With a declared range and Adam, rows in memory, on disk and never touched all read as those
    of a table without a budget.
    """
    story = Story(pair(table(rows=700), rules("adam"), tmp_path))
    story.ids = lambda count: story.random.choice(700, count, replace=False)  # type: ignore[method-assign]
    for _ in range(40):
        story.push()
    found = [np.empty((700, DIM), np.float32) for _ in range(2)]
    for each, out in zip((story.plain, story.tiered), found, strict=True):
        each.lookup(np.arange(700), out)

    assert np.array_equal(*found) and story.tiered.counters()["cold"] > 400
    same(whole(story.plain), whole(story.tiered))


def test_admission_time_to_live_and_shrinking_reach_the_disk(tmp_path: Path) -> None:
    """Rows expire and are shrunk away on disk as in memory; all is counted; removed ids are told to
    the next delta.
    """
    entry = ShowClickEntry(
        "shown", "clicked", threshold=0.5, delete_threshold=0.4, delete_after_unseen_days=3
    )
    story = Story(pair(table(entry=entry, ttl=30.0), rules(), tmp_path), statistics=True)
    for step in range(60):
        story.push()
        if step == 25:
            for each in (story.plain, story.tiered):
                each.mark_saved()
        if step % 15 == 14:
            assert story.plain.shrink(story.now, 1.0) == story.tiered.shrink(story.now, 1.0)
            story.check()
            same(
                whole(story.plain, changed_since_save=True),
                whole(story.tiered, changed_since_save=True),
            )
    story.now += 12.0
    assert story.plain.expire(story.now) == story.tiered.expire(story.now) > 0
    story.check()

    same(whole(story.plain, changed_since_save=True), whole(story.tiered, changed_since_save=True))
    assert min(story.tiered.counters()[name] for name in ("cold", "shrunk", "expired")) > 0
    assert len(whole(story.tiered, changed_since_save=True)["removed"]) > 0


def test_waiting_ids_and_k_step_changes(tmp_path: Path) -> None:
    """With a count entry, adding and assigning, of rows in memory, on disk and of none: equal to
    the bit.
    """
    story = Story(pair(table(entry=CountFilterEntry(2)), rules(), tmp_path))
    for step in range(50):
        story.push()
        ids = story.ids(20)
        values = story.random.standard_normal((len(ids), DIM)).astype(np.float32)
        for each in (story.plain, story.tiered):
            (each.add if step % 2 else each.assign)(ids, values)
    story.check()

    assert story.tiered.counters()["cold"] > story.tiered.max_rows


def test_a_table_in_two_tiers_is_saved_and_restored(tmp_path: Path) -> None:
    """A full checkpoint and a delta of it, loaded into two servers with budgets, hold what the
    table without a budget holds.
    """
    story = Story(pair(table(), rules("adam"), tmp_path / "disk"))
    saved = None
    for part in range(2):
        for _ in range(30):
            story.push()
        with checkpoint.writing(tmp_path / str(part), saved) as writer:
            cursor, chunks = 0, []
            while cursor >= 0:
                chunk, cursor = story.tiered.scan(cursor, 50, changed_since_save=part > 0)
                chunks.append(chunk)
            writer.chunks("emb", chunks)
            saved = writer.commit({"facts": story.tiered.metadata()})
        for each in (story.plain, story.tiered):
            each.mark_saved()
    reader = checkpoint.reading(tmp_path / "1")
    parts = [
        TieredTable(story.tiered.table, rules("adam"), server, 2, tmp_path / "disk")
        for server in range(2)
    ]
    for each in parts:
        each.restore(reader.meta["facts"])
        for chunk in reader.chunks("emb"):
            each.load(chunk)

    halves = [whole(each, materialized=True) for each in parts]
    order = np.argsort(np.concatenate([half["ids"] for half in halves]))
    both = {name: np.concatenate([half[name] for half in halves])[order] for name in halves[0]}
    same(both, whole(story.tiered, materialized=True))
    same(both, whole(story.plain, materialized=True))
    assert all(each.counters()["cold"] > 100 and len(each) > 200 for each in parts)
    pieces = checkpoint.manifest.read(place_at(tmp_path / "1")).tables["emb"]
    assert len(pieces) > 1 and len(whole(parts[0])["ids"]) == len(parts[0])


def test_a_delta_has_what_changed_on_disk_as_well(tmp_path: Path) -> None:
    """Rows that left memory after they changed are in the delta, those that left it before the save
    are not; clear is told.
    """
    story = Story(pair(table(), rules(), tmp_path))
    for _ in range(40):
        story.push()
    for each in (story.plain, story.tiered):
        each.mark_saved()
    for _ in range(10):
        story.push()
        same(
            whole(story.plain, changed_since_save=True),
            whole(story.tiered, changed_since_save=True),
        )
    changed = whole(story.tiered, changed_since_save=True)["ids"]
    for each in (story.plain, story.tiered):
        each.clear()

    assert (
        story.tiered.max_rows
        < len(changed)
        < len(whole(story.tiered, changed_since_save=True)["removed"])
    )
    same(whole(story.plain, changed_since_save=True), whole(story.tiered, changed_since_save=True))
    assert len(story.tiered) == 0 and story.tiered.counters()["cold"] == 0


def test_loading_replaces_rows_on_disk(tmp_path: Path) -> None:
    """A chunk's rows, removed ids and other rows: whether they are in memory or on disk makes no
    difference.
    """
    story = Story(pair(table(), rules(), tmp_path))
    for _ in range(40):
        story.push()
    state = whole(story.plain)
    ids = state["ids"][::2]
    chunk = {name: column[::2].copy() for name, column in state.items()} | {
        "removed": state["ids"][1::4].copy()
    }
    chunk["values"] = chunk["values"] + 1.0
    for each in (story.plain, story.tiered):
        each.load(chunk)
    story.check()

    assert len(story.tiered) < len(state["ids"]) and len(ids) > story.tiered.max_rows


def test_a_full_disk_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step for which rows would have to leave memory raises; once there is room again, training
    goes on as if nothing was.
    """
    story = Story(pair(table(), rules(), tmp_path))
    for _ in range(20):
        story.push()

    def full(batch: object) -> None:
        raise OSError(28, "No space left on device")

    ids = np.arange(10_000, 10_050)
    with monkeypatch.context() as patch:
        patch.setattr(story.tiered._cold, "_write", full)
        with pytest.raises(OSError, match="No space left"):
            story.tiered.update(ids, np.ones((50, DIM), np.float32), ({}, {}), None, 0.0)
    story.check()
    for _ in range(5):
        story.push()
    story.check()


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    """A budget with a capacity, and a tiered table without a budget: a ValueError that says what
    was expected.
    """
    with pytest.raises(
        ValueError, match="capacity and memory_bytes: expected one of the two, got both"
    ):
        table(memory_bytes=100, capacity=5)
    with pytest.raises(ValueError, match="expected memory_bytes, got None"):
        TieredTable(table(), rules(), root=tmp_path)

    assert type(open_table(table(), rules())) is SparseTable and list(tmp_path.iterdir()) == []
