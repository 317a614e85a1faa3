"""Trainers of sync jobs that are lost: the others wait for another process in their place, go on
without them, or stop, as the strategy says.

The rate is a power of two, and trainer 0's gradients are ones, trainer 1's threes.  So a step of
both moves every element by twice the rate, and a step of trainer 0 alone by the rate: the
parameters say which trainers were in their steps.
"""

from __future__ import annotations

import re
import signal

import pytest

from tests.support.processes import Processes, Started
from tests.support.tiers import RARE

DEADLINE = 2.0
NOBODY_COMES = 8  # seconds; no less than what trainers need to begin
STEPS = 12
FAULT_STEP = 3
RATE = 0.5

SCRIPT = f"""
import os, signal, sys
import torch
from trainer import fleet
from transpiler import DistributedStrategy

policy, where = sys.argv[1], sys.argv[2]
strategy = DistributedStrategy()
strategy.a_sync = False
strategy.a_sync_configs = {{"lost_trainer": policy}}
fleet.init(strategy=strategy)
model = fleet.distributed_model(torch.nn.Linear(64, 400, bias=False))
torch.nn.init.zeros_(model.weight)
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr={RATE}))
me, communicator = fleet.worker_index(), optimizer.communicator
print("begins at", optimizer.steps, flush=True)

def kill(*arguments, **named):
    os.kill(os.getpid(), signal.SIGKILL)

while optimizer.steps < {STEPS}:
    if optimizer.steps == {FAULT_STEP - 1} and me == 1:
        if where == "before":  # no server has the step
            communicator.close_step = kill
        elif where == "between":  # one has it, and the other one has not
            communicator.clients[1].channels[0].commit = kill
        elif where == "after":  # all have it, and it has not seen the answer
            communicator.lanes[0].finish = kill
    (model(torch.ones(1, 64)).sum() * (2 * me + 1)).backward()
    optimizer.step()
    optimizer.zero_grad()
print("finished", (-model.weight.detach() / {RATE}).unique().tolist(), flush=True)
fleet.finish()
"""

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


def moved(trainer: Started) -> list[float]:
    """How far the elements are at a trainer's end, in steps of gradient one."""
    assert trainer.status() == 0, f"{trainer}"
    return [float(each) for each in trainer.said(r"^finished \[(.*)\]")[1].split(", ")]


def in_step(where: str) -> int:
    """How many steps the killed trainer is in."""
    return FAULT_STEP - 1 + (where == "after")


@pytest.mark.parametrize("where", [RARE("before"), RARE("between"), "after"])
def test_another_process_takes_the_place_and_every_step_has_both(
    processes: Processes, script: str, where: str
) -> None:
    """The others wait; the new one begins at the step that the lost one was not in, with the same
    values, so that the parameters are those of a job without a loss, to the bit.
    """
    servers = processes.servers(2, DEADLINE, "--once")
    endpoints = [endpoint for _, endpoint in servers]
    other, killed = processes.trainers(2, endpoints, DEADLINE, script, "wait", where)

    assert killed.status() == -signal.SIGKILL
    servers[0][0].said("another process may take its place")
    another = processes.trainers(2, endpoints, DEADLINE, script, "wait", "never")[1]

    assert moved(other) == moved(another) == [2.0 * STEPS], [other, another]
    assert another.said(r"begins at (\d+)")[1] == str(in_step(where)), another
    for server, _ in servers:
        assert server.status() == 0, f"{server}"


@pytest.mark.observes("a_sync_configs.lost_trainer")
@pytest.mark.long
@pytest.mark.parametrize("where", ["before", "between", "after"])
@pytest.mark.parametrize("policy", ["wait", "go_on"])
def test_they_go_on_without_it_when_nobody_comes(
    processes: Processes, script: str, policy: str, where: str
) -> None:
    """Under "wait" after the start timeout.  The lost trainer is in its decided steps, and in no
    other; the mean of the others is over those that are left.
    """
    servers = processes.servers(2, DEADLINE, "--once", "--start-timeout", str(NOBODY_COMES))
    endpoints = [endpoint for _, endpoint in servers]
    other, killed = processes.trainers(2, endpoints, DEADLINE, script, policy, where)

    assert killed.status() == -signal.SIGKILL
    assert moved(other) == [2.0 * in_step(where) + STEPS - in_step(where)], f"{other}"
    for server, _ in servers:
        assert server.status() == 0, f"{server}"
    words = f"no process takes trainer 1's place within {processes.scaled(NOBODY_COMES):g} s"
    waited = words in "\n".join(servers[0][0].lines)
    assert waited == (policy == "wait"), servers[0][0]


def test_the_job_stops_where_the_strategy_says_so(processes: Processes, script: str) -> None:
    """The other trainer gets TrainerLost."""
    servers = processes.servers(2, DEADLINE, "--once")
    endpoints = [endpoint for _, endpoint in servers]
    other, killed = processes.trainers(2, endpoints, DEADLINE, script, "stop", "between")

    assert killed.status() == -signal.SIGKILL
    assert other.status() == 1 and "TrainerLost" in "\n".join(other.lines), f"{other}"


@pytest.mark.parametrize("restarts", [RARE(0), 1])
def test_launch_starts_it_again_or_says_that_nobody_comes(
    processes: Processes, script: str, restarts: int
) -> None:
    """With a restart left the place is taken; without one the others go on at once."""
    once = SCRIPT.replace("and me == 1:", "and me == 1 and not os.path.exists('died'):")
    once = once.replace("    os.kill(", "    open('died', 'w').close()\n    os.kill(")
    (processes.path / "script.py").write_text(once)
    flags = ("--servers", "2", "--trainers", "2", "--max-restarts", str(restarts))
    words = ("-m", "pserver", "launch", *flags, "script.py", "wait", "between")
    launch = processes.python("launch", *words)

    assert launch.status(patience=150) == 0, launch
    text = "\n".join(launch.lines)
    ends = {float(each) for each in re.findall(r"finished \[(\S+)\]", text)}
    alone = 2.0 * (FAULT_STEP - 1) + STEPS - (FAULT_STEP - 1)
    assert ends == {2.0 * STEPS if restarts else alone}, launch
    assert ("no process takes trainer 1's place again" in text) == (not restarts), launch
