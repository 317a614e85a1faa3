"""Promises about rows that have missed steps: what is made up for when they are read, what is kept
for it, and what a save holds of it.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from pserver.table import updater
from pserver.table.counts import joint
from pserver.table.deferred import HparamHistory, adam_factors
from tests.support.row_rules import (
    DIM,
    ROWS,
    RULES,
    STEPS,
    TOLERANCE,
    give,
    gradients,
    optimizer_of,
    table_of,
    values_of,
)
from transpiler.ir.rules import Rule

LONG = {
    "adam": {"weight_decay": 0.0},
    "adamw": {"weight_decay": 0.01},
    "momentum": {"weight_decay": 0.0, "momentum": 0.9},
    "sgd": {"weight_decay": 0.001},
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("name", LONG)
def test_thousands_of_missed_steps_are_made_up_for(name: str, scheduled: bool, dtype: str):
    """Rows that were pushed to and then not for 1400 steps read as torch's, also where every step
    has a rate of its own.
    """
    rule = Rule(name, {"lr": 0.01, **LONG[name]})
    table = table_of({(0, DIM): rule}, dtype)
    weight = torch.from_numpy(values_of(table))
    optimizer = optimizer_of(rule, weight)
    random = np.random.default_rng(1)
    for step in range(1400):
        ids = np.arange(ROWS // 2) if step < 5 else np.arange(0)
        rows = random.normal(size=(len(ids), DIM)).astype(dtype)
        rate = 0.01 * (1 + 0.5 * np.cos(step / 100)) if scheduled else 0.01
        optimizer.param_groups[0]["lr"] = rate
        give(weight, rule, ids, rows)
        optimizer.step()
        table.update(ids, rows, [{"lr": rate}])
    tolerance = TOLERANCE[dtype]
    np.testing.assert_allclose(values_of(table), weight.numpy(), rtol=tolerance, atol=tolerance)
    rows = random.normal(size=(ROWS, DIM)).astype(dtype)
    give(weight, rule, np.arange(ROWS), rows)
    optimizer.step()
    table.update(np.arange(ROWS), rows, [{}])
    np.testing.assert_allclose(values_of(table), weight.numpy(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rests", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), ("float64", 1e-11)])
def test_a_velocity_that_moves_nothing_fades_as_torchs(dtype: str, tolerance: float, rests: bool):
    """Over more than a thousand steps with momenta of their own; a step without a momentum leaves
    it as it is.
    """
    rule = Rule("momentum", {"lr": 1e-20, "momentum": 0.999})
    table = table_of({(0, DIM): rule}, dtype)
    weight = torch.from_numpy(values_of(table))
    optimizer = optimizer_of(rule, weight)
    random = np.random.default_rng(1)
    for step in range(1500):
        ids = np.arange(ROWS) if step < 3 else np.arange(0)
        rows = random.normal(size=(len(ids), DIM)).astype(dtype)
        momentum = 0.0 if rests and step in (700, 701) else 0.999 + 0.0005 * np.cos(step)
        optimizer.param_groups[0]["momentum"] = momentum
        give(weight, rule, ids, rows)
        optimizer.step()
        table.update(ids, rows, [{"momentum": momentum}])
    table.update(np.arange(ROWS), np.zeros((ROWS, DIM), dtype), [{"momentum": 0.0}])
    chunk, _ = table.scan(0, ROWS)
    order = np.argsort(chunk["ids"])
    velocity = optimizer.state[weight]["momentum_buffer"].numpy()

    np.testing.assert_allclose(chunk["state.momentum_buffer"][order], velocity, rtol=tolerance)
    assert np.abs(velocity).max() > 0.1


@pytest.mark.parametrize("name", ["adam", "momentum", "ftrl", "adagrad, all"])
def test_a_history_ends(name: str, monkeypatch: pytest.MonkeyPatch):
    """Where every step has numbers of its own, those that no row needs any more are forgotten, and
    rows stay torch's; where weights decay and rows may have missed everything, nothing is
    forgotten.  What is forgotten is not needed from a save.
    """
    monkeypatch.setattr(updater, "KEPT", 12)
    monkeypatch.setattr(updater, "PERIOD", 6)
    rule = RULES[name]
    table, saved = table_of({(0, DIM): rule}, "float64"), table_of({(0, DIM): rule}, "float64")
    weight = torch.from_numpy(values_of(table))
    optimizer = optimizer_of(rule, weight)
    for step, (ids, rows) in enumerate(gradients(DIM, "float64", 120)):
        optimizer.param_groups[0]["lr"] = rule.hparams["lr"] * (1 + 1 / (step + 1))
        give(weight, rule, ids, rows)
        optimizer.step()
        table.update(ids, rows, [{"lr": optimizer.param_groups[0]["lr"]}])
        if step in (40, 100):
            saved.load(table.scan(0, 1000, changed_since_save=step > 40)[0])
            saved.restore(table.metadata())
            table.mark_saved()
            np.testing.assert_allclose(values_of(saved), weight.numpy(), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(values_of(table), weight.numpy(), rtol=1e-12, atol=1e-12)
    assert (
        len(table.metadata()["history"]) == 120
        if name == "adagrad, all"
        else len(table.metadata()["history"]) < 40
    )


def test_a_schedule_may_begin_to_decay_weights():
    """Rows that did not have to know which steps they have seen do so from then on; what they held
    stays.
    """
    rule = Rule("adagrad", {"lr": 0.1, "weight_decay": 0.0})
    table = table_of({(0, DIM): rule}, "float64")
    weight = torch.from_numpy(values_of(table))
    optimizer = optimizer_of(rule, weight)
    for step, (ids, rows) in enumerate(gradients(DIM, "float64", STEPS)):
        optimizer.param_groups[0]["weight_decay"] = 0.1 if step >= 20 else 0.0
        give(weight, rule, ids, rows)
        optimizer.step()
        table.update(ids, rows, [{"weight_decay": 0.1 if step >= 20 else 0.0}])
    np.testing.assert_allclose(values_of(table), weight.numpy(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "name",
    [
        "adam, decay",
        "adamw",
        "momentum, dampening",
        "adagrad, all",
        "lazy_adam",
        "ftrl",
        "sgd, decay",
    ],
)
def test_a_table_that_was_saved_goes_on_to_the_bit(name: str):
    """Whole records and metadata in a new table: the same steps then give the same bits, and
    reading in between changes nothing.
    """
    steps = list(gradients(DIM, "float32", STEPS))
    table = table_of({(0, DIM): RULES[name]}, "float32")
    for ids, rows in steps[:20]:
        table.update(ids, rows.copy(), [{}])
        values_of(table)
    other = table_of({(0, DIM): RULES[name]}, "float32")
    cursor = 0
    while cursor >= 0:
        chunk, cursor = table.scan(cursor, 5)
        materialized, _ = table.scan(0, 1000, materialized=True)
        other.load(chunk)
    other.restore(table.metadata())
    assert np.array_equal(materialized["values"], values_of(table, materialized["ids"]))
    for one in (table, other):
        for ids, rows in steps[20:]:
            one.update(ids, rows.copy(), [{"lr": 0.02}])
    assert np.array_equal(values_of(table), values_of(other))
    assert table.metadata() == other.metadata() | {"counts": table.metadata()["counts"]}


def test_where_ids_may_be_anything_a_row_begins_when_it_is_made():
    """Without a range there is no parameter that decays as a whole: an id that nobody pushed to
    reads its initial value.
    """
    table = table_of({(0, DIM): RULES["adamw"]}, "float64", rows=None)
    start = values_of(table)
    for ids, rows in gradients(DIM, "float64", STEPS):
        table.update(ids, rows, [{}])
    assert np.array_equal(values_of(table)[-2], start[-2])
    ids, rows = np.array([ROWS - 2]), np.ones((1, DIM))
    table.update(ids, rows, [{}])
    assert np.abs(values_of(table)[-2] - start[-2]).max() < 0.1


def test_an_older_checkpoint_begins_the_turn_anew():
    """Its metadata names a slot, which holds another row by now; and so does that of a table whose
    servers differ in whose turn it is.
    """
    table = table_of({(0, DIM): RULES["momentum"]}, "float32")
    for ids, rows in gradients(DIM, "float32", 5):
        table.update(ids, rows, [{}])
    said = table.metadata()
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
