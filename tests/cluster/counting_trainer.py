"""A trainer that counts how often each sample was in a step, says its phases, and trains on.

::

    python counting_trainer.py MODE

Each step lowers the weight of each of its samples by one (or its row, where the mode has a table),
so the weights at the end say how often a sample counted.  A small network beside them is trained
with momentum, so its digest says whether all steps were the same, in the same order.

==========  ==============================================================
join        before it joins the servers
step        in the first epoch, after some steps
epoch end   it has all batches of the first epoch
save        before ``fleet.save``
finish      before ``fleet.finish``
==========  ==============================================================
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from trainer import Constant, DistributedEmbedding, fleet, row_optimizers

SAMPLES, BATCH, EPOCHS, STEP = 320, 8, 2, 7
PAUSE = 0.03  # seconds between two steps, so that saves come between them
OUTER = {"type": "nesterov", "lr": 0.7, "momentum": 0.9}
AVERAGED = {"rows*": "sync", "*": "collective"}
MODES: dict[str, tuple[bool, dict[str, Any]]] = {
    "sync": (False, {}),
    "sync, goes on": (False, {"lost_trainer": "go_on"}),
    "async": (True, {"send_queue_size": 1}),
    "half_async": (True, {"half_async": True}),
    "staleness": (True, {"staleness": 2, "send_queue_size": 1}),
    "geo": (True, {"k_steps": 8}),
    "diloco": (True, {"k_steps": 8, "outer_optimizer": OUTER}),
    "tables": (False, {}),
    "async tables": (True, {"send_queue_size": 1}),
    "mixed": (False, {"modes": AVERAGED}),
    "mixed async": (True, {"modes": {**AVERAGED, "rows*": "async"}, "send_queue_size": 1}),
    "collective": (False, {}),
}


class Net(nn.Module):
    """A network beside a weight, or a row, for each sample."""

    def __init__(self, tables: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2))
        optimizer = row_optimizers.SGD(lr=1.0)
        self.rows = (
            DistributedEmbedding(1, init=Constant(0.0), optimizer=optimizer, name="rows")
            if tables
            else None
        )
        self.weight = None if tables else nn.Parameter(torch.zeros(SAMPLES))
        self.register_buffer("inputs", torch.randn(SAMPLES, 8), persistent=False)

    def counts(self, samples: torch.Tensor) -> torch.Tensor:
        """Of each sample: its weight, which is minus the number of its steps."""
        found = self.weight[samples] if self.rows is None else self.rows(samples).flatten()
        return found  # type: ignore[no-any-return]

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """The loss."""
        inputs: torch.Tensor = self.get_buffer("inputs")[samples]
        loss: torch.Tensor = self.layers(inputs).square().mean() + self.counts(samples).sum()
        return loss


def phase(name: str) -> None:
    """Says that a phase has come, and of which process."""
    print("phase", name, "of", os.getpid(), flush=True)


def main(mode: str) -> None:
    """The whole job."""
    torch.manual_seed(0)
    strategy = fleet.DistributedStrategy()
    strategy.a_sync, configs = MODES[mode]
    if configs:
        strategy.a_sync_configs = configs
    collective = mode == "collective"
    fleet.init(strategy=None if collective else strategy, is_collective=collective)
    model = Net("tables" in mode or "mixed" in mode)
    phase("join")
    model = fleet.distributed_model(model)
    counted = model.weight if model.rows is None else next(model.rows.parameters())
    groups = [
        {"params": [*model.layers.parameters()], "lr": 0.05, "momentum": 0.9},
        {"params": [counted], "lr": 1.0},
    ]
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(groups, lr=0.05))
    for epoch in range(EPOCHS):
        loader = DataLoader(torch.arange(SAMPLES), batch_size=BATCH, shuffle=True)
        for samples in fleet.shard(loader):
            model(samples).backward()
            optimizer.step()
            optimizer.zero_grad()
            if optimizer.steps == STEP:
                phase("step")
            time.sleep(PAUSE)
        if epoch == 0:
            phase("epoch end")
            phase("save")
            fleet.save("kept")
    fleet.barrier_worker()
    if not collective:
        optimizer.communicator.pull()
    with torch.no_grad():
        counts = (-model.counts(torch.arange(SAMPLES))).tolist()
        values = torch.cat([each.flatten() for each in model.layers.parameters()])
    least, most = min(counts), max(counts)
    digest = hashlib.sha256(values.numpy().tobytes()).hexdigest()[:12]
    print(f"counted {least:.3f} to {most:.3f} values {digest}", flush=True)
    phase("finish")
    fleet.finish()


if __name__ == "__main__":
    main(sys.argv[1])
