"""Promises about rows on disk that miss steps, where every step has a rate of its own: they catch
up in turn with the rows in memory, to the bit, before the history forgets what they need.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pserver.checkpoint import checkpoint
from pserver.table import tiered, updater
from pserver.table.index import KEYS
from pserver.table.table import SparseTable
from pserver.table.tiered import TieredTable
from tests.pserver.table.test_tiered_table import DIM, Story, pair, same, table, whole
from tests.support.row_rules import RULES
from transpiler.ir.rules import ROW_RULES, Rule
from transpiler.ir.tables import ShowClickEntry

KEPT, PERIOD = 30, 40
LONGEST = KEPT + 2 * PERIOD  # stretches: a turn, and what came before it and in it
MOVING = [
    name
    for name, rule in RULES.items()
    if ROW_RULES[rule.type].moves_untouched(ROW_RULES[rule.type].complete(rule))
]
SHOWN = ShowClickEntry(
    "shown", "clicked", threshold=0.5, delete_threshold=0.4, delete_after_unseen_days=3
)


@pytest.fixture(autouse=True)
def short_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updater, "KEPT", KEPT)
    monkeypatch.setattr(updater, "PERIOD", PERIOD)


class Scheduled(Story):
    """A story whose steps have rates of their own."""

    def __init__(self, name: str, root: Path, **options: Any) -> None:
        self.rule = RULES[name]
        statistics = isinstance(options.get("entry"), ShowClickEntry)
        self.by = [Rule("sgd", {"lr": 0.05}), self.rule]
        super().__init__(pair(table(**options), self.by, root), statistics)

    def go_on(self, steps: int, **others: float) -> None:
        for _ in range(steps):
            rate = self.rule.hparams["lr"] * self.random.uniform(0.5, 1.0)
            self.push(({}, {"lr": rate, **others}))

    def mark_saved(self) -> None:
        for each in (self.plain, self.tiered):
            each.mark_saved()

    def check(self) -> None:
        super().check()
        same(*(whole(each, changed_since_save=True) for each in (self.plain, self.tiered)))
        mine, theirs = self.tiered.metadata(), self.plain.metadata()
        assert all(mine[name] == theirs[name] for name in ("step", "history", "sweep", "swept"))
        assert len(mine["history"]) <= LONGEST
        assert self.tiered.counters()["cold"] > 4 * self.tiered.max_rows


def saved(of: SparseTable, path: Path, base: Any = None) -> Any:
    """Writes a checkpoint, of what has changed where there is a base."""
    cut = of.cut(changed_since_save=base is not None)
    with checkpoint.writing(path, base) as writer:
        writer.chunks("emb", iter(lambda: cut.read(50), None))
        committed = writer.commit({"table": json.loads(json.dumps(cut.metadata))})
    cut.close()
    return committed


def load(into: SparseTable, path: Path) -> None:
    reader = checkpoint.reading(path)
    into.restore(reader.meta["table"])
    for chunk in reader.chunks("emb"):
        into.load(chunk)


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in MOVING), ("adam", "bfloat16")]
)
def test_rows_on_disk_catch_up_as_those_in_memory(name: str, dtype: str, tmp_path: Path) -> None:
    """Values, states and what changed since a save, under every rule that moves untouched rows;
    while the history ends again and again.
    """
    story = Scheduled(name, tmp_path, dtype=dtype)
    for steps in (60, 40, 70):
        story.go_on(steps)
        story.check()
        story.mark_saved()

    assert len(story.plain.metadata()["history"]) < story.plain.step - PERIOD


@pytest.mark.parametrize("name", ["momentum", "adam", "adamw"])
def test_rows_of_a_range_catch_up_as_those_in_memory(name: str, tmp_path: Path) -> None:
    """Also those that no step has touched; where weights decay, nothing is forgotten."""
    story = Scheduled(name, tmp_path, rows=700)
    story.ids = lambda count: story.random.choice(700, count, replace=False)  # type: ignore[method-assign]
    story.go_on(170)
    found = [np.empty((700, DIM), np.float32) for _ in range(2)]
    for each, out in zip((story.plain, story.tiered), found, strict=True):
        each.lookup(np.arange(700), out)

    assert np.array_equal(*found) and story.tiered.counters()["cold"] > 400
    same(whole(story.plain), whole(story.tiered))
    history = story.tiered.metadata()["history"]
    assert len(history) == 170 if name == "adamw" else len(history) <= LONGEST


def test_a_schedule_that_begins_to_decay_weights(tmp_path: Path) -> None:
    """Rows that went to disk before records said what they have taken catch up as others do."""
    story = Scheduled("sgd", tmp_path)
    story.go_on(40)
    story.go_on(130, weight_decay=0.1)
    story.check()

    assert len(story.tiered.metadata()["history"]) < 130 - PERIOD


@pytest.mark.parametrize("name", ["momentum", "adam, decay"])
def test_a_chain_of_checkpoints_goes_on_as_the_table(name: str, tmp_path: Path) -> None:
    """A base and two deltas, written between turns while rows are shrunk and expire, and loaded
    into a table in two tiers: it goes on as one in memory that was never saved.
    """
    story = Scheduled(name, tmp_path / "disk", entry=SHOWN, ttl=60.0)
    base = None
    for part, steps in enumerate((55, 45, 30)):
        for _ in range(steps // 5):
            story.go_on(5)
            assert story.plain.shrink(story.now, 0.3) == story.tiered.shrink(story.now, 0.3)
        assert story.plain.expire(story.now) == story.tiered.expire(story.now)
        base = saved(story.tiered, tmp_path / str(part), base)
        story.plain.mark_saved()
    story.tiered.close()
    story.tiered = TieredTable(story.tiered.table, story.by, root=tmp_path / "disk")
    load(story.tiered, tmp_path / "2")
    story.mark_saved()
    story.go_on(2 * PERIOD)
    story.check()

    assert min(story.tiered.counters()[what] for what in ("shrunk", "expired")) > 0


@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_a_base_from_before_weights_decayed(name: str, tmp_path: Path) -> None:
    """The delta says of every row which steps it has taken: in memory, and on disk."""
    story = Scheduled(name, tmp_path / "disk")
    story.go_on(40)
    tables = {"plain": story.plain, "tiered": story.tiered}
    bases = {kind: saved(each, tmp_path / f"{kind} base") for kind, each in tables.items()}
    story.go_on(20)
    story.go_on(10, weight_decay=0.1)
    story.check()
    for kind, each in tables.items():
        saved(each, tmp_path / kind, bases[kind])
        loaded = SparseTable(story.plain.table, story.by)
        load(loaded, tmp_path / kind)
        same(whole(loaded), whole(story.plain))
        same(whole(loaded, materialized=True), whole(story.plain, materialized=True))
    story.go_on(1, weight_decay=0.1)
    story.check()


def test_a_cut_holds_its_moment_while_rows_catch_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows on disk are read as they were, though their turn has come since."""
    monkeypatch.setattr(tiered, "BLOCK", 50)
    story = Scheduled("adam", tmp_path)
    story.go_on(60)
    moment, cut, chunks = whole(story.plain), story.tiered.cut(), []
    story.plain.mark_saved()
    while (chunk := cut.read(20)) is not None:
        chunks.append(chunk)
        story.go_on(5)
    order = np.argsort(np.concatenate([chunk["ids"] for chunk in chunks]))

    same(
        {name: np.concatenate([chunk[name] for chunk in chunks])[order] for name in moment}, moment
    )
    cut.close()
    story.check()
    assert story.plain.step > 60 + PERIOD


