"""A trainer of two tables whose values say which rows its forwards have read: a digest at the end.

::

    python ahead_trainer.py DEPTH DIES

``DIES`` says what happens in step 9 of trainer 1, while the other one waits for it there:
"trainer": this process gets SIGKILL, once; "server": it waits until a server has got that; "":
nothing.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainer import DistributedEmbedding, Uniform, fleet

IDS, SAMPLES, STEP = 60, 480, 9
PATIENCE = 200.0
PACE = 0.02  # seconds of a step at least, so that a save is due before step 9


class Model(nn.Module):
    """Two tables and a dense layer; a row moves by what the others are."""

    def __init__(self) -> None:
        super().__init__()
        self.users = DistributedEmbedding(4, init=Uniform(-1.0, 1.0), name="users")
        self.items = DistributedEmbedding(4, init=Uniform(-1.0, 1.0), name="items")
        self.last = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.users(x[:, 0]) * self.items(x[:, 1])
        out: torch.Tensor = self.last(rows).squeeze(1)
        return out


def until(done: Callable[[], bool], what: str) -> None:
    """Waits for something, for ``PATIENCE`` at most."""
    end = time.monotonic() + PATIENCE
    while not done():
        if time.monotonic() > end:
            raise TimeoutError(f"waited for {what} for {PATIENCE:.0f} s")
        time.sleep(0.01)


def die(dies: str, waits: Callable[[], bool]) -> None:
    """Dies once, while the other trainer waits in this step.

    Args:
        waits: whether it does.
    """
    struck = Path("struck")
    if not dies or struck.exists():
        return
    until(waits, "the other trainer's step")
    until(lambda: any(Path("saved").rglob("checkpoint.json")), "a checkpoint")
    struck.touch()
    if dies == "trainer":
        os.kill(os.getpid(), signal.SIGKILL)
    print("now", flush=True)
    until(Path("killed").exists, "the server's end")


def main(depth: int, dies: str) -> None:
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = True
    strategy.a_sync_configs = {"modes": {"*": "sync"}, "look_ahead": depth}
    fleet.init(strategy=strategy)
    torch.set_num_threads(1)
    torch.manual_seed(5)
    model = fleet.distributed_model(Model())
    optimizer = fleet.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1))
    ids = torch.randint(0, IDS, (SAMPLES, 2))
    data = fleet.shard(DataLoader(TensorDataset(ids, torch.rand(SAMPLES)), 12, shuffle=True))
    step = 0

    def waits() -> bool:
        """Whether trainer 0 waits in this step, as server 0 sees it."""
        status = optimizer.communicator.clients[0]._control.status()
        return any(
            each.trainer_id == 0 and each.activity == f"step {step}" for each in status.trainers
        )

    for _ in range(2):
        for x, y in data:
            step += 1
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            if step == STEP and fleet.worker_index() == 1:
                die(dies, waits)
            optimizer.step()
            time.sleep(PACE)
    optimizer.flush()
    with torch.no_grad():
        rows = [model.users(torch.arange(IDS)), model.items(torch.arange(IDS))]
    found = torch.cat([each.reshape(-1) for each in (*rows, *model.last.parameters())])
    print("digest", hashlib.sha256(found.detach().numpy().tobytes()).hexdigest(), flush=True)
    print("ahead", fleet.metrics().get("rows_ahead", 0.0), flush=True)
    fleet.finish()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
