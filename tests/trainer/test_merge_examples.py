"""The documentation's examples of recompute, gradient_merge and gradient_scale_configs, as jobs:
two trainers and two servers learn digits.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from tests.support.eager_jobs import Servers
from tests.support.seeded import seeded
from tests.support.table_trainers import Trainer
from tests.support.threads import at_once
from trainer.modules.prepare import prepared
from transpiler import DistributedStrategy

BATCH, STEPS = 32, 60
EXAMPLES: dict[str, dict[str, Any]] = {
    "recompute": {"recompute": True, "recompute_configs": {"checkpoints": ["x", "y"]}},
    "offload": {
        "recompute": True,
        "recompute_configs": {
            "checkpoints": ["x", "y"],
            "enable_offload": True,
            "checkpoint_shape": [BATCH, 64],
        },
    },
    "gradient_merge": {
        "gradient_merge": True,
        "gradient_merge_configs": {"k_steps": 4, "avg": True},
    },
    "fuse_grad_merge": {
        "gradient_merge": True,
        "gradient_merge_configs": {"k_steps": 2},
        "fuse_grad_merge": True,
    },
    "gradient_scale": {"gradient_scale_configs": {"scale_strategy": "avg"}},
    "sum": {"gradient_scale_configs": {"scale_strategy": "sum"}},
    "all": {
        "recompute": True,
        "recompute_configs": {"checkpoints": ["x", "y"]},
        "gradient_merge": True,
        "gradient_merge_configs": {"k_steps": 2},
        "gradient_scale_configs": {"scale_strategy": "sum"},
    },
}


class Net(nn.Module):
    """Two blocks, whose names are those of the examples."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(5):
            self.x, self.y = (nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(2))
            self.last = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.y(self.x(images)))


def digits() -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(2))
    return torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_learn_digits(example: str, servers: Servers) -> None:
    """As they are written there, with modules that are called x and y."""
    (images, labels), endpoints = digits(), servers(2)
    strategy = DistributedStrategy()
    strategy.a_sync = False
    for name, value in EXAMPLES[example].items():
        setattr(strategy, name, value)

    def play(number: int) -> float:
        model = prepared(Net(), strategy)
        adam = torch.optim.Adam(model.parameters(), lr=0.01)
        trainer = Trainer(endpoints, number, 2, model, lambda _: adam, strategy=strategy)
        for step in range(STEPS):
            mine = torch.arange(BATCH) * 2 + number + step * 2 * BATCH
            rows = mine % 1500
            trainer.optimizer.zero_grad()
            F.cross_entropy(model(images[rows]), labels[rows]).backward()
            trainer.optimizer.step()
        trainer.job.finish()
        with torch.no_grad():
            right = model(images[1500:]).argmax(1) == labels[1500:]
        return right.float().mean().item()

    assert min(at_once(*(partial(play, number) for number in range(2)))) > 0.85
