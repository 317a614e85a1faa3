"""Ftrl and DecayedAdagrad: they follow their papers and train as any optimizer of torch."""

import math

import pytest
import torch
from torch import Tensor, optim

from transpiler.optim.optim import DecayedAdagrad, Ftrl


def test_ftrl_follows_the_paper() -> None:
    """Ftrl's weights equal algorithm 1 of McMahan et al. (2013), written out for one coordinate; l1
    makes exact zeros.
    """
    lr, l1, l2, beta = 0.3, 0.05, 0.2, 1.0
    weight = torch.tensor([0.5], dtype=torch.float64)
    optimizer = Ftrl([weight], lr=lr, l1=l1, l2=l2, beta=beta)
    n = z = 0.0
    w = 0.5
    for gradient in (0.4, -0.7, 0.01, 0.3, -0.02):
        sigma = (math.sqrt(n + gradient**2) - math.sqrt(n)) / lr
        z += gradient - sigma * w
        n += gradient**2
        w = 0.0 if abs(z) <= l1 else -(z - math.copysign(l1, z)) / ((beta + math.sqrt(n)) / lr + l2)
        weight.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
        assert weight.item() == pytest.approx(w, rel=1e-12)
    strong = torch.zeros(3)
    strong.grad = torch.tensor([0.1, -0.2, 0.0])
    Ftrl([strong], lr=0.1, l1=1.0).step()
    assert torch.equal(strong, torch.zeros(3))


def test_ftrl_leaves_an_untouched_coordinate_alone() -> None:
    """A coordinate without any gradient so far keeps its initial value."""
    weight = torch.tensor([1.0, 2.0])
    optimizer = Ftrl([weight], lr=0.1)
    weight.grad = torch.tensor([0.5, 0.0])
    optimizer.step()
    assert weight[1] == 2.0 and weight[0] != 1.0


def test_decayed_adagrad_follows_its_rule() -> None:
    """DecayedAdagrad's weights equal its two formulas, written out for one coordinate."""
    weight = torch.tensor([0.5], dtype=torch.float64)
    optimizer = DecayedAdagrad([weight], lr=0.1, decay=0.9, eps=1e-3)
    moment, w = 0.0, 0.5
    for gradient in (0.4, -0.7, 0.01):
        moment = 0.9 * moment + (1 - 0.9) * gradient**2
        w -= 0.1 * gradient / (math.sqrt(moment) + 1e-3)
        weight.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
        assert weight.item() == pytest.approx(w, rel=1e-12)


@pytest.mark.parametrize(("cls", "rate"), [(Ftrl, 1.0), (DecayedAdagrad, 0.1)])
def test_our_optimizers_train_single_node(cls: type[optim.Optimizer], rate: float) -> None:
    """They are ordinary torch optimizers: closures, schedulers and state_dict work, and the loss
    falls.
    """
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    x = torch.randn(64, 4)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]])
    optimizer = cls(model.parameters(), lr=rate)  # type: ignore[call-arg]
    scheduler = optim.lr_scheduler.StepLR(optimizer, 50)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    first = float(optimizer.step(closure).detach())  # type: ignore[arg-type]
    for _ in range(100):
        last = float(optimizer.step(closure).detach())  # type: ignore[arg-type]
        scheduler.step()
    assert last < first / 4
    again = cls(model.parameters(), lr=0.5)  # type: ignore[call-arg]
    again.load_state_dict(optimizer.state_dict())
    assert again.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("cls", "settings", "name"),
    [
        (Ftrl, {"lr": 0.0}, "lr"),
        (Ftrl, {"lr_power": 0.5}, "lr_power"),
        (Ftrl, {"l1": -1.0}, "l1"),
        (Ftrl, {"l2": -1.0}, "l2"),
        (Ftrl, {"beta": -1.0}, "beta"),
        (DecayedAdagrad, {"lr": -0.1}, "lr"),
        (DecayedAdagrad, {"decay": 1.0}, "decay"),
        (DecayedAdagrad, {"eps": -1.0}, "eps"),
    ],
)
def test_our_optimizers_check_their_numbers(
    cls: type[optim.Optimizer], settings: dict[str, float], name: str
) -> None:
    """A number out of range raises and is named."""
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        cls([torch.zeros(1)], **settings)  # type: ignore[arg-type]
