"""Connections that die between real processes, while new ones are possible: the job goes on."""

from __future__ import annotations

import re

import pytest

from tests.faults.network_path import NetworkPath
from tests.support.processes import Processes
from tests.support.tiers import RARE

TIMEOUT = 3.0
ADDRESS = "127.0.0.2"
SCRIPT = """
import sys
import torch
from trainer import fleet

fleet.init()
torch.manual_seed(1)
model = fleet.distributed_model(torch.nn.Linear(64, 400))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

def steps(count):
    for step in range(count):
        model(torch.full((2, 64), 0.01 * (step + fleet.worker_index()))).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

steps(5)
print("half", flush=True)
sys.stdin.readline()
steps(5)
fleet.barrier_worker()
fleet.finish()
print("sum", model.weight.double().sum().item(), flush=True)
"""

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("transport", "cut"),
    [("tcp", "drop"), RARE("tcp", "reset"), RARE("grpc", "drop"), RARE("grpc", "reset")],
)
def test_a_job_outlives_its_connections(processes: Processes, transport: str, cut: str) -> None:
    """Trainer 1's connections are cut in the middle of the job: both finish, with the same values,
    and nobody was lost.
    """
    script = processes.path / "train.py"
    script.write_text(SCRIPT)
    ((server, endpoint),) = processes.servers(1, TIMEOUT, "--once")
    ready = server.said(r"pserver ready at \S+ \((.*)\)")[1]
    port = endpoint.rpartition(":")[2]
    ports = [int(port), *map(int, re.findall(r"tcp (\d+)", ready))]
    with NetworkPath(ADDRESS, ports) as path:
        job = {"TRAINING_ROLE": "TRAINER", "TRAINERS": "2", "PSERVER_TRANSPORT": transport}
        trainers = [
            processes.python(
                f"trainer {number}",
                str(script),
                **job,
                TRAINER_ID=str(number),
                PSERVER_ENDPOINTS=f"{host}:{port}",
            )
            for number, host in enumerate(("127.0.0.1", ADDRESS))
        ]
        for trainer in trainers:
            trainer.said("half")
        getattr(path, cut)()
        for trainer in trainers:
            trainer.tell("go on")

        assert [trainer.status() for trainer in trainers] == [0, 0], f"{processes.all}"
        assert server.status() == 0, f"{processes.all}"
        sums = {trainer.said(r"sum (\S+)")[1] for trainer in trainers}
        assert len(sums) == 1, f"{processes.all}"
