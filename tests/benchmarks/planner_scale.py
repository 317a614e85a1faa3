"""The training script of what docs/planner.md says of many hosts: ``planner_scale.py MODEL MODE``.

MODEL is "dense" for 100 MB of parameters in 24 layers, or "clicks" for 26 slots in a table of 10 M
rows of 16 numbers and a network over them; MODE is "sync", "async", or "geo10" for an exchange
every 10 steps.  A batch is each trainer's own.
"""

from __future__ import annotations

import argparse
import itertools

import torch
import torch.nn.functional as F
from ctr_data import DIM, ROWS, SLOTS, WIDTH, batches
from planner_job import layers, strategy_of
from torch import nn

from trainer import DistributedEmbedding, fleet, row_optimizers

DENSE_BATCH, DENSE_WIDTH, DENSE_DEPTH = 64, 1024, 24
STEPS = 1_000_000  # a probe ends it
DIFFERENT = 50  # batches


class Clicks(nn.Module):
    """Rows of a table, and two wide layers and a logit over them."""

    def __init__(self) -> None:
        super().__init__()
        rows = row_optimizers.Adagrad(lr=0.05)
        self.rows = DistributedEmbedding(DIM, num_embeddings=ROWS, optimizer=rows)
        self.net = nn.Sequential(
            *(nn.Linear(SLOTS * DIM, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()),
            nn.Linear(WIDTH, 1),
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 [batch, SLOTS] -> logits [batch, 1]."""
        logits: torch.Tensor = self.net(self.rows(ids).flatten(1))
        return logits


def made(model: str, seed: int) -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    """A model, and some batches for it: inputs and labels."""
    if model == "clicks":
        found = batches(seed, count=DIFFERENT)
        return Clicks(), [(torch.from_numpy(ids), torch.from_numpy(label)) for ids, label in found]
    label = torch.ones(DENSE_BATCH, 1)
    x = [torch.randn(DENSE_BATCH, DENSE_WIDTH) for _ in range(4)]
    return layers(DENSE_WIDTH, DENSE_DEPTH), [(each, label) for each in x]


def main() -> None:
    """Trains until the probe has seen enough."""
    words = argparse.ArgumentParser(allow_abbrev=False)
    words.add_argument("model", choices=("dense", "clicks"))
    words.add_argument("mode", choices=("sync", "async", "geo10"))
    given = words.parse_args()
    fleet.init()
    torch.manual_seed(0)
    net, data = made(given.model, fleet.worker_index())
    model = fleet.distributed_model(net)
    optimizer = fleet.distributed_optimizer(
        torch.optim.Adagrad(model.parameters(), lr=0.01), strategy_of(given.mode)
    )
    for x, label in itertools.islice(itertools.cycle(data), STEPS):
        F.binary_cross_entropy_with_logits(model(x), label).backward()
        optimizer.step()
        optimizer.zero_grad()
    fleet.finish()


if __name__ == "__main__":
    main()
