"""Promises about the measurement of docs/staleness.md: its staleness is exact, and its steps are a
server's.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.utils import parameters_to_vector

from docs.pictures.stale_gradients import OPTIMIZERS, TASKS, measure, texts, train
from tests.support.table_trainers import Servers, Trainer
from trainer import fleet

STEPS, RATE, LAMBDA = 9, 2.0**-4, 2.0**3


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(STEPS, 16, 5, generator=generator)
    return [(each, each.sum(1, keepdim=True)) for each in inputs]


def gradient(model: nn.Module, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(mse_loss(model(batch[0]), batch[1]), model.parameters()))


def by_hand(model: nn.Module, optimizer: Any, staleness: int, factor: float) -> list[Tensor]:
    """The parameters after each step of plain torch; the gradient of each step is computed on a
    copy of the model of ``staleness`` steps ago.
    """
    models, found = [copy.deepcopy(model)], []
    for step, batch in enumerate(batches()):
        old = models[max(step - staleness, 0)]
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / STEPS)
        for now, then, g in zip(
            model.parameters(), old.parameters(), gradient(old, batch), strict=True
        ):
            now.grad = torch.addcmul(g, g * g, (now - then).detach(), value=factor)
        optimizer.step()
        models.append(copy.deepcopy(model))
        found.append(parameters_to_vector(model.parameters()).detach())
    return found


def trained(name: str, staleness: int, factor: float) -> list[Tensor]:
    """The parameters after each step of the measurement."""
    model, found = network(), list[Tensor]()

    def after(step: int) -> None:
        assert step == len(found) + 1
        found.append(parameters_to_vector(model.parameters()).detach())

    optimizer = OPTIMIZERS[name](RATE)(model.parameters())
    train(model, mse_loss, batches(), optimizer, staleness, factor, after)
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_staleness_0_equals_plain_torch(name: str) -> None:
    """To the bit, with compensation, too: nothing has changed that it would correct."""
    model = network()
    optimizer = OPTIMIZERS[name](RATE)(model.parameters())
    plain = []
    for step, batch in enumerate(batches()):
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / STEPS)
        optimizer.zero_grad()
        mse_loss(model(batch[0]), batch[1]).backward()
        optimizer.step()
        plain.append(parameters_to_vector(model.parameters()).detach())

    for factor in (0.0, LAMBDA):
        found = trained(name, 0, factor)
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("staleness", [1, 3, STEPS])
def test_a_gradient_is_that_of_so_many_steps_ago(name: str, staleness: int) -> None:
    """To the bit; of the first steps that of the start."""
    model = network()
    expected = by_hand(model, OPTIMIZERS[name](RATE)(model.parameters()), staleness, 0.0)
    found = trained(name, staleness, 0.0)

    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not torch.equal(found[-1], trained(name, 0, 0.0)[-1])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_stale_gradient_is_compensated(name: str) -> None:
    """g + lambda (w - w_then) g g, before the rule."""
    model = network()
    expected = by_hand(model, OPTIMIZERS[name](RATE)(model.parameters()), 2, LAMBDA)
    found = trained(name, 2, LAMBDA)

    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert not torch.allclose(found[-1], trained(name, 2, 0.0)[-1])


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("factor", [0.0, LAMBDA])
def test_trainers_that_step_in_turn_have_that_staleness(
    servers: Servers, name: str, factor: float
) -> None:
    """Three trainers of a real server, async, each waiting for its own result: the server holds
    what the measurement with a staleness of 2 gives, to the bit, after every step.
    """

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return OPTIMIZERS[name](RATE)(model.parameters())

    endpoint, configs = servers(1), {"send_queue_size": 1, "dc_asgd": factor}
    trainers = [Trainer(endpoint, each, 3, network(), make, **configs) for each in range(3)]
    try:
        upcoming, expected = batches(), trained(name, 2, factor)
        for trainer, (inputs, wanted) in zip(trainers, upcoming, strict=False):
            mse_loss(trainer.model(inputs), wanted).backward()
        for step in range(STEPS):
            trainer = trainers[step % 3]
            trainer.optimizer.param_groups[0]["lr"] = RATE * (1 - step / STEPS)
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()

            found = parameters_to_vector(trainer.model.parameters()).detach()
            assert torch.equal(found, expected[step])
            if step + 3 < STEPS:
                inputs, wanted = upcoming[step + 3]
                mse_loss(trainer.model(inputs), wanted).backward()
    finally:
        for trainer in trainers:
            trainer.optimizer.close()
        fleet.finish()


def test_a_run_ends_early_where_it_diverges() -> None:
    """Its loss then is that of a guess."""
    task = TASKS["digits"]()
    curve, score = measure(task, OPTIMIZERS["SGD"](1e30), 0, 0.0, 0, 4)

    assert curve[-1] == task.guess and score < 0.5


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_worse_before_it_is_learned(name: str) -> None:
    """A model that has learned nothing is about as good as a guess, and every batch of a seed is
    the same in every run.
    """
    task = TASKS[name]()
    torch.manual_seed(0)
    inputs, wanted = task.held_out
    with torch.no_grad():
        loss = task.loss(task.make()(inputs), wanted).item()

    assert loss == pytest.approx(task.guess, rel=0.1)
    for one, other in zip(task.batches(7), task.batches(7), strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
    assert texts(50, 2)[2] < TASKS["letters"]().guess
