"""The lookups that a server keeps: what it sent, and what has changed since."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from pserver.lane.tables import LockedTable
from pserver.service.tables import _bits
from pserver.table.gradient import RowGradient
from pserver.table.kept_lookups import KeptLookups, SentRows
from transpiler.distribute import plan_parameters
from transpiler.ir.rules import Rule
from transpiler.ir.tables import CountFilterEntry, Segment, Table, Uniform

DIM = 3


def sent(*rows: float, dtype: Any = np.float32) -> SentRows:
    return SentRows(np.arange(len(rows)), np.array([rows], dtype).T)


def column(*rows: float) -> np.ndarray:
    return np.array([rows], np.float32).T


# ---- what has changed ----


def test_a_refresh_has_the_rows_that_differ_and_keeps_them() -> None:
    """Each change is sent once."""
    kept = sent(1, 2, 3)
    places, rows = kept.refresh(column(1, 5, 6))
    assert (places.tolist(), rows.tolist()) == ([1, 2], [[5], [6]])
    assert kept.refresh(column(1, 5, 6))[0].tolist() == []
    assert kept.refresh(column(1, 2, 6))[0].tolist() == [1]


def test_rows_are_compared_by_their_bits() -> None:
    """A zero of another sign is another row, and a NaN is equal to itself."""
    kept = sent(0.0, np.nan)
    assert kept.refresh(column(-0.0, np.nan))[0].tolist() == [0]


@pytest.mark.parametrize("dim", [1, 2, 3, 4, 5, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_rows_of_every_width(dim: int, dtype: torch.dtype) -> None:
    """The last bit of the last number of a row counts."""
    before = torch.randn(9, dim).to(dtype)
    after = before.clone()
    _bits(after)[4, -1] ^= 128
    kept = SentRows(np.arange(9), _bits(before))
    places, rows = kept.refresh(_bits(after))
    assert places.tolist() == [4]
    assert torch.equal(
        torch.from_numpy(rows).view(dtype).view(torch.uint8), after[4:5].view(torch.uint8)
    )


# ---- what is kept ----


def test_the_oldest_lookups_go_where_there_are_too_many() -> None:
    """By number and by bytes; a number that comes again takes the place of its own."""
    kept = KeptLookups(most=2, most_bytes=1000)
    for number in (1, 2, 2, 3):
        kept.keep(number, {"t": sent(1, 2)})
    assert [bool(kept.find(number)) for number in (1, 2, 3)] == [False, True, True]
    assert kept.bytes_held == 2 * (2 * 8 + 2 * 4)
    kept.keep(4, {"t": sent(*range(83))})
    assert [bool(kept.find(number)) for number in (2, 3, 4)] == [False, False, True]


def test_a_lookup_that_is_too_large_is_not_kept() -> None:
    """Nothing is kept then, and nothing is counted."""
    kept = KeptLookups(most_bytes=100)
    kept.keep(1, {"t": sent(*range(80))})
    assert not kept.find(1) and kept.bytes_held == 0


# ---- a table between lookup and refresh ----


class Machine(RuleBasedStateMachine):
    """A trainer that has what was sent, and the refreshes of it, has what a lookup gives: after
    steps, evictions, loads, decays, and when rows outlive their time.
    """

    @initialize(
        name=st.sampled_from(["adagrad", "adam", "sgd"]),
        options=st.sampled_from(
            [
                {},
                {"ttl": 5.0},
                {"capacity": 4},
                {"entry": CountFilterEntry(2)},
                {"dtype": "bfloat16"},
            ]
        ),
    )
    def begin(self, name: str, options: dict[str, Any]) -> None:
        self.now = 100.0
        rules = {
            "adagrad": Rule("adagrad", {"lr": 0.1}),
            "adam": Rule("adam", {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8}),
            "sgd": Rule("sgd", {"lr": 0.1, "weight_decay": 0.01}),
        }
        table = Table("t", DIM, (Segment(0, DIM, 0),), initial=Uniform(-1.0, 1.0), **options)
        plan = plan_parameters([], [rules[name]], trainers=1, servers=1, tables=[table])
        self.table = LockedTable(plan.tables[0], plan, 0, clock=lambda: self.now)
        self.hparams = dict(rules[name].hparams)
        self.kept: SentRows | None = None
        self.copy = torch.empty(0, DIM)

    def _now(self, ids: np.ndarray) -> torch.Tensor:
        return self.table.lookup(torch.from_numpy(ids), 0)

    @rule(ids=st.lists(st.integers(0, 9), unique=True, max_size=6))
    def look_up(self, ids: list[int]) -> None:
        asked = np.array(ids, np.int64)
        self.copy = self._now(asked).clone()
        self.kept = SentRows(asked, _bits(self._now(asked)))

    @rule(ids=st.lists(st.integers(0, 9), unique=True, max_size=6), value=st.integers(-2, 2))
    def step(self, ids: list[int], value: int) -> None:
        rows = torch.full((len(ids), DIM), float(value))
        gradient = RowGradient(torch.tensor(ids, dtype=torch.int64), rows)
        self.table.update(gradient, {0: self.hparams}, {})

    @rule(ids=st.lists(st.integers(0, 9), unique=True, min_size=1, max_size=3))
    def load(self, ids: list[int]) -> None:
        chunk = {"ids": np.array(ids, np.int64), "values": np.ones((len(ids), DIM), np.float32)}
        self.table.load(chunk)

    @rule(seconds=st.floats(0.0, 4.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def drop(self) -> None:
        self.table.shrink(1.0, None, self.now)

    @rule()
    def refresh(self) -> None:
        if self.kept is None:
            return
        now = self._now(self.kept.ids)
        places, rows = self.kept.refresh(_bits(now))
        if len(places):
            self.copy[torch.from_numpy(places)] = torch.from_numpy(rows).view(now.dtype)
        assert torch.equal(self.copy.view(torch.uint8), now.view(torch.uint8))


TestTable = Machine.TestCase
TestTable.settings = settings(deadline=None)
