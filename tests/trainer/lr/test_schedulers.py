"""Learning rates against their formulas, step by step; alone, resumed, and on servers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from tests.support.table_trainers import Servers
from trainer import fleet
from trainer.job.found_schedulers import schedulers_of
from trainer.lr import (
    InverseTimeLR,
    NaturalExpLR,
    NoamLR,
    PiecewiseLR,
    PolynomialDecayLR,
    WarmupLR,
)

STEPS = 25
RATES = (0.5, 0.1)  # of two groups
Make = Callable[[torch.optim.Optimizer], LRScheduler]
Formula = Callable[[float, int], float]  # of a group's rate, and the number of steps


def cycled(lr: float, n: int) -> float:
    whole = 10 * max(1, math.ceil(n / 10))
    return (lr - 0.01) * (1 - n / whole) ** 2 + 0.01


def warm_cosine(lr: float, n: int) -> float:
    if n <= 5:
        return lr * (0.1 + 0.9 * n / 5)
    return 0.002 + (lr - 0.002) * (1 + math.cos(math.pi * (n - 5) / 20)) / 2


CASES: dict[str, tuple[Make, Formula]] = {
    "noam": (
        lambda o: NoamLR(o, 64, 8),
        lambda lr, n: lr / math.sqrt(64) * min(1 / math.sqrt(n + 1), (n + 1) / 8**1.5),
    ),
    "natural exp": (
        lambda o: NaturalExpLR(o, 4, 0.3),
        lambda lr, n: lr * math.exp(-0.3 * n / 4),
    ),
    "natural exp, staircase": (
        lambda o: NaturalExpLR(o, 4, 0.3, staircase=True),
        lambda lr, n: lr * math.exp(-0.3 * (n // 4)),
    ),
    "inverse time": (
        lambda o: InverseTimeLR(o, 4, 0.5),
        lambda lr, n: lr / (1 + 0.5 * n / 4),
    ),
    "inverse time, staircase": (
        lambda o: InverseTimeLR(o, 4, 0.5, staircase=True),
        lambda lr, n: lr / (1 + 0.5 * (n // 4)),
    ),
    "polynomial": (
        lambda o: PolynomialDecayLR(o, 10, 0.01, 2.0),
        lambda lr, n: (lr - 0.01) * (1 - min(n, 10) / 10) ** 2 + 0.01,
    ),
    "polynomial, cycled": (lambda o: PolynomialDecayLR(o, 10, 0.01, 2.0, cycle=True), cycled),
    "piecewise": (
        lambda o: PiecewiseLR(o, [3, 10], [0.3, 0.2, 0.1]),
        lambda lr, n: 0.3 if n < 3 else 0.2 if n < 10 else 0.1,
    ),
    "cosine with warm-up": (
        lambda o: WarmupLR(CosineAnnealingLR(o, 20, eta_min=0.002), 5, 0.1),
        warm_cosine,
    ),
    "warm-up before ours": (
        lambda o: WarmupLR(InverseTimeLR(o, 1, 1.0), 5),
        lambda lr, n: lr * n / 5 if n <= 5 else lr / (1 + n - 5),
    ),
}
RECIPES: dict[str, tuple[Make, Formula]] = {  # of docs/learning_rates.md
    "exponential": (
        lambda o: ExponentialLR(o, 0.8 ** (1 / 4)),
        lambda lr, n: lr * 0.8 ** (n / 4),
    ),
    "exponential, staircase": (
        lambda o: StepLR(o, 4, gamma=0.8),
        lambda lr, n: lr * 0.8 ** (n // 4),
    ),
    "polynomial to 0, of torch": (
        lambda o: PolynomialLR(o, 10, 2.0),
        lambda lr, n: lr * (1 - min(n, 10) / 10) ** 2,
    ),
    "piecewise, of torch": (
        lambda o: MultiStepLR(o, [3, 10], 0.5),
        lambda lr, n: lr * 0.5 ** ((n >= 3) + (n >= 10)),
    ),
    "cosine": (
        lambda o: CosineAnnealingLR(o, STEPS),
        lambda lr, n: lr * (1 + math.cos(math.pi * n / STEPS)) / 2,
    ),
    "linear warm-up": (
        lambda o: LinearLR(o, 0.1, total_iters=5),
        lambda lr, n: lr * (0.1 + 0.9 * min(n, 5) / 5),
    ),
}


def two_groups() -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in RATES]
    return torch.optim.SGD(groups)


def rates(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[list[float]]:
    """The groups' rates before each step and after the last."""
    found = []
    for _ in range(steps):
        found.append([group["lr"] for group in optimizer.param_groups])
        assert scheduler.get_last_lr() == found[-1]
        optimizer.step()
        scheduler.step()
    return [*found, [group["lr"] for group in optimizer.param_groups]]


