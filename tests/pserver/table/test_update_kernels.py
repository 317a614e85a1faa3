"""Promises about the rules of rows: each is torch's own, on the rows that a step touches and on
those that it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from pserver.table import updater
from pserver.table.deferred_updates import DEFERRED_UPDATES
from pserver.table.sparse_table import SparseTable
from pserver.table.update_kernels import ROW_UPDATES
from trainer import row_optimizers
from transpiler.ir.rules import ROW_RULES, Rule
from transpiler.ir.tables import Normal, Segment, Table
from transpiler.optim.decayed_adagrad import DecayedAdagrad
from transpiler.optim.ftrl import Ftrl

ROWS, DIM, STEPS = 24, 5, 40
TOLERANCE = {"float32": 1e-6, "float64": 1e-12}
Optimizer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


class RowwiseAdagrad(torch.optim.Optimizer):
    """The formula of FBGEMM's EXACT_ROWWISE_ADAGRAD, over rows that have a gradient."""

    def __init__(self, params: Any, **hparams: Any) -> None:
        super().__init__(params, hparams)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                touched = weight.grad.coalesce().indices()[0]
                gradient = weight.grad.coalesce().values() + group["weight_decay"] * weight[touched]
                start = torch.full(
                    weight.shape[:1], group["initial_accumulator_value"], dtype=weight.dtype
                )
                sums = self.state[weight].setdefault("sum", start)
                sums[touched] += gradient.pow(2).mean(1)
                weight[touched] -= (
                    group["lr"] * gradient / (sums[touched].sqrt() + group["eps"])[:, None]
                )


class EachRow:
    """An optimizer of a dense class over every row as a parameter of its own, so that a step is
    one of the rows that have a gradient.
    """

    def __init__(self, cls: Any, weight: torch.Tensor, **hparams: Any) -> None:
        self._weight, self._rows = weight, weight.unbind(0)  # views
        self._optimizer = cls(list(self._rows), **hparams)
        self.param_groups = self._optimizer.param_groups

    def step(self) -> None:
        assert self._weight.grad is not None
        gradient = self._weight.grad.coalesce()
        for at, values in zip(gradient.indices()[0].tolist(), gradient.values(), strict=True):
            self._rows[at].grad = values
        self._optimizer.step()
        self._optimizer.zero_grad()


def decayed_adagrad(params: list[torch.Tensor], **hparams: Any) -> EachRow:
    return EachRow(DecayedAdagrad, *params, **hparams)


CLASSES: Mapping[str, tuple[Any, bool]] = {  # and whether it takes sparse gradients
    "sgd": (torch.optim.SGD, False),
    "momentum": (torch.optim.SGD, False),
    "adagrad": (torch.optim.Adagrad, False),
    "rowwise_adagrad": (RowwiseAdagrad, True),
    "adam": (torch.optim.Adam, False),
    "adamw": (torch.optim.AdamW, False),
    "lazy_adam": (torch.optim.SparseAdam, True),
    "ftrl": (Ftrl, False),
    "decayed_adagrad": (decayed_adagrad, True),
}
RULES = {
    "sgd": Rule("sgd", {"lr": 0.1}),
    "sgd, decay": Rule("sgd", {"lr": 0.1, "weight_decay": 0.01}),
    "sgd, maximize": Rule("sgd", {"lr": 0.1, "weight_decay": 0.01}, {"maximize": True}),
    "momentum": Rule("momentum", {"lr": 0.05, "momentum": 0.9}),
    "momentum, dampening": Rule(
        "momentum", {"lr": 0.05, "momentum": 0.8, "dampening": 0.3}, {"maximize": True}
    ),
    "momentum, nesterov": Rule(
        "momentum", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.02}, {"nesterov": True}
    ),
    "momentum, decay": Rule("momentum", {"lr": 0.05, "momentum": 0.7, "weight_decay": 0.05}),
    "adagrad": Rule("adagrad", {"lr": 0.1}),
    "adagrad, all": Rule(
        "adagrad",
        {
            "lr": 0.1,
            "lr_decay": 0.01,
            "weight_decay": 0.02,
            "initial_accumulator_value": 0.5,
            "eps": 1e-6,
        },
        {"maximize": True},
    ),
    "rowwise": Rule(
        "rowwise_adagrad",
        {"lr": 0.1, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-8},
    ),
    "rowwise, all": Rule(
        "rowwise_adagrad",
        {"lr": 0.1, "weight_decay": 0.02, "initial_accumulator_value": 0.3, "eps": 1e-8},
    ),
    "adam": Rule("adam", {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8}),
    "adam, decay": Rule(
        "adam",
        {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1},
        {"maximize": True},
    ),
    "adamw": Rule("adamw", {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}),
    "lazy_adam": Rule("lazy_adam", {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8}),
    "lazy_adam, maximize": Rule(
        "lazy_adam", {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-5}, {"maximize": True}
    ),
    "ftrl": Rule("ftrl", {"lr": 0.1, "l1": 0.05, "l2": 0.1, "lr_power": -0.5, "beta": 0.2}),
    "ftrl, power": Rule("ftrl", {"lr": 0.2, "l1": 0.01, "l2": 0.0, "lr_power": -0.4, "beta": 1.0}),
    "decayed_adagrad": Rule("decayed_adagrad", {"lr": 0.1, "decay": 0.9, "eps": 1e-6}),
}
# what a schedule multiplies with
MOVED = {
    "lr": 0.5,
    "weight_decay": 1.5,
    "eps": 2.0,
    "l1": 1.5,
    "beta": 2.0,
    "momentum": 0.9,
    "decay": 0.9,
}


