"""The rule of an optimizer: its numbers, its flags, and the optimizers that have none."""

from typing import Any

import pytest
import torch
from torch import optim

from transpiler.ir.rules import RULES, Rule, hparams_of, make, rule_of, set_hparams
from transpiler.optim.optim import LAMB, LARS, AdamD2Sum, DecayedAdagrad, Ftrl


def test_flags_left_to_torch_stay_left_to_torch() -> None:
    """foreach and fused are in a rule only where the user set them; fused runs only where it was
    asked for.
    """
    parameter = torch.zeros(2)
    plain = optim.Adam([parameter])
    assert not {"foreach", "fused"} & set(rule_of(plain, plain.param_groups[0]).flags)
    assert make(rule_of(plain, plain.param_groups[0]), [parameter]).param_groups[0]["fused"] is None
    chosen = optim.Adam([parameter], fused=True)
    assert rule_of(chosen, chosen.param_groups[0]).flags["fused"] is True
    assert (
        make(rule_of(chosen, chosen.param_groups[0]), [parameter]).param_groups[0]["fused"] is True
    )


def test_what_a_schedule_adds_to_a_group_is_no_number_of_the_rule() -> None:
    """initial_lr, max_lr and other notes of a scheduler do not travel; the row is what the rule
    reads.
    """
    optimizer = optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1, momentum=0.9)
    optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=10)
    row = hparams_of("momentum", optimizer.param_groups[0])
    assert set(row) == {"lr", "momentum", "dampening", "weight_decay"}
    other = optim.SGD([torch.zeros(1)], lr=9.0)
    set_hparams(other, row)
    assert other.param_groups[0]["momentum"] == row["momentum"] == pytest.approx(0.95)


class Mine(optim.Adam):
    """A user's subclass."""


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        (lambda p: optim.LBFGS([p]), "mixes all parameters"),
        (lambda p: optim.Adafactor([p]), "factors second moments"),
        (lambda p: optim.Muon([p]), "orthogonalises whole matrices"),
        (lambda p: optim.SparseAdam([p]), "sparse gradients only"),
        (lambda p: Mine([p]), "Mine is a subclass of Adam"),
        (lambda p: optim.Adam([p], differentiable=True), "differentiable=True"),
        (lambda p: optim.RMSprop([p], capturable=True), "capturable=True"),
    ],
    ids=["LBFGS", "Adafactor", "Muon", "SparseAdam", "subclass", "differentiable", "capturable"],
)
def test_any_other_optimizer_raises_a_clear_error(optimizer: Any, why: str) -> None:
    """An optimizer that cannot be cut into slices is refused, with the reason."""
    made = optimizer(torch.zeros(2, 2, requires_grad=True))
    with pytest.raises(ValueError, match=why):
        rule_of(made, made.param_groups[0])


def test_every_optimizer_of_torch_is_decided_upon() -> None:
    """Each class in torch.optim either has a rule or is refused by name: none falls through as
    unknown.
    """
    from transpiler.ir.rules import _REFUSED

    classes = {
        c for c in vars(optim).values() if isinstance(c, type) and issubclass(c, optim.Optimizer)
    } - {optim.Optimizer}
    assert classes == ({spec.cls for spec in RULES.values()} | set(_REFUSED)) - {
        Ftrl,
        DecayedAdagrad,
        LARS,
        LAMB,
        AdamD2Sum,
    }


def test_unknown_rule_raises() -> None:
    """A rule type that is not in the table is named."""
    with pytest.raises(ValueError, match="got 'lion'"):
        make(Rule("lion", {}), [torch.zeros(1)])