@pytest.mark.parametrize("name", [*CASES, *RECIPES])
def test_the_rates_are_those_of_the_formula(name: str) -> None:
    """In every group, from the first step on."""
    make, formula = {**CASES, **RECIPES}[name]
    optimizer = two_groups()
    found = rates(optimizer, make(optimizer), STEPS)

    for n, (one, other) in enumerate(found):
        assert one == pytest.approx(formula(RATES[0], n), rel=1e-11, abs=1e-15), n
        assert other == pytest.approx(formula(RATES[1], n), rel=1e-11, abs=1e-15), n


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("at", [3, 12])
def test_a_scheduler_goes_on_from_its_state(name: str, at: int) -> None:
    """Through JSON, as checkpoints keep it: to the bit the rates of one that was not stopped."""
    whole, before, after = two_groups(), two_groups(), two_groups()
    make = CASES[name][0]
    expected = rates(whole, make(whole), STEPS)
    first = make(before)
    rates(before, first, at)
    second = make(after)
    after.load_state_dict(before.state_dict())
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))

    assert rates(after, second, STEPS - at) == expected[at:]


def test_a_warm_up_goes_before_a_plateau() -> None:
    """Whose metric it hands on, once the warm-up is over."""
    optimizer = two_groups()
    scheduler = WarmupLR(ReduceLROnPlateau(optimizer, factor=0.5, patience=0), 2, 0.5)
    found = []
    for loss in (9.0, 9.0, 3.0, 3.0, 1.0):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step(loss)

    assert found == [0.25, 0.375, 0.5, 0.5, 0.25]


def test_ours_go_into_torchs_compositions() -> None:
    """One after another; the second begins at its own first rate."""
    optimizer = two_groups()
    parts: list[LRScheduler] = [ConstantLR(optimizer, 0.5, 3), NaturalExpLR(optimizer, 1, 0.1)]
    found = rates(optimizer, SequentialLR(optimizer, parts, [3]), 5)
    expected = [0.25] * 3 + [0.5 * math.exp(-0.1 * n) for n in range(3)]
    assert [one for one, _ in found] == pytest.approx(expected)


def test_a_checkpoint_finds_the_outer_scheduler() -> None:
    """The one inside is a part of its state."""
    optimizer = two_groups()
    outer = WarmupLR(NoamLR(optimizer, 8, 4), 2)

    assert schedulers_of([optimizer, optimizer]) == {"0 WarmupLR": outer}


def test_servers_take_each_step_at_its_rate(servers: Servers) -> None:
    """The same parameters as alone, to the bit."""

    def train(optimizer: Any, model: nn.Module) -> torch.Tensor:
        scheduler = WarmupLR(InverseTimeLR(optimizer, 2, 0.7), 2, 0.1)
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()
            scheduler.step()
        return model.weight.detach().clone()

    def net() -> nn.Module:
        torch.manual_seed(2)
        return nn.Linear(3, 1)

    alone = net()
    expected = train(torch.optim.Adam(alone.parameters(), lr=0.1), alone)
    fleet.init(fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=servers(2).split(",")))
    model = fleet.distributed_model(net())
    found = train(fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.1)), model)

    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda o: NoamLR(o, 0, 4), "d_model: expected a number above 0, got 0"),
        (lambda o: NaturalExpLR(o, 0, 0.5), "decay_steps: expected a number above 0, got 0"),
        (lambda o: PiecewiseLR(o, [3, 3], [1, 2, 3]), "boundaries: expected ascending numbers"),
        (lambda o: PiecewiseLR(o, [3], [1]), "values: expected 2, one more than boundaries, got 1"),
        (lambda o: WarmupLR(StepLR(o, 3), 0), "warmup_steps: expected 1 or more, got 0"),
        (lambda o: WarmupLR(StepLR(o, 3), 3, 2.0), "start_factor: expected 0 to 1, got 2.0"),
    ],
)
def test_wrong_numbers_are_said(make: Make, said: str) -> None:
    """What was expected, and what came."""
    with pytest.raises(ValueError, match=said):
        make(two_groups())
