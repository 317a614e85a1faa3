"""A trainer that may get SIGTERM in a step of its choice.

::

    python preempted_trainer.py MODE VICTIM

Every trainer's gradient is 1 at its own place and 0 elsewhere, and SGD steps by 1.  So what a
parameter holds at a trainer's place is the count of its steps that were applied.  The victim gets
SIGTERM in step ``AT``, before its backward; the others take ``STEPS`` steps, and all of those meet
behind step ``AT``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
from torch import nn

from trainer import fleet

STEPS, AT, TRAINERS = 9, 4, 3
MODES: dict[str, dict[str, Any] | None] = {
    "sync": None,
    "async": {},
    "merged": {"max_merge_var_num": 4, "send_queue_size": 4, "merge": "sum"},
    "half_async": {"half_async": True, "max_merge_var_num": 3, "merge": "sum"},
    "staleness": {"staleness": 2},
    "geo": {"k_steps": 3},
    "diloco": {"k_steps": 3, "outer_optimizer": {"type": "sgd", "lr": 1.0}},
    "tables": None,
    "async tables": {},
    "mixed, stops": {"modes": {"b": "sync", "*": "collective"}, "lost_trainer": "stop"},
}


class Counts(nn.Module):
    """One number for each trainer, on either server; and a row of a table."""

    def __init__(self, tables: bool) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.zeros(TRAINERS)) for _ in range(2))
        self.rows = fleet_embedding() if tables else None

    def forward(self, number: int) -> torch.Tensor:
        """Of which every gradient is 1 at the trainer's place."""
        loss = self.a[number] + self.b[number]
        if self.rows is not None:
            loss = loss + self.rows(torch.tensor([number])).sum()
        return loss


def fleet_embedding() -> nn.Module:
    """A table of a row for each trainer."""
    rows = nn.Embedding(TRAINERS, 2)
    nn.init.zeros_(rows.weight)
    return fleet.distribute_embedding(rows)


def main(mode: str, victim: int) -> None:
    """Trains; the first of those that are left writes what the servers hold."""
    strategy = fleet.DistributedStrategy()
    configs = MODES[mode]
    strategy.a_sync, strategy.a_sync_configs = configs is not None, configs or {}
    fleet.init(strategy=strategy)
    model = fleet.distributed_model(Counts("tables" in mode))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    me = fleet.worker_index()
    for step in range(1, STEPS + 1):
        if step == AT and me == victim:
            print("SIGTERM at", time.monotonic(), flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
        model(me).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == AT:
            fleet.barrier_worker()
    fleet.export("counts.pt")
    print("took", STEPS, "steps", flush=True)
    fleet.finish()
    print("finished", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
