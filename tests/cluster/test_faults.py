"""Processes that die or fall silent in the middle of a step: everybody else knows in time, says
who, and ends.

The fault happens at a named place: trainer 1 reaches step 3, its gradients are on their way, and
the step is not committed.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator

import pytest

from tests.support.load import scaled
from tests.support.processes import Processes, Started

DEADLINE = 3.0
KNOWN_WITHIN = DEADLINE + 10.0
FAULT_STEP = 3

SCRIPT = """
import os, signal, sys, time
import torch
from trainer import fleet
from transpiler import DistributedStrategy

steps, mode, fault, *pids = sys.argv[1:]
strategy = DistributedStrategy()
strategy.a_sync = mode == "async"
if not strategy.a_sync:
    strategy.a_sync_configs = {"lost_trainer": "stop"}
fleet.init(strategy=strategy)
model = fleet.distributed_model(torch.nn.Linear(64, 400))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
me = fleet.worker_index()

def strike():
    '''Called when the gradients of step 3 have been sent and before the step is committed.'''
    print("fault at", time.monotonic(), flush=True)
    if fault == "raise":
        raise ArithmeticError("the data of trainer 1 are gone")
    victim = int(pids[0]) if pids else os.getpid()
    os.kill(victim, getattr(signal, fault))

def at_fault(close_step=optimizer.communicator.close_step):
    def closing(*arguments):
        if me == 1 and optimizer.steps == 2 and fault != "none":
            strike()
        return close_step(*arguments)
    return closing

