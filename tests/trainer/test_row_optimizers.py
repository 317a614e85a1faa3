"""Optimizers of a table's own: what may be given, and what it becomes."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Any

import pytest
import torch

from trainer import row_optimizers
from trainer.row_optimizers import (
    BY_TYPE,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    DecayedAdagrad,
    Ftrl,
    LazyAdam,
    Momentum,
    RowOptimizer,
    RowwiseAdagrad,
    Segments,
    group_rule,
    row_optimizer,
)
from transpiler import Ftrl as DenseFtrl
from transpiler.ir.rules import ROW_RULES, Rule
from transpiler.optim.optim import DecayedAdagrad as DenseDecayedAdagrad


def test_every_rule_for_rows_has_an_optimizer() -> None:
    """Each rule has one class, whose attributes are the rule's hparams and flags, in their order
    and with their defaults.
    """
    assert set(BY_TYPE) == set(ROW_RULES)
    for kind, cls in BY_TYPE.items():
        rule, spec = cls().rule(), ROW_RULES[kind]

        assert rule == Rule(kind, spec.hparams, dict.fromkeys(spec.flags, False))
        assert [field.name for field in fields(cls)] == [*spec.hparams, *spec.flags]
        assert cls.__name__ in row_optimizers.__all__


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"type": "adagrad", "lr": 0.1}, Adagrad(lr=0.1)),
        ({"type": "rowwise_adagrad"}, RowwiseAdagrad()),
        (partial(torch.optim.Adagrad, lr=0.1), Adagrad(lr=0.1)),
        (torch.optim.SparseAdam, LazyAdam()),
        (partial(torch.optim.SGD, lr=0.5, weight_decay=0.1), SGD(lr=0.5, weight_decay=0.1)),
        (
            partial(torch.optim.SGD, lr=0.5, momentum=0.8, nesterov=True),
            Momentum(lr=0.5, momentum=0.8, nesterov=True),
        ),
        (partial(torch.optim.Adam, betas=(0.5, 0.6), foreach=False), Adam(betas=(0.5, 0.6))),
        (
            partial(torch.optim.Adam, weight_decay=0.1, decoupled_weight_decay=True),
            AdamW(weight_decay=0.1),
        ),
        (torch.optim.AdamW, AdamW()),
        (partial(DenseFtrl, l1=0.2), Ftrl(l1=0.2)),
        (partial(DenseDecayedAdagrad, decay=0.5), DecayedAdagrad(decay=0.5)),
        (SGD(lr=torch.tensor(0.25)), SGD(lr=0.25)),
    ],
)
def test_what_may_be_given_becomes_an_optimizer(given: Any, expected: RowOptimizer) -> None:
    """A mapping, a class of torch.optim, plain or partial, with torch's defaults: all say the same
    as the class here.
    """
    assert row_optimizer(given) == expected


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"type": "adamax"}, ValueError, "type: expected one of sgd, .*, got 'adamax'"),
        ({"lr": 0.1}, ValueError, "got None"),
        (
            {"type": "sgd", "momentum": 0.9},
            ValueError,
            "sgd has no 'momentum': it has lr, weight_decay, maximize",
        ),
        ({"type": "sgd", "lr": -1}, ValueError, "SGD: lr: expected 0 or more, got -1"),
        (partial(torch.optim.SGD, lr=-1.0), ValueError, "Invalid learning rate"),
        (torch.optim.RMSprop, ValueError, "RMSprop: rows are updated by one of"),
        (
            partial(torch.optim.Adam, amsgrad=True),
            ValueError,
            "amsgrad=True: rows have no such form",
        ),
        (torch.optim.LBFGS, ValueError, "LBFGS"),
        ("adagrad", TypeError, "optimizer: expected one of trainer.row_optimizers"),
        (torch.nn.Linear, TypeError, "optimizer: expected one of trainer.row_optimizers"),
    ],
)
def test_what_is_no_optimizer_of_rows_is_refused(
    given: Any, error: type[Exception], message: str
) -> None:
    """The error says what was expected, and of which rule."""
    with pytest.raises(error, match=message):
        row_optimizer(given)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Ftrl(lr=0.0), ValueError, "Ftrl: lr: expected a number above 0"),
        (lambda: Ftrl(lr_power=0.5), ValueError, "lr_power: expected 0 or less"),
        (
            lambda: Adam(betas=(0.9, 1.0)),
            ValueError,
            "betas: expected 0 or more and below 1",
        ),
        (lambda: DecayedAdagrad(decay=1.0), ValueError, "decay: expected 0 or more and below 1"),
        (lambda: Adam(betas=0.9), TypeError, "betas: expected two numbers"),
        (lambda: Adagrad(lr=float("nan")), ValueError, "lr: expected a finite number"),
        (lambda: Adagrad(lr="0.1"), TypeError, "lr: expected a number, got '0.1'"),
        (lambda: SGD(maximize=1), TypeError, "maximize: expected True or False, got 1"),
        (
            lambda: Momentum(nesterov=True, dampening=0.1).rule(),
            ValueError,
            "nesterov: expected a momentum above 0",
        ),
        (
            lambda: setattr(SGD(), "rate", 1.0),
            AttributeError,
            "SGD has no 'rate': it has lr, weight_decay, maximize",
        ),
        (lambda: Segments([]), ValueError, "expected at least one part"),
        (lambda: Segments([(0, SGD())]), ValueError, "columns: expected 1 or more"),
        (lambda: Segments([SGD()]), TypeError, "expected .columns, optimizer."),
        (
            lambda: Segments([(1, Segments([(1, SGD())]))]),
            TypeError,
            "expected an optimizer for 1 columns",
        ),
    ],
)
def test_numbers_out_of_range_are_refused(make: Any, error: type[Exception], message: str) -> None:
    """When they are given, and when they are set."""
    with pytest.raises(error, match=message):
        make()


def test_numbers_may_be_set() -> None:
    """An attribute that is set is in the rule from then on; one that makes no sense changes
    nothing.
    """
    optimizer = Adagrad(lr=0.1)
    optimizer.lr = 1
    with pytest.raises(ValueError, match="expected 0 or more"):
        optimizer.lr = -0.5

    assert optimizer.rule().hparams["lr"] == 1.0


def test_a_group_says_its_rule() -> None:
    """The rule of a parameter group has the group's present numbers, without what only says how
    torch computes it.
    """
    optimizer = torch.optim.Adam(
        [torch.zeros(1, requires_grad=True)], lr=0.1, fused=True, maximize=True
    )
    optimizer.param_groups[0]["lr"] = 0.05

    rule = group_rule(optimizer, optimizer.param_groups[0], "table 'a'")

    assert rule == Adam(lr=0.05, maximize=True).rule()
    with pytest.raises(ValueError, match="table 'a': .*give the table an optimizer of its own"):
        group_rule(torch.optim.RMSprop([torch.zeros(1)]), {"lr": 0.1, "momentum": 0}, "table 'a'")
