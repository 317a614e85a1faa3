"""A trainer that is killed in its second epoch and started again: each sample counts once.

A step adds 1 to the weight of each of its samples, so the weights say in how many decided steps
each was.
"""

from __future__ import annotations

import json
import re

import pytest
import torch

from tests.support.processes import Processes
from tests.support.tiers import RARE

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

SAMPLES, EPOCHS = 120, 3
SCRIPT = f"""
import os, signal, sys, time
import torch
from pathlib import Path
from torch.utils.data import DataLoader, IterableDataset
from trainer import fleet


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.randperm({SAMPLES}).tolist())


class Weights(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros({SAMPLES}))

    def forward(self, x):
        return -self.weight[x].sum()


def data(kind):
    if kind != "files":
        return fleet.shard(
            DataLoader(torch.arange({SAMPLES}), 4, shuffle=True)
            if kind == "samples"
            else DataLoader(Stream(), 4)
        )
    dataset = fleet.QueueDataset()
    dataset.init(batch_size=4, use_var=[fleet.Slot("n")])
    dataset.set_filelist([f"part-{{n}}" for n in range(12)])
    return dataset


kind = sys.argv[1]
strategy = fleet.DistributedStrategy()
strategy.a_sync_configs = {{"send_queue_size": 1}}
fleet.init(strategy=strategy)
model = fleet.distributed_model(Weights())
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
me, died, again = fleet.worker_index(), Path("died"), Path("again")
batches, second = data(kind), me == 1 and died.exists()
for epoch in range({EPOCHS}):
    for number, x in enumerate(batches, 1):
        x = x["n"] if kind == "files" else x
        if second:
            again.touch()
            print("again", epoch, x.tolist(), flush=True)
        while me == 0 and epoch == 1 and not again.exists():
            time.sleep(0.01)  # the other one is started again in this epoch
        if me == 1 and epoch == 1 and number == 3 and not second:
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
fleet.barrier_worker()
optimizer.communicator.pull()
print("counted", sorted(set(model.weight.tolist())), flush=True)
fleet.finish()
"""


@pytest.mark.parametrize("kind", ["samples", RARE("iterable"), RARE("files")])
def test_each_sample_counts_once_although_a_trainer_was_killed(
    processes: Processes, kind: str
) -> None:
    """kill -9 of one of two trainers of an async job in its second epoch: the process that takes
    its place goes on in that epoch, in the order of that epoch.
    """
    for file in range(12):
        lines = "".join(f"1 {n}\n" for n in range(file * 10, file * 10 + 10))
        (processes.path / f"part-{file}").write_text(lines)
    (processes.path / "script.py").write_text(SCRIPT)
    flags = ("--servers", "2", "--trainers", "2", "--max-restarts", "1")
    launch = ("-m", "pserver", "launch", *flags, "script.py", kind)
    started = processes.python("launch", *launch)
    status, lines = started.status(patience=200), started.lines
    text = "\n".join(lines)

    assert status == 0, text
    counted = re.findall(r"counted \[(.*)\]", text)
    assert counted and set(counted) == {f"{float(EPOCHS)}"}, text
    again = re.findall(r"again (\d) (\[.*\])", text)
    assert again and again[0][0] == "1", text
    orders = [
        torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch)).tolist()
        for epoch in range(EPOCHS)
    ]
    for epoch, batch in again if kind == "samples" else ():
        places = [orders[int(epoch)].index(sample) for sample in json.loads(batch)]
        assert places == sorted(places), (epoch, batch)