def table_of(rules: Mapping[tuple[int, int], Rule], dtype: str, **metadata: Any) -> SparseTable:
    segments = tuple(Segment(begin, end, at) for at, (begin, end) in enumerate(rules))
    metadata = {"rows": ROWS, "initial": Normal(0, 0.5), **metadata}
    return SparseTable(
        Table("t", segments[-1].end, segments, dtype, **metadata), list(rules.values())
    )


def values_of(table: SparseTable, ids: np.ndarray | None = None) -> np.ndarray:
    ids = np.arange(ROWS) if ids is None else ids
    out = np.empty((len(ids), table.table.dim), table.table.dtype)
    table.lookup(ids, out)
    return out


def gradients(
    dim: int, dtype: str, steps: int, seed: int = 5
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Some rows of each step; the last is touched once, early, the one before never; and a step
    that touches none.
    """
    random = np.random.default_rng(seed)
    for step in range(steps):
        count = 0 if step == 7 else random.integers(1, 8)
        ids = random.permutation(ROWS - 2)[:count]
        ids = np.append(ids, ROWS - 1) if step == 3 else ids
        yield ids.astype(np.int64), random.normal(size=(len(ids), dim)).astype(dtype)


def optimizer_of(rule: Rule, weight: torch.Tensor) -> torch.optim.Optimizer:
    kind, _ = CLASSES[rule.type]
    return kind([weight], **rule.hparams, **rule.flags)


def give(weight: torch.Tensor, rule: Rule, ids: np.ndarray, rows: np.ndarray) -> None:
    places, values = torch.from_numpy(ids), torch.from_numpy(rows.copy())
    if CLASSES[rule.type][1]:
        weight.grad = torch.sparse_coo_tensor(
            places[None], values, weight.shape, check_invariants=False
        )
    else:
        weight.grad = torch.zeros_like(weight).index_copy_(0, places, values)


def trained(rule: Rule, dtype: str, moved: bool = False, check: bool = True) -> np.ndarray:
    """What torch's optimizer makes of the table, which must be what the table makes of itself."""
    table = table_of({(0, DIM): rule}, dtype)
    weight = torch.from_numpy(values_of(table))
    optimizer = optimizer_of(rule, weight)
    for step, (ids, rows) in enumerate(gradients(DIM, dtype, STEPS)):
        if moved and step in (6, 20, 21, 22):
            for name, value in rule.hparams.items():
                optimizer.param_groups[0][name] = (
                    value * MOVED[name] if name in MOVED and step != 22 else value
                )
        give(weight, rule, ids, rows)
        optimizer.step()
        hparams = {name: optimizer.param_groups[0][name] for name in rule.hparams}
        table.update(ids, rows, [hparams])
        if check and step % 13 == 0:
            np.testing.assert_allclose(
                values_of(table), weight.numpy(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
            )
    if check:
        np.testing.assert_allclose(
            values_of(table), weight.numpy(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
        )
    return weight.numpy()


@pytest.mark.parametrize("kind", ROW_RULES)
def test_every_rule_is_complete(kind: str):
    """Each rule of the table has a kernel, a deferred kernel exactly if it moves untouched rows, a
    class for users, and a test here.
    """
    assert kind in ROW_UPDATES, "expected a kernel in update_kernels.py"
    assert (kind in DEFERRED_UPDATES) == (ROW_RULES[kind].untouched != "stay")
    assert kind in row_optimizers.BY_TYPE, "expected a class in trainer/row_optimizers.py"
    assert kind in CLASSES and kind in {rule.type for rule in RULES.values()}, "expected a test"


def test_nothing_belongs_to_a_rule_that_is_not_in_the_table():
    """Kernels, classes and tests are of rules that a plan may name."""
    for names in (ROW_UPDATES, DEFERRED_UPDATES, row_optimizers.BY_TYPE, CLASSES):
        assert set(names) <= set(ROW_RULES)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", RULES)
def test_a_table_is_what_torch_makes_of_the_whole_parameter(name: str, dtype: str):
    """All rows, touched or not, equal those of torch's optimizer over the whole of it: with and
    without a schedule that moves every number, after steps that touch none, for a row that was
    touched once, and for one that never was.
    """
    plain = trained(RULES[name], dtype)
    moved = trained(RULES[name], dtype, moved=True)
    assert not np.allclose(plain, moved, rtol=1e-3)


def test_no_other_rule_fits():
    """The rules differ by far more than the tolerance, pairwise, so what equals one of them is that
    one.
    """
    results = {name: trained(rule, "float64", check=False) for name, rule in RULES.items()}
    for one in results:
        for other in results:
            assert one == other or np.abs(results[one] - results[other]).max() > 1e-3, (one, other)


def test_segments_of_a_row_have_rules_of_their_own():
    """Columns by Ftrl, Adagrad, momentum and row-wise Adagrad in one row: each as torch has it for
    those columns alone, and the steps of one segment's schedule are not another's.
    """
    parts = {
        (0, 1): RULES["ftrl"],
        (1, 4): RULES["adagrad"],
        (4, 6): RULES["momentum, decay"],
        (6, 9): RULES["rowwise, all"],
    }
    parts[(9, 12)] = RULES["adagrad, all"]
    table = table_of(parts, "float64")
    start = torch.from_numpy(values_of(table))
    weights = [start[:, begin:end].clone() for begin, end in parts]
    optimizers = [
        optimizer_of(rule, weight) for rule, weight in zip(parts.values(), weights, strict=True)
    ]
    for step, (ids, rows) in enumerate(gradients(12, "float64", STEPS)):
        optimizers[2].param_groups[0]["lr"] = 0.05 / (1 + step)
        for (begin, end), rule, weight, optimizer in zip(
            parts, parts.values(), weights, optimizers, strict=True
        ):
            give(weight, rule, ids, np.ascontiguousarray(rows[:, begin:end]))
            optimizer.step()
        table.update(
            ids, rows, [{"lr": optimizer.param_groups[0]["lr"]} for optimizer in optimizers]
        )
    np.testing.assert_allclose(
        values_of(table), torch.cat(weights, 1).numpy(), rtol=1e-12, atol=1e-12
    )


LONG = {
    "adam": {"weight_decay": 0.0},
    "adamw": {"weight_decay": 0.01},
    "momentum": {"weight_decay": 0.0, "momentum": 0.9},
    "sgd": {"weight_decay": 0.001},
}


@pytest.mark.slow
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


def test_numbers_that_a_rule_does_not_have_are_refused():
    """A typing error in a step's numbers names the rule, and changes nothing; so does an unknown
    rule.
    """
    table = table_of({(0, DIM): RULES["adagrad"]}, "float32")
    ids, rows = np.arange(2), np.ones((2, DIM), np.float32)
    with pytest.raises(
        ValueError, match="table 't': rule adagrad: expected hparams among lr, .*, got momentum"
    ):
        table.update(ids, rows, [{"momentum": 0.9}])
    with pytest.raises(ValueError, match="expected hparams for each of 1 segments, got 2"):
        table.update(ids, rows, [{}, {}])
    assert len(table) == 0 and table.step == 0
    with pytest.raises(ValueError, match="expected a rule among sgd, .*, got 'rprop'"):
        table_of({(0, DIM): Rule("rprop", {})}, "float32")
    with pytest.raises(ValueError, match="expected a rule for each of 1 segments, got 0"):
        SparseTable(table.table, [])
