"""Trainers of mixed jobs that are lost: rows are on servers, and the trainers average the gradients
of a dense layer among themselves; each with ``fleet``, and as programs.

The rate is a power of two, and trainer 0's gradients are ones, trainer 1's threes.  So a step of
both moves every element of the dense layer by twice the rate, and a step of trainer 0 alone by the
rate: the parameters say which trainers were in their steps.  The same holds for rows in sync mode;
in async mode each trainer's step moves them by itself.
"""

from __future__ import annotations

import signal

import pytest
import torch

from tests.support.processes import Processes, Started
from tests.support.tiers import RARE

DEADLINE = 4.0
STEPS = 12
FAULT_STEP = 3
RATE = 0.5

SCRIPT = f"""
import os, signal, sys
import torch
from trainer import Constant, DistributedEmbedding, Executor, fleet, row_optimizers
from transpiler import DistributedStrategy, DistributeTranspiler, capture

kind, mode, policy, where = sys.argv[1:]

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        rows = row_optimizers.SGD(lr={RATE})
        self.rows = DistributedEmbedding(4, optimizer=rows, init=Constant(0.0))
        self.dense = torch.nn.Linear(64, 400, bias=False)

    def forward(self, ids):
        return self.rows(ids).sum() + self.dense(torch.ones(1, 64)).sum()

strategy = DistributedStrategy()
strategy.a_sync_configs = {{"modes": {{"rows*": mode, "*": "collective"}}, "lost_trainer": policy}}
if mode == "async":  # each step waits for its own result
    strategy.a_sync_configs = {{**strategy.a_sync_configs, "send_queue_size": 1}}
model, me = Net(), int(os.environ["TRAINER_ID"])
torch.nn.init.zeros_(model.dense.weight)
sgd = torch.optim.SGD(model.parameters(), lr={RATE} / 2, momentum=0.5)
ids, factor = torch.arange(50), torch.tensor(2.0 * me + 1)

class Eager:
    def __init__(self):
        fleet.init(strategy=strategy)
        self.model = fleet.distributed_model(model)
        self.optimizer = fleet.distributed_optimizer(sgd)
        self.communicator = self.optimizer.communicator
        self.meet, self.finish = fleet.barrier_worker, fleet.finish
        if kind == "loading":  # what every process does, the one that comes later, too
            folder = os.path.dirname(sys.argv[0])
            path = os.path.join(folder, os.environ["PSERVER_ENDPOINTS"].split(":")[-1])
            fleet.save(path)
            fleet.load(path)

    def steps(self):
        return self.optimizer.steps

    def step(self):
        (self.model(ids) * factor).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

class Programs:
    def __init__(self):
        forward = lambda model, ids, factor: model(ids) * factor
        main, startup = capture(model, forward, sgd, (ids, factor))
        job = DistributeTranspiler()
        servers = os.environ["PSERVER_ENDPOINTS"]
        job.transpile(me, main, servers, 2, startup_program=startup, strategy=strategy)
        self.program, self.executor = job.get_trainer_program(), Executor()
        self.executor.run(job.get_startup_program())
        self.communicator = self.executor.connection_of(self.program.storage)
        self.finish = self.executor.close

    def steps(self):
        return self.executor.steps(self.program)

    def step(self):
        self.executor.run(self.program, feed=(ids, factor))

    def meet(self):
        self.communicator.barrier("the end")
        self.executor.flush()

job = Programs() if kind == "program" else Eager()
communicator = job.communicator
print("begins at", job.steps(), flush=True)

def kill(*arguments, **named):
    os.kill(os.getpid(), signal.SIGKILL)

while job.steps() < {STEPS}:
    if job.steps() == {FAULT_STEP - 1} and me == 1:
        if where == "average":  # the others are in it, or come to it
            communicator.dense_allreduce.average = kill
        elif where == "commit":  # in sync mode all have the average
            communicator.close_step = kill
        elif where == "between":  # one server has the step, and the other one has not
            communicator.clients[1].channels[0].commit = kill
        elif where == "after":  # all have it, and it has not seen the answer
            communicator.lanes[0].finish = kill
        elif where == "preempted":
            os.kill(os.getpid(), signal.SIGTERM)
    job.step()
job.meet()  # the others' last steps are applied
rows = model.rows(ids).detach()
print("rows", (-rows / {RATE}).unique().tolist(), flush=True)
print("dense", model.dense.weight.unique().tolist(), flush=True)
job.finish()
print("finished", flush=True)
"""


pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


def ended(trainer: Started, word: str) -> str:
    """What a trainer says of its rows, or of its dense layer, at its end."""
    assert trainer.status() == 0, f"{trainer}"
    return trainer.said(rf"^{word} (\[.*\])")[1]


def dense(both: int) -> str:
    """The dense layer as one process computes it, from the mean gradient of the trainers that are
    recorded as members: both, for so many steps, and then trainer 0.
    """
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=RATE / 2, momentum=0.5)
    for step in range(STEPS):
        weight.grad = torch.tensor([2.0 if step < both else 1.0])
        optimizer.step()
    return str(weight.tolist())


def in_step(where: str) -> int:
    """In how many steps both are."""
    return FAULT_STEP - 1 + (where == "after")


@pytest.mark.parametrize(
    ("kind", "mode", "where"),
    [
        RARE("eager", "sync", "average"),
        RARE("eager", "sync", "commit"),
        RARE("eager", "sync", "between"),
        RARE("eager", "sync", "after"),
        RARE("eager", "async", "average"),
        RARE("eager", "async", "after"),
        RARE("program", "sync", "average"),
        ("program", "sync", "commit"),
        RARE("program", "sync", "between"),
        RARE("program", "sync", "after"),
        RARE("program", "async", "average"),
        RARE("program", "async", "after"),
        RARE("loading", "sync", "commit"),
        RARE("loading", "async", "average"),
    ],
)
def test_another_process_takes_the_place_and_every_step_has_both(
    processes: Processes, script: str, kind: str, mode: str, where: str
) -> None:
    """The others wait; the new one has the dense layer and what its optimizer keeps of it.  So all
    ends as without a loss, to the bit, on both; also where the script has loaded a checkpoint
    before it trains.
    """
    servers = processes.servers(2, DEADLINE, "--once")
    endpoints = [endpoint for _, endpoint in servers]
    other, killed = processes.trainers(2, endpoints, DEADLINE, script, kind, mode, "wait", where)

    assert killed.status() == -signal.SIGKILL
    servers[0][0].said("another process may take its place")
    another = processes.python(
        "another",
        *(script, kind, mode, "wait", "never"),
        TRAINING_ROLE="TRAINER",
        TRAINERS="2",
        TRAINER_ID="1",
        PSERVER_ENDPOINTS=",".join(endpoints),
        PSERVER_HEARTBEAT_TIMEOUT=str(DEADLINE),
    )

    assert ended(other, "dense") == ended(another, "dense") == dense(STEPS), [other, another]
    assert ended(other, "rows") == ended(another, "rows"), [other, another]
    # in async mode each of the two moves them by its own gradient, and of the last step of the one
    # that is killed just after its commit the averaged part may count alone
    moved = {(2.0 if mode == "sync" else 4.0) * STEPS}
    moved |= {4.0 * STEPS - 3.0} if (mode, where) == ("async", "after") else set()
    assert ended(other, "rows") in [str([each]) for each in moved], other
    for server, _ in servers:
        assert server.status() == 0, f"{server}"


