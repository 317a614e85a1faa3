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

In the mixed modes servers have rows, and the trainers average the gradients of the columns before
they commit.  There the first two are:

===============  ==============================================================
sending          its rows have left, and the average is under way: the others
                 have its count of gradients, and wait for these
between commits  all have the average, and one server has the commit of the rows
===============  ==============================================================

It prints "step N" for each step that was answered.  At its end it says for each trainer how far the
elements of its columns, and of its rows, have come: "columns 60.0 | 60.0 | 8.0".  A step of a
trainer moves them by GRADIENT; where the members of a step have its mean, by GRADIENT divided by
their number, which float32 has exactly.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer import Constant, DistributedEmbedding, fleet, row_optimizers
from trainer.collective.process_groups import ProcessGroups

MODE, SIGNAL, PHASE = sys.argv[1:4]
STEPS, FAULT_STEP = int(sys.argv[4]), int(sys.argv[5])
ME = int(os.environ["TRAINER_ID"])
TRAINERS = 3
ROWS = 6000  # so that each server has a slice of the columns
RATE, GRADIENT = 0.5, 6.0
JOINS, JOINED = os.environ["JOINS"] == "1", Path("joined")
HOLD = 20  # the step before which all wait for another process
PATIENCE = 600.0  # the test's own waits end sooner
OUTER = {"type": "sgd", "lr": 1.0}
LOST = {"lost_trainer": "wait" if JOINS else "go_on"}
MODES: dict[str, dict[str, Any]] = {
    "async": {"send_queue_size": 1},
    "half_async": {"half_async": True},
    "staleness": {"send_queue_size": 1, "staleness": 2},
    "geo": {"k_steps": 1},
    "diloco": {"k_steps": 1, "outer_optimizer": OUTER},
    "tables": {"send_queue_size": 1},
    "sync": LOST,
    "mixed": {"modes": {"rows*": "sync", "*": "collective"}, **LOST},
    "mixed_async": {"modes": {"rows*": "async", "*": "collective"}, "send_queue_size": 1, **LOST},
}
MIXED = MODE.startswith("mixed")


class Net(nn.Module):
    """A column for each trainer; below it the rows of a table where the mode has one."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = nn.Linear(TRAINERS, ROWS, bias=False)
        self.rows = None
        if MODE == "tables" or MIXED:
            optimizer = row_optimizers.SGD(lr=RATE)
            self.rows = DistributedEmbedding(TRAINERS, optimizer=optimizer, init=Constant(0.0))

    def forward(self, own: torch.Tensor) -> torch.Tensor:
        """The sum of the elements that ``own`` names."""
        total: torch.Tensor = self.columns(own).sum()
        if self.rows is not None:
            total = total + (self.rows(torch.arange(ROWS)) * own).sum()
        return total


def strike(*arguments: Any, **named: Any) -> Any:
    """Sends this process the signal, once."""
    os.write(1, b"strikes\n")  # at once: another thread may be writing its line
    os.kill(os.getpid(), signal.Signals[SIGNAL])


def before(call: Any, number: int = 1) -> Any:
    """``call``, before which the signal comes when it is called for this time."""
    calls = itertools.count(1)

    def calling(*arguments: Any, **named: Any) -> Any:
        if next(calls) == number:
            strike()
        return call(*arguments, **named)

    return calling


def arm(communicator: Any) -> None:
    """Lets the signal come in the next step, or before it."""
    if PHASE == "sending" and MIXED:  # a sum of how many have gradients comes before theirs
        ProcessGroups.begin = before(ProcessGroups.begin, 2)
    elif PHASE == "sending":
        communicator.close_step = before(communicator.close_step)
    elif PHASE == "between commits":
        channel = communicator.clients[1].channels[0]
        channel.commit = before(channel.commit)
    elif PHASE == "between steps":
        strike()


def moved(values: torch.Tensor) -> str:
    """By trainer, the different distances that its elements have gone, in rates."""
    found = [(values[:, trainer] / -RATE).unique().tolist() for trainer in range(TRAINERS)]
    return " | ".join(" ".join(map(str, each)) for each in found)


def wait_for_joiner(communicator: Any) -> None:
    """Where another process is to join, those that are there do not end before it has."""
    end = time.monotonic() + PATIENCE
    while JOINS and not JOINED.exists() and time.monotonic() < end:
        communicator.joint.attend()  # it may need what they average
        time.sleep(0.05)


def main() -> None:
    """The whole job."""
    strategy = fleet.DistributedStrategy()
    strategy.a_sync, strategy.a_sync_configs = MODE != "sync", MODES[MODE]
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
            wait_for_joiner(communicator)
        if SIGNAL and optimizer.steps == FAULT_STEP - 1:
            arm(communicator)
        (model(own) * GRADIENT).backward()
        optimizer.step()
        optimizer.zero_grad()
        os.write(1, f"step {optimizer.steps}\n".encode())  # whole: another thread may strike
        time.sleep(0.02)  # what it computes
    if SIGNAL and PHASE == "finishing":
        strike()
    wait_for_joiner(communicator)
    fleet.barrier_worker()  # the lost one is not waited for
    optimizer.flush()
    served = communicator.served()  # in the k-step modes, where the trainer has its own columns
    with torch.no_grad():
        columns = served.get("columns.weight", model.columns.weight)
        print("columns", moved(columns), flush=True)
        if model.rows is not None:
            print("rows", moved(model.rows(torch.arange(ROWS))), flush=True)
    fleet.finish()


if __name__ == "__main__":
    main()
