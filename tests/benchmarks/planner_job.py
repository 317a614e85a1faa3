"""A training script for the planner's check: ``planner_job.py MODEL MODE STEPS``.

At the end each trainer prints the mean seconds of its last steps.
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
MODES = {"sync": None, "async": {}, "geo": {"k_steps": 20}}
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


def main() -> None:
    """Trains, and prints the time of a step."""
    name, mode, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    fleet.init()
    torch.manual_seed(fleet.worker_index())
    batch = BATCH // fleet.worker_num()
    if name == "tables":
        net: nn.Module = Clicks()
        inputs = [torch.randint(0, ROWS, (batch, SLOTS)) for _ in range(50)]
    else:
        width, depth = map(int, name.split("x"))
        net = layers(width, depth)
        inputs = [torch.randn(batch, width) for _ in range(4)]
    strategy = fleet.DistributedStrategy()
    configs = MODES[mode]
    strategy.a_sync = configs is not None
    if configs:
        strategy.a_sync_configs = configs
    model = fleet.distributed_model(net)
    optimizer = fleet.distributed_optimizer(
        torch.optim.Adagrad(model.parameters(), lr=0.01), strategy
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
