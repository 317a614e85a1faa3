"""A training script for the planner's check: ``planner_job.py MODEL MODE STEPS``.

MODEL is "tables", "images", or "512x3" for three dense layers of that width; MODE is "sync",
"async", or "geo20" for an exchange every 20 steps.  At the end each trainer prints the mean seconds
of its last steps.
"""

from __future__ import annotations

import itertools
import sys
import time

import torch
from torch import nn

from trainer import DistributedEmbedding, fleet, row_optimizers

BATCH = 256  # samples of all trainers together
SLOTS, DIM, ROWS = 8, 16, 200_000
SIDE = 16  # of an image
WARM = 4  # the first of so many parts of all steps does not count


class Clicks(nn.Module):
    """Rows of a table, and a network over them."""

    def __init__(self) -> None:
        super().__init__()
        rows = row_optimizers.Adagrad(lr=0.05)
        self.rows = DistributedEmbedding(DIM, num_embeddings=ROWS, optimizer=rows)
        self.deep = nn.Sequential(nn.Linear(SLOTS * DIM, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 [batch, SLOTS] -> [batch, 1]."""
        logits: torch.Tensor = self.deep(self.rows(ids).flatten(1))
        return logits


def layers(width: int, depth: int) -> nn.Sequential:
    """A dense network with one output."""
    inner = [each for _ in range(depth) for each in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*inner, nn.Linear(width, 1))


def images() -> nn.Sequential:
    """A small convolutional network with one output."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * (SIDE // 2) ** 2, 64),
        nn.ReLU(),
        nn.Linear(64, 1),
    )


def made(model: str, batch: int) -> tuple[nn.Module, list[torch.Tensor]]:
    """A model, and some batches for it."""
    if model == "tables":
        return Clicks(), [torch.randint(0, ROWS, (batch, SLOTS)) for _ in range(50)]
    if model == "images":
        return images(), [torch.randn(batch, 3, SIDE, SIDE) for _ in range(4)]
    width, depth = map(int, model.split("x"))
    return layers(width, depth), [torch.randn(batch, width) for _ in range(4)]


def strategy_of(mode: str) -> fleet.DistributedStrategy:
    """The strategy of an update mode."""
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = mode != "sync"
    if mode.startswith("geo"):
        strategy.a_sync_configs = {"k_steps": int(mode.removeprefix("geo"))}
    return strategy


def main() -> None:
    """Trains, and prints the time of a step."""
    name, mode, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    fleet.init()
    torch.manual_seed(fleet.worker_index())
    net, inputs = made(name, BATCH // fleet.worker_num())
    model = fleet.distributed_model(net)
    optimizer = fleet.distributed_optimizer(
        torch.optim.Adagrad(model.parameters(), lr=0.01), strategy_of(mode)
    )
    begun = 0.0
    for step, x in zip(range(steps), itertools.cycle(inputs), strict=False):
        if step == steps // WARM:
            begun = time.perf_counter()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    mean = (time.perf_counter() - begun) / (steps - steps // WARM)
    print(f"seconds of a step: {mean:.6f}", flush=True)
    fleet.finish()


if __name__ == "__main__":
    main()
