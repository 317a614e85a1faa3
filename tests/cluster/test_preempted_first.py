"""Trainer 0 is preempted: the least trainer that is left does what trainer 0 did for all; with
real processes.
"""

from __future__ import annotations

import json

import pytest
import torch

from tests.support.processes import Processes

HEARTBEAT = 20.0  # a timeout that nothing here waits for
SCRIPT = """
import os, signal, sys
import torch
from torch.utils.data import DataLoader
from trainer import fleet

fleet.init(checkpoint="saved", every=0.001)
model = fleet.distributed_model(torch.nn.Sequential(torch.nn.BatchNorm1d(1), torch.nn.Linear(1, 1)))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.0))
me = fleet.worker_index()
for x in fleet.shard(DataLoader(torch.arange(72.0), batch_size=2)):
    step = optimizer.steps + 1
    if step == 4 and me == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    if step == 5:
        fleet.barrier_worker()
    if step >= 8:  # what a script writes into parameters, alike on every trainer
        with torch.no_grad():
            model[1].weight.fill_(step)
    model(x[:, None] + 10 * step).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("buffer", model[0].running_mean.item(), model[0].num_batches_tracked.item(), flush=True)
fleet.export("model.pt")
print("took", optimizer.steps, flush=True)
fleet.finish()
"""

pytestmark = pytest.mark.processes


def test_the_least_trainer_left_saves_writes_and_has_the_buffers(processes: Processes) -> None:
    """Checkpoints go on; batch norm's statistics move; what the scripts write arrives."""
    servers = processes.servers(2, HEARTBEAT, "--once")
    (processes.path / "train.py").write_text(SCRIPT)
    job = {
        "TRAINING_ROLE": "TRAINER",
        "TRAINERS": "3",
        "PSERVER_ENDPOINTS": ",".join(endpoint for _, endpoint in servers),
        "PSERVER_GRACE": "30",
    }
    script = str(processes.path / "train.py")
    trainers = [
        processes.python(f"trainer {n}", script, **job, TRAINER_ID=str(n)) for n in range(3)
    ]

    assert [trainer.status() for trainer in trainers] == [143, 0, 0], trainers
    assert [server.status() for server, _ in servers] == [0, 0], servers
    trainers[1].said("trainer 0 was preempted after step 4; .* trainer 1 is now the leader")
    took = int(trainers[1].said(r"took (\d+)")[1])
    listed = json.loads((processes.path / "saved" / "checkpoints.json").read_text())
    assert f"step-{took - 1:06d}" in json.dumps(listed), (took, listed, trainers)
    values = torch.load(processes.path / "model.pt", weights_only=True)
    assert values["1.weight"].item() == took
    assert values["0.num_batches_tracked"].item() == took
    for trainer in trainers[1:]:
        mean = float(trainer.said(r"buffer (\S+)")[1])
        assert mean == pytest.approx(values["0.running_mean"].item())
