"""Rows of 16 bits against torch's own numbers, and against the same table in float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pserver.table.rows import NEAREST, round_rows, round_to, seed_word
from pserver.table.table import SparseTable
from pserver.table.tiered import open_table
from transpiler.ir.rules import ROW_RULES, Rule
from transpiler.ir.tables import HALVES, Constant, Segment, ShowClickEntry, Table, Uniform

SGD = Rule("sgd", {"lr": 0.1})
DIM = 6
IDS = np.arange(-20, 20)


def made(dtype: str, rule: Rule = SGD, server: int = 0, servers: int = 1, **more: Any) -> Any:
    table = Table(
        "t", DIM, (Segment(0, DIM, 0),), dtype=dtype, **{"initial": Uniform(-1, 1), **more}
    )
    return open_table(table, [rule], server, servers)


def read(table: SparseTable, ids: np.ndarray = IDS) -> np.ndarray:
    out = np.empty((len(ids), DIM), np.float32)
    table.lookup(ids, out)
    return out


def train(table: SparseTable, steps: int = 30) -> None:
    """Some of the rows at each step."""
    draw = np.random.default_rng(0)
    for _ in range(steps):
        ids = np.sort(draw.choice(IDS, 12, replace=False))
        table.update(ids, draw.normal(size=(12, DIM)).astype(np.float32), [{}])


def every_float() -> np.ndarray:
    """Numbers of all sizes, ties, the largest and the least, and none."""
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, np.uint32).view(np.float32)
    small = np.random.default_rng(1).normal(size=100_000).astype(np.float32) * 1e-5
    ties = (np.arange(0, 65536, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    halves = np.arange(0, 65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    between = (halves[1:31000] + halves[:30999]) / 2
    odd = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.9, 65520, 1e-8], np.float32)
    return np.concatenate([bits, small, ties, halves, between, odd])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_rounding_to_the_nearest_is_torchs(dtype: str) -> None:
    """Every kind of number, there and back."""
    values = every_float()
    expected = torch.from_numpy(values).to(getattr(torch, dtype)).float().numpy()

    found = values.reshape(-1, 1).copy()
    round_to(found, 1, HALVES.index(dtype))

    assert np.array_equal(found[:, 0], expected, equal_nan=True)
    numbers = ~np.isnan(expected)
    assert np.array_equal(np.signbit(found[numbers, 0]), np.signbit(expected[numbers]))


@pytest.mark.parametrize("dtype", HALVES)
def test_a_half_stays_what_it_is(dtype: str) -> None:
    """Rounding at random moves nothing that needs no rounding."""
    values = np.random.default_rng(0).normal(size=(500, DIM)).astype(np.float32)
    round_to(values, DIM, HALVES.index(dtype))
    halves, every = np.zeros((500, DIM), np.uint16), np.arange(500)

    def rounded(step: int) -> bytes:
        bits = values.view(np.uint32)
        kind = HALVES.index(dtype)
        round_rows(values, bits, DIM, every, seed_word(0), step, kind, halves, every)
        return halves.tobytes()

    assert len({rounded(step) for step in (NEAREST, 1, 2, 3)}) == 1


@pytest.mark.parametrize("dtype", HALVES)
def test_small_steps_add_up(dtype: str) -> None:
    """A thousand steps of 1/10000 each, which is less than half of what is between two numbers of
    16 bits at 1: the mean over rows has moved by 0.1.
    """
    table, ids = made(dtype, Rule("sgd", {"lr": 1e-4}), initial=Constant(1.0)), np.arange(2000)

    for _ in range(1000):
        table.update(ids, np.ones((2000, DIM), np.float32), [{}])

    assert read(table, ids).mean() == pytest.approx(0.9, abs=2e-3)


@pytest.mark.parametrize("rule", sorted(ROW_RULES))
@pytest.mark.parametrize("dtype", HALVES)
def test_every_rule_learns_what_it_does_in_float32(dtype: str, rule: str) -> None:
    """As near as the numbers are; states are float32."""
    given = Rule(rule, {"lr": 0.01})
    whole, half = made("float32", given), made(dtype, given)

    for table in (whole, half):
        train(table)

    unit = {"bfloat16": 2.0**-7, "float16": 2.0**-10}[dtype]
    apart = np.abs(read(half) - read(whole))
    assert apart.max() < 30 * unit and np.sqrt((apart**2).mean()) < 4 * unit


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rule", ["adagrad", "adamw"])
def test_servers_that_take_the_same_steps_hold_the_same_bits(dtype: str, rule: str) -> None:
    """One that holds all rows, and one that holds half of them; and after a save and a load."""
    given = Rule(rule, {"lr": 0.01})
    alone, first = made(dtype, given, rows=None), made(dtype, given, 0, 2, rows=None)
    for table in (alone, first):
        train(table)
    again = made(dtype, given, rows=None)
    again.load(alone.scan(0, 1000)[0])
    again.restore(alone.metadata())

    for table in (alone, first, again):
        table.update(IDS, np.ones((len(IDS), DIM), np.float32), [{}])

    assert np.array_equal(read(first), read(alone))
    assert np.array_equal(read(again), read(alone))


@pytest.mark.parametrize("dtype", HALVES)
def test_what_is_read_can_be_held(dtype: str) -> None:
    """Rows without a push, with one, and those that have steps to catch up with."""
    table = made(dtype, Rule("momentum", {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}))
    train(table, 7)

    found = read(table)

    held = torch.from_numpy(found).to(getattr(torch, dtype)).float().numpy()
    assert np.array_equal(found, held)


def test_a_row_takes_half_of_the_memory() -> None:
    """64 values under row-wise AdaGrad, whose state is one number."""

    def row(dtype: str) -> int:
        table = Table("t", 64, (Segment(0, 64, 0),), dtype=dtype)
        made_of = SparseTable(table, [SGD])
        return made_of.row_bytes - 40

    assert (row("float32"), row("bfloat16"), row("float16")) == (256, 128, 128)


@pytest.mark.parametrize(
    "more", [{"memory_bytes": 3000}, {"entry": ShowClickEntry("show", "click"), "ttl": 1e9}]
)
def test_rows_live_as_others_do(more: dict[str, Any]) -> None:
    """On disk, and with an entry rule and a time to live: the words of records are their own."""
    plain = made("bfloat16", Rule("adagrad", {"lr": 0.01}))
    table = made("bfloat16", Rule("adagrad", {"lr": 0.01}), **more)

    for each in (plain, table):
        train(each)

    seen = read(table)
    admitted = ~np.all(seen == read(made("bfloat16")), axis=1)
    assert admitted.any() and np.array_equal(seen[admitted], read(plain)[admitted])


def test_values_are_set_to_the_nearest() -> None:
    """What is assigned, and what is added, in float32."""
    table, ids = made("bfloat16", initial=Constant(0.0)), np.arange(3)
    values = np.full((3, DIM), 1 + 2.0**-9, np.float32)

    table.assign(ids, values)
    table.add(ids, np.full((3, DIM), 0.5, np.float32))

    assert (read(table, ids) == 1.5).all()
