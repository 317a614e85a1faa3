"""Promises about the rules of rows: each is torch's own, on the rows that a step touches and on
those that it does not.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pserver.table.deferred import DEFERRED_UPDATES
from pserver.table.rules import ROW_UPDATES
from pserver.table.table import SparseTable
from tests.support.row_rules import (
    CLASSES,
    DIM,
    RULES,
    STEPS,
    TOLERANCE,
    give,
    gradients,
    optimizer_of,
    table_of,
    values_of,
)
from trainer import row_optimizers
from transpiler.ir.rules import ROW_RULES, Rule

# what a schedule multiplies with
MOVED = {
    "lr": 0.5,
    "weight_decay": 1.5,
    "eps": 2.0,
    "l1": 1.5,
    "beta": 2.0,
    "momentum": 0.9,
    "decay": 0.9,
    "alpha": 0.9,
}


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
    assert kind in ROW_UPDATES, "expected a kernel of this rule"
    assert (kind in DEFERRED_UPDATES) == (ROW_RULES[kind].untouched != "stay")
    assert kind in row_optimizers.BY_TYPE, "expected a class in trainer/row_optimizers.py"
    assert kind in CLASSES and kind in {rule.type for rule in RULES.values()}, "expected a test"


def test_nothing_belongs_to_a_rule_that_is_not_in_the_table():
    """Kernels, classes and tests are of rules that a plan may name."""
    for names in (ROW_UPDATES, DEFERRED_UPDATES, row_optimizers.BY_TYPE, CLASSES):
        assert set(names) <= set(ROW_RULES)


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


@pytest.mark.parametrize("name", RULES)
def test_a_kernel_leaves_rows_alone_whose_ids_have_none(name: str):
    """Place -1 is no row: not the last one, as numpy has it."""
    updater = table_of({(0, DIM): RULES[name]}, "float64")._updater
    records = np.full((4, updater._rows.layout.columns), 0.5)
    updater.step = 1
    hparams = updater.hparams([RULES[name].hparams])
    updater._update(records, np.array([1, -1]), np.ones((2, DIM)), hparams)
    assert (records[1] != 0.5).any()
    assert (records[[0, 2, 3]] == 0.5).all()


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
