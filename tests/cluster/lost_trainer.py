"""A trainer of a job from which one is lost, or which one joins later.

::

    python lost_trainer.py MODE SIGNAL PHASE STEPS FAULT_STEP

The victim, which has a SIGNAL, sends it to itself in step FAULT_STEP, in this phase:

===============  ==============================================================
sending          gradients are on their way, and no commit is
between commits  one server has the step's commit, and the other one has not
between steps    all that it has sent is applied
finishing        it has taken all steps, and has told nobody that it has
===============  ==============================================================

It prints "step N" for each step that was answered, and at its end "counted": for each trainer, what
the elements of its columns say of its steps.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer import Constant, DistributedEmbedding, fleet, row_optimizers

MODE, SIGNAL, PHASE = sys.argv[1:4]
STEPS, FAULT_STEP = int(sys.argv[4]), int(sys.argv[5])
ME = int(os.environ["TRAINER_ID"])
TRAINERS, ROWS = 3, 400
RATE = 0.5
JOINS, JOINED = os.environ["JOINS"] == "1", Path("joined")
HOLD = 20  # the step before which all wait for another process
PATIENCE = 60.0
OUTER = {"type": "sgd", "lr": 1.0}
MODES: dict[str, dict[str, Any]] = {
    "async": {"send_queue_size": 1},
    "half_async": {"half_async": True},
    "staleness": {"send_queue_size": 1, "staleness": 2},
    "geo": {"k_steps": 1},
    "diloco": {"k_steps": 1, "outer_optimizer": OUTER},
    "tables": {"send_queue_size": 1},
}


class Net(nn.Module):
    """A column for each trainer; below it the rows of a table where the mode has one."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = nn.Linear(TRAINERS, ROWS, bias=False)
        self.rows = None
        if MODE == "tables":
            optimizer = row_optimizers.SGD(lr=RATE)
            self.rows = DistributedEmbedding(TRAINERS, optimizer=optimizer, init=Constant(0.0))

    def forward(self, own: torch.Tensor) -> torch.Tensor:
        """Adds one to each element of the columns that ``own`` names."""
        total: torch.Tensor = self.columns(own).sum()
        if self.rows is not None:
            total = total + (self.rows(torch.arange(ROWS)) * own).sum()
        return total


def strike(*arguments: Any, **named: Any) -> Any:
    """Sends this process the signal, once."""
    os.write(1, b"strikes\n")  # at once: another thread may be writing its line
    os.kill(os.getpid(), signal.Signals[SIGNAL])


def once(call: Any) -> Any:
    """``call``, before which the signal comes for the first time."""
    left = [True]

    def calling(*arguments: Any, **named: Any) -> Any:
        if left.pop() if left else False:
            strike()
        return call(*arguments, **named)

    return calling


def counted(model: Net) -> str:
    """By trainer, the different numbers of steps that its elements say."""
    with torch.no_grad():
        columns = [model.columns.weight]
        if model.rows is not None:
            columns.append(model.rows(torch.arange(ROWS)))
        whole = torch.cat(columns) / -RATE
    found = [whole[:, trainer].unique().tolist() for trainer in range(TRAINERS)]
    return " | ".join(" ".join(map(str, each)) for each in found)


def wait_for_joiner() -> None:
    """Where another process is to join, those that are there do not end before it has."""
    end = time.monotonic() + PATIENCE
    while JOINS and not JOINED.exists() and time.monotonic() < end:
        time.sleep(0.05)


def main() -> None:
    """The whole job."""
    strategy = fleet.DistributedStrategy()
    strategy.a_sync, strategy.a_sync_configs = True, MODES[MODE]
    fleet.init(strategy=strategy)
    model = fleet.distributed_model(Net())
    nn.init.zeros_(model.columns.weight)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=RATE))
    communicator = optimizer.communicator
    own = nn.functional.one_hot(torch.tensor(ME), TRAINERS).float()[None]
    if JOINS and ME == TRAINERS - 1 and not SIGNAL:
        JOINED.touch()
    print("begins at", optimizer.steps, flush=True)
    while optimizer.steps < STEPS:
        if optimizer.steps == HOLD and PHASE != "finishing":
            wait_for_joiner()
        if SIGNAL and optimizer.steps == FAULT_STEP - 1:
            if PHASE == "sending":
                communicator.close_step = once(communicator.close_step)
            elif PHASE == "between commits":
                channel = communicator.clients[1].channels[0]
                channel.commit = once(channel.commit)
            elif PHASE == "between steps":
                strike()
        model(own).backward()
        optimizer.step()
        optimizer.zero_grad()
        os.write(1, f"step {optimizer.steps}\n".encode())  # whole: another thread may strike
        time.sleep(0.02)  # what it computes
    if SIGNAL and PHASE == "finishing":
        strike()
    wait_for_joiner()
    fleet.barrier_worker()  # the lost one is not waited for
    communicator.pull()
    print("counted", counted(model), flush=True)
    fleet.finish()


if __name__ == "__main__":
    main()