def test_a_turn_takes_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where many rows have the same turn they come into memory a block at a time."""
    monkeypatch.setattr(updater, "PERIOD", 2)
    monkeypatch.setattr(tiered, "BLOCK", 16)
    story = Scheduled("momentum", tmp_path)
    story.go_on(60)

    assert story.tiered._rows.index.used <= story.tiered.max_rows + 16
    story.check()


def test_every_turn_visits_each_row_on_disk_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In ``PERIOD`` steps, about the same number with each: none waits for a whole turn."""
    story = Scheduled("adam", tmp_path)
    story.go_on(KEPT - 1)

    def step_of_no_row() -> None:
        nothing = np.empty(0, np.int64), np.empty((0, DIM), np.float32)
        story.tiered.update(*nothing, ({}, {"lr": story.random.uniform(0.01, 0.02)}))

    step_of_no_row()
    cold, visited = story.tiered._cold, []
    ids = np.sort(np.concatenate([chunk["ids"] for chunk in cold.within(0, KEYS, 100)]))
    with monkeypatch.context() as patch:
        replace = cold.replace
        patch.setattr(cold, "replace", lambda chunk: (visited.append(chunk["ids"]), replace(chunk)))
        for _ in range(PERIOD):
            step_of_no_row()

    assert np.sort(np.concatenate(visited)).tolist() == ids.tolist()
    assert len(ids) == len(cold) > 200 and max(map(len, visited)) < 4 * len(ids) / PERIOD


def test_a_full_disk_stops_a_turn_before_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step raises and has changed nothing; once there is room, all goes on as it would have."""
    story = Scheduled("adam, decay", tmp_path)
    story.go_on(60)

    def full(batch: object) -> None:
        raise OSError(28, "No space left on device")

    rows = story.tiered._rows.index
    ids = rows.ids.array[rows.listed(0, 5)[0]]
    said = story.tiered.metadata()
    with monkeypatch.context() as patch:
        patch.setattr(story.tiered._cold, "_write", full)
        with pytest.raises(OSError, match="No space left"):
            story.tiered.update(ids, np.ones((5, DIM), np.float32), ({}, {}), None, 0.0)

    assert story.tiered.metadata() == said
    same(
        whole(story.plain, materialized=True),
        whole(story.tiered, materialized=True),
    )
    story.go_on(60)
    story.check()
