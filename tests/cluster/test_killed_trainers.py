"""Trainers that are killed: the others go on, and a step counts on all servers or on none.

Every trainer's gradients are ones, and the rate is a power of two: so each element of the
parameters says how many steps are in it.
"""

from __future__ import annotations

import re
import signal

import pytest

from tests.support.processes import Processes, Started
from tests.support.tiers import RARE

DEADLINE = 2.0
STEPS = 40
FAULT_STEP = 3

SCRIPT = """
import os, signal, sys
import torch
from trainer import fleet
from transpiler import DistributedStrategy

mode, where, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
strategy = DistributedStrategy()
strategy.a_sync = mode != "sync"
strategy.a_sync_configs = {
    "sync": {"lost_trainer": "go_on"},
    "async": {"send_queue_size": 1},
    "half_async": {"half_async": True},
    "staleness": {"send_queue_size": 1, "staleness": 2},
    "geo": {"k_steps": 1},
    "diloco": {"k_steps": 1, "outer_optimizer": {"type": "sgd", "lr": 1.0}},
}[mode]
fleet.init(strategy=strategy)
model = fleet.distributed_model(torch.nn.Linear(64, 400, bias=False))
before = model.weight.detach().clone().zero_()
with torch.no_grad():
    model.weight.zero_()
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
me, communicator = fleet.worker_index(), optimizer.communicator

def kill(*arguments, **named):
    os.kill(os.getpid(), signal.SIGKILL)

def arm():
    if where == "before":  # the gradients are on their way, and no commit is
        communicator.close_step = kill
    elif where == "between":  # one server has the commit, and the other one has not
        communicator.clients[1].channels[0].commit = kill

print("joined", flush=True)
for step in range(steps):
    if me == 1 and step == 2:
        arm()
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
fleet.barrier_worker()  # the lost one is not waited for
communicator.pull()
counted = (-model.weight.detach() / 0.5).unique().tolist()
fleet.finish()
print("finished", counted, flush=True)
"""

pytestmark = pytest.mark.processes


def counted(trainer: Started) -> list[float]:
    """How many steps are in the elements of the parameters, as it has found them at its end."""
    assert trainer.status() == 0, f"{trainer}"
    found = re.search(r"finished \[(.*)\]", trainer.lines[-1])
    assert found is not None, f"{trainer}"
    return [float(each) for each in found[1].split(", ")]


@pytest.mark.parametrize("where", [RARE("before"), "between"])
@pytest.mark.parametrize(
    "mode", ["sync", "async", *map(RARE, ["half_async", "staleness", "geo", "diloco"])]
)
def test_the_others_go_on_without_a_killed_trainer(
    processes: Processes, script: str, mode: str, where: str
) -> None:
    """kill -9 in step 3, before its commit or between two servers': its two decided steps count on
    both servers, the third on none; the job ends well, and the servers say who was lost.
    """
    servers = processes.servers(2, DEADLINE, "--once")
    endpoints = [endpoint for _, endpoint in servers]
    other, killed = processes.trainers(2, endpoints, DEADLINE, script, mode, where, str(STEPS))

    assert killed.status() == -signal.SIGKILL
    total = counted(other)
    assert len(total) == 1, f"{other}"  # all elements, of both servers
    if mode not in ("sync", "geo", "diloco"):  # which average
        assert total == [STEPS + FAULT_STEP - 1], f"{other}"
    for server, _ in servers:
        server.said("trainer 1 has sent no heartbeat .*the job goes on with trainer 0")
        assert server.status() == 0, f"{server}"
