"""Statistics that accumulate with decay: alone, in a program, and over trainers on servers."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.support.step_programs import trains_alike
from tests.support.table_trainers import Trainer, sgd
from tests.support.threads import at_once
from trainer.nn import DataNorm
from transpiler import DistributedStrategy

Servers = Callable[[int], str]


def test_features_are_normalized_by_the_batches_before() -> None:
    """Sample by sample: sums fade, and the present batch is normalized by those before it."""
    torch.manual_seed(0)
    norm = DataNorm(3, epsilon=0.1, summary_decay_rate=0.5)
    size, total, squares = torch.full((3,), 1e4), torch.zeros(3), torch.full((3,), 1e4)
    for _ in range(3):
        x = torch.randn(4, 3, requires_grad=True)
        mean, deviation = total / size, (squares / size).sqrt()

        found = norm(x)

        torch.testing.assert_close(found, (x - mean) / deviation)
        found.sum().backward()
        torch.testing.assert_close(x.grad, (1 / deviation).expand(4, 3))
        size, total, squares = size * 0.5, total * 0.5, squares * 0.5
        for sample in x.detach():
            size, total = size + 1, total + sample
            squares = squares + (sample - mean) ** 2 + 0.1
    for mine, expected in zip(norm.buffers(), (size, total, squares), strict=True):
        torch.testing.assert_close(mine.float(), expected)
    before = copy.deepcopy(norm.state_dict())
    norm.eval()(torch.randn(4, 3))
    assert all(torch.equal(before[name], value) for name, value in norm.state_dict().items())
    with pytest.raises(ValueError, match=r"batch_size: expected \[2\], got \[3\]"):
        norm(torch.ones(4, 2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = DataNorm(2, summary_decay_rate=0.9, batch_size_default=10.0)
        self.layer = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(self.norm(x)).square().mean()
        return found


def test_in_a_program() -> None:
    """The sums are buffers of the program, and accumulate there."""
    torch.manual_seed(0)
    trains_alike(
        Model(), lambda m, x: m(x), (torch.randn(3, 2),), *((torch.randn(n, 2),) for n in (3, 5))
    )


def test_statistics_accumulate_on_servers(servers: Servers) -> None:
    """With the mean of buffers every trainer has, after each sync step, the sums of the mean over
    the trainers' batches.
    """
    generator = torch.Generator().manual_seed(1)
    batches = torch.randn(3, 2, 4, 2, generator=generator)  # steps, trainers
    torch.manual_seed(0)
    models = [Model()]
    models.append(copy.deepcopy(models[0]))
    strategy = DistributedStrategy()
    strategy.a_sync, strategy.a_sync_configs = False, {"buffers": "mean"}

    def train(number: int) -> None:
        one = Trainer(endpoints, number, 2, models[number], sgd, strategy)
        for step in batches:
            one.optimizer.zero_grad()
            one.model(step[number]).backward()
            one.optimizer.step()
        one.job.finish()

    endpoints = servers(2)
    at_once(lambda: train(0), lambda: train(1))
    total = torch.zeros(2)
    for step in batches:
        total = 0.9 * total + step.sum((0, 1)) / 2
    for model in models:
        torch.testing.assert_close(model.norm.batch_sum.float(), total)