@pytest.mark.observes("a_sync_configs.lost_trainer")
@pytest.mark.parametrize(
    ("kind", "mode", "policy", "where"),
    [
        RARE("eager", "sync", "go_on", "average"),
        RARE("eager", "sync", "go_on", "commit"),
        RARE("eager", "sync", "go_on", "between"),
        RARE("eager", "sync", "go_on", "after"),
        RARE("eager", "sync", "wait", "commit"),
        RARE("eager", "async", "go_on", "average"),
        RARE("eager", "async", "wait", "after"),
        RARE("program", "sync", "go_on", "average"),
        RARE("program", "sync", "go_on", "commit"),
        ("program", "sync", "go_on", "between"),
        RARE("program", "sync", "go_on", "after"),
        RARE("program", "sync", "wait", "commit"),
        RARE("program", "async", "go_on", "average"),
        RARE("program", "async", "wait", "after"),
    ],
)
def test_the_others_go_on_without_it_when_nobody_comes(
    processes: Processes, script: str, kind: str, mode: str, policy: str, where: str
) -> None:
    """Under "wait" after the start timeout.  The dense layer is that of one process which averages
    over the trainers that were there; in sync mode rows have the same trainers in each step.
    """
    servers = processes.servers(2, DEADLINE, "--once", "--start-timeout", "15")
    endpoints = [endpoint for _, endpoint in servers]
    other, killed = processes.trainers(2, endpoints, DEADLINE, script, kind, mode, policy, where)

    assert killed.status() == -signal.SIGKILL
    both = in_step(where)
    assert ended(other, "dense") == dense(both), other
    if mode == "sync":
        assert ended(other, "rows") == str([2.0 * both + STEPS - both]), other
    for server, _ in servers:
        assert server.status() == 0, f"{server}"
    seconds = f"{processes.scaled(15):g} s"
    waited = f"no process takes trainer 1's place within {seconds}" in "\n".join(
        servers[0][0].lines
    )
    assert waited == (policy == "wait"), servers[0][0]


@pytest.mark.parametrize("kind", ["eager", RARE("program")])
def test_what_counts_in_the_average_only_is_said(
    processes: Processes, script: str, kind: str
) -> None:
    """An async trainer that dies with the average, before its commit: the others have its part in
    the average, most likely, and no server has its rows.
    """
    servers = processes.servers(2, DEADLINE, "--once")
    endpoints = [endpoint for _, endpoint in servers]
    how = (script, kind, "async", "go_on", "commit")
    other, killed = processes.trainers(2, endpoints, DEADLINE, *how)

    assert killed.status() == -signal.SIGKILL
    assert ended(other, "rows") == str([float(STEPS + 3 * (FAULT_STEP - 1))]), other
    assert ended(other, "dense") in (dense(FAULT_STEP - 1), dense(FAULT_STEP)), other
    said = [line for line in servers[0][0].lines if "count in what trainers average" in line]
    averaged = ended(other, "dense") == dense(FAULT_STEP)
    assert len(said) == averaged and all("1 steps of trainer 1" in line for line in said), servers


@pytest.mark.parametrize("kind", ["eager", "program"])
@pytest.mark.parametrize("mode", [RARE("sync"), RARE("async")])
def test_the_job_stops_where_the_strategy_says_so(
    processes: Processes, script: str, kind: str, mode: str
) -> None:
    """The other trainer gets TrainerLost."""
    servers = processes.servers(2, DEADLINE, "--once")
    endpoints = [endpoint for _, endpoint in servers]
    other, killed = processes.trainers(2, endpoints, DEADLINE, script, kind, mode, "stop", "after")

    assert killed.status() == -signal.SIGKILL
    assert other.status() == 1 and "TrainerLost" in "\n".join(other.lines), f"{other}"


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("eager", "async"), RARE("eager", "sync"), RARE("program", "async"), RARE("program", "sync")],
)
def test_a_trainer_that_is_preempted_ends_its_step_and_leaves(
    processes: Processes, script: str, kind: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a grace period; the other one averages by itself from the next step on."""
    monkeypatch.setenv("PSERVER_GRACE", "30")
    servers = processes.servers(2, DEADLINE, "--once")
    endpoints = [endpoint for _, endpoint in servers]
    other, left = processes.trainers(
        2, endpoints, DEADLINE, script, kind, mode, "wait", "preempted"
    )

    assert left.status() == 143, left
    left.said(f"trainer 1 was preempted after step {FAULT_STEP}")
    assert ended(other, "dense") == dense(FAULT_STEP), other
    rows = 4.0 * FAULT_STEP + STEPS - FAULT_STEP
    rows = rows if mode == "async" else 2.0 * FAULT_STEP + STEPS - FAULT_STEP
    assert ended(other, "rows") == str([rows]), other