optimizer.communicator.close_step = at_fault()
print("joined", flush=True)
for step in range(int(steps)):
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
fleet.finish()
print("finished after", optimizer.steps, "steps", flush=True)
"""
FOREVER = "1000000000"
ANY_JOB = ("--keep-failed", "0")  # other jobs follow the failed ones at once

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def survivors(lasting: Processes, script: str) -> Iterator[list[tuple[Started, str]]]:
    """Two servers that outlive every lost trainer of this file: each test is another job for them,
    and a good one comes last.
    """
    servers = lasting.servers(2, DEADLINE, *ANY_JOB)
    yield servers
    assert_serves_another_job(lasting, servers, script)


def start(
    processes: Processes, servers: list[tuple[Started, str]], script: str, *arguments: str
) -> list[Started]:
    """Two trainers of a job on these servers."""
    return processes.trainers(
        2, [endpoint for _, endpoint in servers], DEADLINE, script, *arguments
    )


def assert_knows(trainer: Started, fault_at: float, error: str, who: str) -> None:
    """It ended in time, not with 0, and its last lines say what happened and who was the cause."""
    assert trainer.status(KNOWN_WITHIN + 30) not in (0, -signal.SIGKILL), trainer
    assert trainer.ended_at - fault_at < scaled(KNOWN_WITHIN), trainer
    last = "\n".join(trainer.lines[-3:])
    assert re.search(rf"pserver\.errors\.{error}: .*{re.escape(who)}", last), trainer


def fault_time(trainer: Started) -> float:
    return float(trainer.said(r"fault at (\S+)")[1])


def assert_serves_another_job(
    processes: Processes, servers: list[tuple[Started, str]], script: str
) -> None:
    """Two new trainers train on the same servers, which have not been restarted."""
    for trainer in start(processes, servers, script, "3", "sync", "none"):
        assert trainer.status() == 0, f"{processes.all}"
        assert trainer.lines[-1] == "finished after 3 steps"


def test_a_killed_trainer_is_named_by_everybody(
    processes: Processes, survivors: list[tuple[Started, str]], script: str
) -> None:
    """kill -9 of a trainer in mid-step, where each step needs it: the other ends with TrainerLost;
    the servers say who, and serve the next job.  See test_killed_trainers.py for the other modes.
    """
    begin = [len(server.lines) for server, _ in survivors]
    other, killed = start(processes, survivors, script, FOREVER, "sync", "SIGKILL")

    at = fault_time(killed)
    assert killed.status() == -signal.SIGKILL
    assert_knows(other, at, "TrainerLost", "trainer 1 has sent no heartbeat")
    for (server, _), first in zip(survivors, begin, strict=True):
        server.said("the job failed: .*trainer 1 has sent no heartbeat", first)


@pytest.mark.long
def test_a_stopped_trainer_is_named_and_is_told_when_it_goes_on(
    processes: Processes, survivors: list[tuple[Started, str]], script: str
) -> None:
    """SIGSTOP of a trainer for longer than the deadline: as if it had been killed; after SIGCONT it
    learns of it and ends too.
    """
    other, stopped = start(processes, survivors, script, FOREVER, "sync", "SIGSTOP")

    assert_knows(other, fault_time(stopped), "TrainerLost", "trainer 1 has sent no heartbeat")
    woken = time.monotonic()
    stopped.send(signal.SIGCONT)
    assert_knows(stopped, woken, "(TrainerLost|JobFailed)", "trainer 1 has sent no heartbeat")


def test_a_trainer_that_raises_ends_the_job_for_the_others_at_once(
    processes: Processes, survivors: list[tuple[Started, str]], script: str
) -> None:
    """An ordinary exception in one training loop: the others end with its message, without waiting
    for a deadline.
    """
    other, raising = start(processes, survivors, script, FOREVER, "sync", "raise")

    at = fault_time(raising)
    assert_knows(
        other,
        at,
        "JobFailed",
        "trainer 1 ended the job: ArithmeticError: the data of trainer 1 are gone",
    )
    assert other.ended_at - at < scaled(
        KNOWN_WITHIN
    )  # a deadline's end would have said TrainerLost
    assert raising.status() == 1 and any("ArithmeticError" in line for line in raising.lines), (
        raising
    )


def test_a_killed_server_is_named_by_every_trainer(processes: Processes, script: str) -> None:
    """kill -9 of a server in mid-step: both trainers end with ServerLost and its endpoint; the
    other server serves on.
    """
    servers = processes.servers(2, DEADLINE, *ANY_JOB)
    victim, endpoint = servers[1]
    trainers = start(processes, servers, script, FOREVER, "sync", "SIGKILL", str(victim.pid))

    at = fault_time(trainers[1])
    for trainer in trainers:
        assert_knows(trainer, at, "(ServerLost|JobFailed)", f"server 1 at {endpoint}")
    assert any(
        "pserver.errors.ServerLost" in line for trainer in trainers for line in trainer.lines
    ), f"{trainers}"
    assert victim.status() == -signal.SIGKILL
    assert_serves_another_job(processes, servers[:1], script)


@pytest.mark.long
def test_a_stopped_server_is_named_by_every_trainer(processes: Processes, script: str) -> None:
    """SIGSTOP of a server for longer than the deadline: as if it had been killed; after SIGCONT it
    takes the next job.
    """
    servers = processes.servers(2, DEADLINE, *ANY_JOB)
    victim, endpoint = servers[1]
    trainers = start(processes, servers, script, FOREVER, "sync", "SIGSTOP", str(victim.pid))

    at = fault_time(trainers[1])
    for trainer in trainers:
        assert_knows(trainer, at, "(ServerLost|JobFailed)", f"server 1 at {endpoint}")
    victim.send(signal.SIGCONT)
    silent = "trainer . has sent no heartbeat|the coordinator at .* has not been heard"
    victim.said(f"the job failed: (trainer . ended|{silent})")
    assert_serves_another_job(processes, servers, script)


@pytest.mark.long
def test_a_stop_that_is_shorter_than_the_deadline_loses_nobody(
    processes: Processes, survivors: list[tuple[Started, str]], script: str
) -> None:
    """A deadline means silence, not slowness: a trainer that stood still for a third of it goes on,
    and the job ends well.
    """
    slow, other = start(processes, survivors, script, "500", "sync", "none")
    slow.said("joined")
    slow.send(signal.SIGSTOP)
    stopped = time.monotonic()
    while time.monotonic() - stopped < DEADLINE / 3:
        time.sleep(0.05)  # the pause itself is what is tested
    slow.send(signal.SIGCONT)

    assert slow.status() == other.status() == 0, f"{slow}\n{other}"
