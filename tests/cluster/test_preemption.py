"""A trainer that gets SIGTERM with a grace period ends its step and leaves; the others go on, and
nothing that it has taken is lost: with real processes.  For every mode see test_trainer_faults.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.cluster.scripted_jobs import SCRIPT, Job, moved, said_at
from tests.cluster.scripted_trainer import GRADIENT, Plan
from tests.support.launched import LAUNCH, environment
from tests.support.load import run
from tests.support.processes import Processes, Started

STEPS, AT, TRAINERS = 9, 4, 3
HEARTBEAT = 20.0  # a timeout that nothing here waits for
GRACE = {"PSERVER_GRACE": "30"}
FIRST = """
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


def plan(mode: str, victim: int, steps: int = STEPS) -> Plan:
    """One of three gets SIGTERM in step ``AT``, and the others meet behind that."""
    meet = tuple((n, f"stepped {AT}", "meet") for n in range(TRAINERS) if n != victim)
    return Plan(
        mode, trainers=TRAINERS, steps=steps, at=((victim, f"before {AT}", "SIGTERM"), *meet)
    )


def _merged(trainer: int, victim: int) -> float:
    """Every step, from queues and merges, too."""
    return AT if trainer == victim else STEPS


def _geo(trainer: int, victim: int) -> float:
    """Every third step a part of what has changed leaves, and at the end what there is."""
    own = served = 0.0
    for step in range(1, STEPS + 1):
        if trainer == victim and step > AT:
            break
        own += 1.0
        left = trainer == victim and step == AT
        if step % 3 == 0 or left:
            served += (own - served) / (TRAINERS if step <= AT else TRAINERS - 1)
    return served


def _diloco(trainer: int, victim: int) -> float:
    """Its last window is shorter than the others', in their mean."""
    return 3 / 3 + 1 / 3 if trainer == victim else 3 / 3 + 3 / 3 + 3 / 2


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("mode", "expected"), [("merged", _merged), ("geo by 3", _geo), ("diloco by 3", _diloco)]
)
def test_what_a_trainer_has_kept_leaves_with_it(
    processes: Processes, mode: str, expected: Callable[[int, int], float], victim: int
) -> None:
    """Rows that its queues, its merges and its windows had kept."""
    job = Job(processes, HEARTBEAT, trainers=TRAINERS)
    trainers = [job.trainer(n, plan(mode, victim), **GRACE) for n in range(TRAINERS)]

    assert [each.status() for each in trainers] == [143 * (n == victim) for n in range(TRAINERS)]
    assert job.statuses() == [0, 0]
    last = max((each for n, each in enumerate(trainers) if n != victim), key=finished_at)
    steps = [distance / GRADIENT for distance in moved(last)["columns"]]
    assert steps == pytest.approx([expected(n, victim) for n in range(TRAINERS)]), trainers


def finished_at(trainer: Started) -> float:
    """When a trainer has looked at what the servers have."""
    return said_at(trainer, "^record")


@pytest.mark.long  # tests/pserver/launcher/test_launch_preemption.py stands for it
def test_launch_counts_a_preempted_trainer_and_ends_well(tmp_path: Path) -> None:
    """``--grace`` gives trainers their grace period; the last word says who was preempted."""
    flags = ("--servers", "2", "--trainers", "3", "--grace", "30")
    done = run(
        [*LAUNCH, *flags, SCRIPT, plan("sync", 1).word],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    lines = [line for line in done.stderr.splitlines() if line.startswith("pserver launch: ")]
    assert lines[-1] == f"pserver launch: trainer 1 was preempted after step {AT}", done.stderr


def test_the_least_trainer_left_saves_writes_and_has_the_buffers(processes: Processes) -> None:
    """Trainer 0 is preempted.  Checkpoints go on; batch norm's statistics move; what the scripts
    write arrives.
    """
    (processes.path / "train.py").write_text(FIRST)
    job = Job(processes, HEARTBEAT, trainers=3, script=str(processes.path / "train.py"))
    trainers = [job.trainer(n, **GRACE) for n in range(3)]

    assert [trainer.status() for trainer in trainers] == [143, 0, 0], trainers
    assert job.statuses() == [0, 0], processes.all
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


@pytest.mark.long  # tests/pserver/job/test_stragglers.py stands for it
def test_a_slow_trainer_is_named(processes: Processes) -> None:
    """Though in a sync job every trainer's step takes as long as its own."""
    job = Job(processes, HEARTBEAT, "--straggler-factor", "2.5", servers=1, trainers=3)
    trainers = []
    for number, pause in enumerate((0.02, 0.02, 0.2)):
        steps = Plan(
            "sync", trainers=3, steps=40, pause=pause, at=((number, "ends", "wait enough"),)
        )
        trainers.append(job.trainer(number, steps))
    named = job.servers[0].said(
        r"trainer (\d) is slow: it computes 0\.\d+ s a step, (\d+\.\d) times"
    )
    status = processes.python("status", "-m", "pserver", "status", job.endpoints[0])
    status.said(r"trainer 2 joined.*slow: 0\.\d+ s of its own a step, \d+\.\d times the others'")

    assert named[1] == "2" and float(named[2]) > 2.5
    assert status.status() == 0
    (processes.path / "enough").touch()
    assert [trainer.status() for trainer in trainers] == [0, 0, 0], trainers
