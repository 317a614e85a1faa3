"""A table is a dictionary from ids to rows, whatever is pushed, saved or loaded meanwhile.

Three things are held against each other after every call: the table, which may have most of its
rows on disk, is cut and loaded again; its twin, which is in memory and was never saved; and the
dictionary, which knows who has a row, but the values of a row's first column only.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pserver.table import index, snapshots, tiered, updater
from pserver.table.index import EPOCHS
from pserver.table.rows import chance, initial_rows, seed_word
from pserver.table.table import SparseTable
from pserver.table.tiered import TieredTable, open_table
from tests.support.row_rules import RULES
from transpiler.ir.rules import ROW_RULES, Rule
from transpiler.ir.tables import (
    CountFilterEntry,
    ProbabilityEntry,
    Segment,
    ShowClickEntry,
    Table,
    Uniform,
)

DIM, RANGE = 3, 40
Ids = np.ndarray
Chunk = dict[str, np.ndarray]
SHOWN = ShowClickEntry(
    "show", "click", threshold=1.0, nonclk_coeff=0.25, decay=0.5, delete_threshold=0.3
)
KINDS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "a range": {"rows": RANGE},
    "halves": {"dtype": "bfloat16"},
    "expires": {"ttl": 8.0},
    "waits": {"entry": CountFilterEntry(3)},
    "waits and expires": {"entry": CountFilterEntry(2), "ttl": 8.0},
    "by chance": {"entry": ProbabilityEntry(0.6)},
    "shown": {"entry": SHOWN},
    "shown at once": {"entry": replace(SHOWN, threshold=0.0, delete_after_unseen_days=3)},
    "shown and expires": {"entry": SHOWN, "ttl": 12.0},
    "lru": {"capacity": 11},
    "lfu": {"capacity": 11, "eviction": "lfu"},
    "lfu, waits and expires": {
        "capacity": 11, "eviction": "lfu", "entry": CountFilterEntry(2), "ttl": 12.0
    },
}  # fmt: skip
FEW_BYTES = 4 * 80  # of some 4 rows
KEPT, PERIOD = 4, 6
LONGEST = KEPT + 2 * PERIOD  # stretches of a history: a turn, and what came before it and in it
FAR = (-1, 2**63 - 1, -(2**63), 2**62 + 1)

ids_of = st.lists(
    st.integers(0, RANGE - 1) | st.integers(0, 9), min_size=1, max_size=14, unique=True
)
elapsed = st.sampled_from([0.0, 1.0, 1.0, 3.0, 9.0, 13.0])
pushes = st.tuples(  # ids, gradient, rate, shows, seconds, and whether it is added
    ids_of, st.integers(-3, 3), st.sampled_from([1.0, 0.5, 0.7]), st.integers(0, 2) | st.none(),
    elapsed, st.sampled_from([False, False, False, True]),
)  # fmt: skip
limits = st.sampled_from([1, 5, 1000])


@dataclass
class Row:
    """The words of a record; ``value``: of the first column."""

    value: np.float32
    pushed: float = 0.0
    order: int = 0
    pushes: int = 0
    show: float = 0.0
    click: float = 0.0
    unseen: float = 0.0


class Model:
    """A table in plain words."""

    def __init__(self, table: Table) -> None:
        self.table, self.entry, self.ttl = table, table.entry, table.ttl
        self.rows: dict[int, Row] = {}
        self.waiting: dict[int, Row] = {}
        names = ("pushes", "admitted", "refused", "evicted", "expired", "shrunk")
        self.counts = dict.fromkeys((*names, "lookups", "lookups_new"), 0)
        self.order, self.now, self.step = 0, 0.0, 0

    def start(self, value: int) -> np.float32:
        """The initial value of an id."""
        row = np.empty((1, DIM), np.float32)
        initial_rows(self.table.initial, self.table.seed, np.array([value]), row)
        return np.float32(row[0, 0])

    def outlived(self, row: Row, now: float) -> bool:
        return self.ttl is not None and now - row.pushed > self.ttl

    def read(self, value: int, now: float) -> np.float32:
        row = self.rows.get(value)
        return self.start(value) if row is None or self.outlived(row, now) else row.value

    def admits(self, value: int, shown: tuple[float, float], now: float) -> Row | None:
        """The record of an id that gets a row now; None: it gets none."""
        if isinstance(self.entry, ProbabilityEntry):
            # an id's chance is its own: see test_row_lifecycle.py
            lucky = chance(seed_word(self.table.seed), value) < self.entry.probability
            return Row(self.start(value)) if lucky else None
        if self.entry is None:
            return Row(self.start(value))
        known = self.waiting.pop(value, None)
        if known is None or self.outlived(known, now):
            known = Row(self.start(value))
        if isinstance(self.entry, CountFilterEntry):
            known.pushes += 1
            due = known.pushes >= self.entry.count
        else:
            known.show, known.click = known.show + shown[0], known.click + shown[1]
            due, known.unseen = self.score(known) >= self.entry.threshold, 0.0
        if due:
            return replace(
                known, pushes=0, show=known.show - shown[0], click=known.click - shown[1]
            )
        self.waiting[value] = replace(known, pushed=now)
        return None

    def score(self, row: Row) -> float:
        assert isinstance(self.entry, ShowClickEntry)
        return (row.show - row.click) * self.entry.nonclk_coeff + row.click * self.entry.click_coeff

    def note(self, row: Row, place: int, shown: tuple[float, float], now: float) -> None:
        row.pushed, row.order, row.pushes = now, self.order + place, row.pushes + 1
        row.show, row.click, row.unseen = row.show + shown[0], row.click + shown[1], 0.0

    def push(self, ids: list[int], shown: list[tuple[float, float]], now: float) -> None:
        self.now = max(self.now, now)
        for each in ids:
            if each in self.rows and self.outlived(self.rows[each], now):
                del self.rows[each]
                self.counts["expired"] += 1
        due: dict[int, Row] = {}
        here = [place for place, each in enumerate(ids) if each in self.rows]
        for place, each in enumerate(ids):
            if place in here:
                self.note(self.rows[each], place, shown[place], now)
            elif row := self.admits(each, shown[place], now):
                due[place] = row
                self.counts["admitted"] += 1
            else:
                self.counts["refused"] += 1
        self.evict(ids, due, here)
        for place, row in due.items():
            self.note(row, place, shown[place], now)
            self.rows[ids[place]] = row
        self.order += len(ids)
        self.counts["pushes"] += len(ids)

    def evict(self, ids: list[int], due: dict[int, Row], here: list[int]) -> None:
        """The rows with the oldest last push go, or those with the fewest; of a call that alone has
        too many, its last ids stay.
        """
        excess = len(self.rows) + len(due) - (self.table.capacity or 2**62)
        # what was assigned beyond the capacity stays until some id has no row
        if excess <= 0 or len(here) == len(ids):
            return
        self.counts["evicted"] += excess
        often = self.table.eviction == "lfu"
        worth = {each: (row.pushes * often, row.order) for each, row in self.rows.items()}
        gone = set(sorted(worth, key=worth.__getitem__)[:excess])
        if excess > len(self.rows) - len(here):
            stays = sorted([*due, *here])[-(self.table.capacity or 0) :]
            for place in set(due).difference(stays):
                del due[place]
            gone = set(self.rows).difference(ids[place] for place in stays)
        for each in gone:
            del self.rows[each]

    def assign(self, ids: list[int], value: float) -> None:
        new = [place for place, each in enumerate(ids) if each not in self.rows]
        for place in new:
            self.waiting.pop(ids[place], None)
            row = self.rows[ids[place]] = Row(self.start(ids[place]))
            self.note(row, place, (0.0, 0.0), self.now)
        self.order += len(ids) if new else 0
        for each in ids:
            self.rows[each].value = np.float32(value)

    def drop(self, goes: Callable[[Row], bool], counted: str) -> int:
        gone = [each for each, row in self.rows.items() if goes(row)]
        for each in gone:
            del self.rows[each]
        self.waiting = {each: row for each, row in self.waiting.items() if not goes(row)}
        self.counts[counted] += len(gone)
        return len(gone)

    def expire(self, now: float) -> int:
        self.now = max(self.now, now)
        return self.drop(lambda row: self.outlived(row, now), "expired")

    def shrink(self, now: float, days: float, threshold: float | None) -> int:
        self.now = max(self.now, now)
        if not isinstance(entry := self.entry, ShowClickEntry):
            return 0
        for row in (*self.rows.values(), *self.waiting.values()):
            row.show, row.click = row.show * entry.decay**days, row.click * entry.decay**days
            row.unseen += days
        least, most = entry.delete_threshold, entry.delete_after_unseen_days
        least = least if threshold is None else threshold
        return self.drop(lambda row: self.score(row) < least or row.unseen > most, "shrunk")


def scanned(
    table: SparseTable, limit: int = 1000, changed: bool = False, materialized: bool = False
) -> list[Chunk]:
    chunks, cursor = [], 0
    while cursor >= 0:
        chunk, cursor = table.scan(cursor, limit, changed, materialized)
        assert all(len(chunk[name]) <= limit + 3 for name in chunk)
        chunks.append(chunk)
    return chunks


def joined(chunks: list[Chunk]) -> Chunk:
    """All rows, waiting and removed ids, each array in the order of its ids."""
    found = {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}

    def whose(name: str) -> str:
        waits = "waiting.ids" if name.startswith("waiting.") else "ids"
        return name if name == "removed" else waits

    return {name: column[np.argsort(found[whose(name)])] for name, column in found.items()}


def same(first: Chunk, second: Chunk, but: str = "") -> None:
    """To the bit."""
    assert first.keys() - {but} == second.keys() - {but}
    for name in first.keys() - {but}:
        assert first[name].dtype == second[name].dtype, name
        assert np.array_equal(first[name], second[name]), name


class TableMachine(RuleBasedStateMachine):
    """Drives a table, its twin, the model, and the checkpoints of the table."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.root = pytest.MonkeyPatch(), Path(tempfile.mkdtemp())
        self.tables: list[SparseTable] = []
        self.copies: list[SparseTable] = []
        self.touched: set[int] = set()
        self.cut: snapshots.TableCut | None = None

    @initialize(
        kind=st.sampled_from([*KINDS]),
        by=st.sampled_from([*RULES, *("sgd", "adagrad") * 4]),
        decays=st.sampled_from([0, 10, 20, 10**6]),
        tiers=st.sampled_from([False, True, True]),
        seed=st.integers(-3, 3),
        epoch=st.sampled_from([0, EPOCHS - 2]),
        noted=st.sampled_from([0, 3, 2**16]),
        block=st.sampled_from([3, 2**16]),
        reserves=st.booleans(),
        small=st.sampled_from([1, index.SMALL]),
    )
    def begin(
        self, kind: str, by: str, decays: int, tiers: bool, seed: int, epoch: int, noted: int,
        block: int, reserves: bool, small: int,
    ) -> None:  # fmt: skip
        self.patch.setattr(updater, "KEPT", KEPT)
        self.patch.setattr(updater, "PERIOD", PERIOD)
        self.patch.setattr(snapshots, "FREE_SLOTS", noted)
        self.patch.setattr(snapshots, "BLOCK", block)
        self.patch.setattr(tiered, "BLOCK", block)
        if not reserves:
            self.patch.setattr(index, "LEAST_WORTH", 2**62)
            self.patch.setattr(index, "SIDE", 512)
        self.patch.setattr(index, "SMALL", small)
        options = KINDS[kind]
        table = Table(
            "t", DIM, (Segment(0, 1, 0), Segment(1, DIM, 1)), initial=Uniform(-1, 1), seed=seed,
            **options,
        )  # fmt: skip
        self.rules = [Rule("sgd", {"lr": 1.0}), RULES[by]]
        self.model, self.twin = Model(table), SparseTable(table, self.rules)
        budget = FEW_BYTES if tiers and table.capacity is None else None
        self.table_of = replace(table, memory_bytes=budget)
        self.table = self.made()
        self.table._rows.epoch += epoch
        self.decays_from = decays  # the step from which on weights decay
        self.spans = RANGE if table.rows else None
        self.exact = table.dtype == "float32"

    def made(self, server: int = 0, servers: int = 1) -> SparseTable:
        self.tables.append(open_table(self.table_of, self.rules, server, servers, self.root))
        return self.tables[-1]

    def teardown(self) -> None:
        for table in self.tables:
            if isinstance(table, TieredTable):
                table.close()
        shutil.rmtree(self.root)
        self.patch.undo()

    @property
    def pair(self) -> tuple[SparseTable, SparseTable]:
        return self.table, self.twin

    def ids(self, places: list[int]) -> list[int]:
        """Some are far from the others, where the table has any ids."""
        if self.spans is not None:
            return places
        return [FAR[each - 36] if each >= 36 else each for each in places]

    # ---- calls ----

    @rule(pushes=st.lists(pushes, min_size=1, max_size=6), ends=st.booleans())
    def go_on(
        self, pushes: list[tuple[list[int], int, float, int | None, float, bool]], ends: bool
    ) -> None:
        """Some steps, and what a server does now and then."""
        for each in pushes:
            self.push(*each)
        if ends:
            self.end("expire", 0.0, 0.0, None)
            self.end("shrink", 0.0, 1.0, None)

    def push(
        self, places: list[int], gradient: int, rate: float, counted: int | None, passed: float,
        adds: bool,
    ) -> None:  # fmt: skip
        """A step, or what is added; where nothing is said of shows, each is one."""
        ids, now = self.ids(places), self.model.now + passed
        rows = np.full((len(ids), DIM), gradient, np.float32)
        rows += np.arange(len(ids), dtype=np.float32)[:, None]
        shown = None
        if counted is not None and isinstance(self.model.entry, ShowClickEntry):
            shown = np.tile(np.array([counted, counted // 2], np.float32), (len(ids), 1))
        complete = ROW_RULES[self.rules[1].type].complete(self.rules[1])
        own = {"lr": complete["lr"] * rate} if "lr" in complete else {}
        if "weight_decay" in complete and self.model.step >= self.decays_from:
            own["weight_decay"] = 0.1
        for each in self.pair:
            if adds:
                each.add(np.array(ids), rows.copy(), shown, now)
            else:
                each.update(np.array(ids), rows.copy(), [{}, own], shown, now)
        given = [(1.0, 0.0)] * len(ids) if shown is None else [tuple(s) for s in shown.tolist()]
        self.model.push(ids, given, now)
        for value, row in zip(ids, rows[:, 0], strict=True):
            if value in self.model.rows:
                self.model.rows[value].value += row if adds else -row
        self.model.step += not adds
        self.touched.update(ids)

    @rule(places=ids_of, value=st.integers(-3, 3))
    def assign(self, places: list[int], value: int) -> None:
        ids = self.ids(places)
        for each in self.pair:
            each.assign(np.array(ids), np.full((len(ids), DIM), value, np.float32))
        self.model.assign(ids, value)
        self.touched.update(ids)

    @rule(places=st.lists(st.integers(0, RANGE - 1), max_size=20), passed=elapsed)
    def lookup(self, places: list[int], passed: float) -> None:
        """Of any ids, some of them twice; none gets a row."""
        ids, now = self.ids(places), self.model.now + passed
        found = [np.full((len(ids), DIM), np.nan, np.float32) for _ in self.pair]
        for each, out in zip(self.pair, found, strict=True):
            each.lookup(np.array(ids, np.int64), out, now)
        assert np.array_equal(*found)
        if self.exact:
            assert found[0][:, 0].tolist() == [float(self.model.read(each, now)) for each in ids]
        known = [row for each in ids if (row := self.model.rows.get(each))]
        gone = sum(self.model.outlived(row, now) for row in known)
        self.model.counts["lookups"] += len(ids)
        self.model.counts["lookups_new"] += len(ids) - len(known) + gone

    @rule(
        how=st.sampled_from(["expire", "expire", "shrink", "shrink", "clear"]),
        passed=elapsed,
        days=st.sampled_from([0.0, 1.0, 2.0]),
        least=st.none() | st.just(0.6),
    )
    def end(self, how: str, passed: float, days: float, least: float | None) -> None:
        """Of what is too old or scores too low, or of everything."""
        now, model = self.model.now + passed, self.model
        if how == "expire":
            assert {each.expire(now) for each in self.pair} == {model.expire(now)}
        elif how == "shrink":
            wanted = model.shrink(now, days, least)
            assert {each.shrink(now, days, least) for each in self.pair} == {wanted}
            if isinstance(model.entry, ShowClickEntry):
                self.touched.update(model.rows, model.waiting)
        elif len(model.rows) > 8:
            for each in self.pair:
                each.clear()
            model.rows, model.waiting = {}, {}

    @precondition(lambda self: len(self.model.rows) + len(self.model.waiting) > 3)
    @rule()
    def load(self) -> None:
        """Other values for some rows, and the end of others."""
        whole = joined(scanned(self.table))
        # of what waits, half is said again as it is
        chunk = {name: column[::2].copy() for name, column in whole.items()}
        gone = (whole["ids"][1::4], whole.get("waiting.ids", np.empty(0, np.int64))[1::2])
        chunk |= {"removed": np.concatenate(gone)}
        chunk["values"] += 1.0
        for each in self.pair:
            each.load({name: column.copy() for name, column in chunk.items()})
        for value in chunk["removed"].tolist():
            self.model.rows.pop(value, None)
            self.model.waiting.pop(value, None)
        for value in chunk["ids"].tolist():
            self.model.rows[value].value += np.float32(1.0)
        self.touched.update(whole["ids"].tolist(), whole.get("waiting.ids", gone[1]).tolist())

    # ---- checkpoints ----

    @precondition(lambda self: self.cut is None)
    @rule(servers=st.integers(0, 3), limit=limits)
    def begin_cut(self, servers: int, limit: int) -> None:
        """Of what has changed since the last one, which was read; or of all, for so many servers
        that have nothing yet.
        """
        changed = bool(self.copies) and not servers
        if not changed:
            servers = max(servers, 1)
            self.copies = [self.made(server, servers) for server in range(servers)]
        self.moment = joined(scanned(self.table))
        self.expected, self.chunks = joined(scanned(self.table, limit, changed)), list[Chunk]()
        if changed:
            self.small(self.expected)
        self.cut = self.table.cut(changed)
        assert json.dumps(self.cut.metadata) == json.dumps(self.table.metadata())
        self.touched = set()

    def small(self, changes: Chunk) -> None:
        """Changes are of ids that some call has named; what has no row any more is said."""
        removed = set(changes["removed"].tolist())
        assert not removed & {*self.model.rows, *self.model.waiting}
        if ROW_RULES[self.rules[1].type].untouched == "stay":
            named = {*changes["ids"].tolist(), *changes.get("waiting.ids", np.empty(0)).tolist()}
            assert named <= self.touched

    @precondition(lambda self: self.cut is not None)
    @rule(count=st.sampled_from([1, 3, 100]), limit=limits)
    def read_cut(self, count: int, limit: int) -> None:
        """Some of its chunks; once it has ended, the copies are the table of its moment."""
        assert self.cut is not None
        for _ in range(count):
            chunk = self.cut.read(limit)
            if chunk is None:
                self.end_cut()
                return
            self.chunks.append(chunk)

    def end_cut(self) -> None:
        assert self.cut is not None and self.cut.bytes_kept == 0
        self.cut.close()
        if self.chunks:
            same(joined(self.chunks), self.expected)
        for copy in self.copies:
            copy.restore(json.loads(json.dumps(self.cut.metadata)))
            for chunk in self.chunks[::-1]:
                copy.load({name: column[::-1].copy() for name, column in chunk.items()})
        self.cut = None
        same(joined([chunk for copy in self.copies for chunk in scanned(copy)]), self.moment)

    @precondition(lambda self: self.cut is None)
    @rule()
    def restart(self) -> None:
        """Goes on from what was saved."""
        self.begin_cut(1, 1000)
        while self.cut is not None:
            self.read_cut(100, 1000)
        said = self.table.metadata()
        self.table, self.copies = self.copies[0], []
        assert self.table.metadata() == said

    # ---- what is held ----

    @invariant()
    def all_hold_the_same(self) -> None:
        model, whole = self.model, joined(scanned(self.table))
        # where rows come last is noted where they may have to go
        same(whole, joined(scanned(self.twin)), but="order")
        same(*(joined(scanned(each, materialized=True)) for each in self.pair), but="order")
        order = sorted(model.rows)
        assert whole["ids"].tolist() == order
        if self.exact:
            assert whole["values"][:, 0].tolist() == [model.rows[each].value for each in order]
        for name in {"pushed", "order", "pushes", "show", "click", "unseen"} & whole.keys():
            wanted = [getattr(model.rows[each], name) for each in order]
            assert whole[name].tolist() == wanted, name
        order = sorted(model.waiting)
        assert whole.get("waiting.ids", np.empty(0)).tolist() == order
        for name in ("pushed", "show", "click", "unseen"):
            if f"waiting.{name}" in whole:
                wanted = [getattr(model.waiting[each], name) for each in order]
                assert whole[f"waiting.{name}"].tolist() == wanted, name
        sizes = {"rows": len(model.rows), "waiting": len(model.waiting)}
        counters = self.table.counters()
        assert {name: counters[name] for name in (*sizes, *model.counts)} == sizes | model.counts
        assert self.table.step == model.step and len(self.table) == len(model.rows)
        said, twins = (each.metadata() for each in self.pair)
        assert all(said[name] == twins[name] for name in ("step", "history", "sweep", "swept"))
        # a row of a range may have missed all steps
        assert len(said["history"]) <= LONGEST or self.spans is not None
        if isinstance(self.table, TieredTable):
            assert counters["rows"] - counters["cold"] <= self.table.max_rows + 14


test_a_table_is_a_dictionary = TableMachine.TestCase
