"""The examples of the documentation, as jobs: digits, two trainers, two servers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from tests.support.amp_jobs import amp_model, dtypes
from tests.support.eager_jobs import Servers
from tests.support.standing_ranks import StandingRanks
from tests.support.table_trainers import Trainer
from tests.support.threads import at_once
from trainer import fleet

SAMPLES, EPOCHS, BATCH = 1200, 4, 50
# as the two examples have them
EXAMPLES: list[dict[str, Any]] = [
    {"init_loss_scaling": 32768, "custom_white_list": ["conv2d"]},
    {"init_loss_scaling": 32768, "use_pure_fp16": True},
]


class Net(nn.Module):
    """A convolution and a layer, in a guard, which the second example asks for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv2d(1, 8, 3), nn.Linear(8 * 36, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with fleet.fp16_guard():
            result: torch.Tensor = self.head(torch.relu(self.conv(x)).flatten(1))
            return result


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    found = load_digits()
    x = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    return x, torch.tensor(found.target)


def train(model: nn.Module, optimizer: Any, part: int, parts: int) -> float:
    """Accuracy on what was not trained on."""
    x, y = digits()
    for _ in range(EPOCHS):
        for begin in range(part * BATCH, SAMPLES, parts * BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(x[begin:][:BATCH]), y[begin:][:BATCH]).backward()
            optimizer.step()
    with torch.no_grad():
        return float((model(x[SAMPLES:]).argmax(1) == y[SAMPLES:]).float().mean())


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=3e-3)


@pytest.mark.observes("amp", "amp_configs.custom_white_list", "amp_configs.use_pure_fp16")
@pytest.mark.parametrize("configs", EXAMPLES)
def test_an_example_trains_digits_on_two_servers(servers: Servers, configs: dict[str, Any]) -> None:
    """Within two points of what two trainers reach without mixed precision."""

    def accuracy(mixes: bool) -> list[float]:
        models = [amp_model(Net(), **configs) if mixes else Net() for _ in range(2)]
        endpoints = servers(2)
        modes = {"*": "sync"}
        jobs = at_once(
            *(
                lambda n=n: Trainer(endpoints, n, 2, models[n], adam, modes=modes)  # type: ignore[misc]
                for n in range(2)
            )
        )
        try:
            return at_once(
                *(lambda n=n: train(models[n], jobs[n].optimizer, n, 2) for n in range(2))  # type: ignore[misc]
            )
        finally:
            at_once(*(job.optimizer.close for job in jobs))

    plain, mixed = accuracy(False), accuracy(True)
    assert mixed[0] == mixed[1] > max(0.8, plain[0] - 0.02)
    assert dtypes(amp_model(Net(), **configs), digits()[0][:2])["convolution"] == {torch.float16}


def digits_on_ranks(configs: dict[str, Any]) -> None:
    """fleet without servers, on each of two ranks."""
    import torch.distributed as dist

    strategy = fleet.DistributedStrategy()
    strategy.amp, strategy.amp_configs = True, configs
    fleet.init(is_collective=True, strategy=strategy)
    model = fleet.distributed_model(Net())
    optimizer = fleet.distributed_optimizer(adam(model))
    assert train(model, optimizer, dist.get_rank(), 2) > 0.8
    fleet.finish()


@pytest.fixture(scope="module")
def ranks() -> Iterator[StandingRanks]:
    """Two."""
    standing = StandingRanks(2)
    yield standing
    standing.close()


@pytest.mark.processes
@pytest.mark.parametrize("configs", EXAMPLES)
def test_an_example_trains_digits_without_servers(
    ranks: StandingRanks, configs: dict[str, Any]
) -> None:
    """On two ranks."""
    ranks.run(digits_on_ranks, configs)
