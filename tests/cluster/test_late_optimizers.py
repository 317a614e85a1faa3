"""A trainer that comes late to a job of several optimizers, or of groups that were added: its
script has made only the first of them when it asks to join.

The rate is a power of two and gradients are ones, so the parameters say how many steps of both
trainers are in them.
"""

from __future__ import annotations

import signal

import pytest

from tests.support.processes import Processes, Started
from tests.support.tiers import RARE

DEADLINE = 4.0
STEPS, FAULT_STEP, HOLD = 12, 3, 8
RATE = 0.5

SCRIPT = f"""
import atexit, os, signal, sys, time
from pathlib import Path
import torch
from pserver.errors import PartialPlan
from trainer import fleet
from transpiler import DistributedStrategy

mode, further, role = sys.argv[1:4]
strategy = DistributedStrategy()
strategy.a_sync = mode != "sync"
if mode != "sync":  # each step waits for its own result
    strategy.a_sync_configs = {{"send_queue_size": 1}}
fleet.init(strategy=strategy)
first, second = (torch.nn.Linear(64, 400, bias=False) for _ in range(2))
for model in (first, second):
    torch.nn.init.zeros_(model.weight)
    fleet.distributed_model(model)
optimizer = fleet.distributed_optimizer(torch.optim.SGD(first.parameters(), lr={RATE}))
if role == "early":  # it can do nothing yet
    atexit.register(Path("ended").touch)
    try:
        fleet.barrier_worker()
    except PartialPlan as error:
        print("early:", error, flush=True)
if further == "optimizer":
    other = fleet.distributed_optimizer(torch.optim.SGD(second.parameters(), lr={RATE}))
    optimizers = [optimizer, other]
else:
    optimizer.add_param_group({{"params": list(second.parameters()), "lr": {RATE}}})
    optimizers = [optimizer]
print("begins at", optimizer.steps, flush=True)
me = fleet.worker_index()
if role == "early":
    Path("joined").touch()
while optimizer.steps < {STEPS}:
    if optimizer.steps == {HOLD} and role == "stays":
        end = time.monotonic() + 600  # the test's own waits end sooner
        while not (Path("joined").exists() or Path("ended").exists()) and time.monotonic() < end:
            time.sleep(0.02)
    (first(torch.ones(1, 64)).sum() + second(torch.ones(1, 64)).sum()).backward()
    for each in optimizers:
        each.step()
        each.zero_grad()
    if role == "dies" and optimizer.steps == {FAULT_STEP}:
        os.kill(os.getpid(), signal.SIGKILL)
fleet.barrier_worker()  # the others' last steps are applied
optimizer.flush()
moved = [(-model.weight.detach() / {RATE}).unique().tolist() for model in (first, second)]
print("finished", optimizers[-1].steps, moved, flush=True)
fleet.finish()
"""

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


def trainers(processes: Processes, script: str, mode: str, further: str) -> tuple[Started, Started]:
    """A trainer that stays, and another in the place of one that was killed."""
    servers = processes.servers(2, DEADLINE, "--once")
    endpoints = ",".join(endpoint for _, endpoint in servers)

    def started(trainer: int, role: str) -> Started:
        environment = {
            "TRAINING_ROLE": "TRAINER",
            "TRAINERS": "2",
            "TRAINER_ID": str(trainer),
            "PSERVER_ENDPOINTS": endpoints,
            "PSERVER_HEARTBEAT_TIMEOUT": str(DEADLINE),
        }
        return processes.python(f"{role} {trainer}", script, mode, further, role, **environment)

    other, killed = started(0, "stays"), started(1, "dies")
    assert killed.status() == -signal.SIGKILL
    servers[0][0].said("the job goes on with trainer 0")
    return other, started(1, "early")


@pytest.mark.parametrize("further", ["optimizer", RARE("group")])
def test_it_joins_when_it_has_made_all_of_them(
    processes: Processes, script: str, further: str
) -> None:
    """Until then a joint call says why there is none; the steps of the lost one, and of the one in
    its place, all count.
    """
    other, another = trainers(processes, script, "async", further)

    assert another.status() == other.status() == 0, f"{processes.all}"
    another.said(r"^early: .*has distributed 1 of the job's 2 parameter groups")
    begins = int(another.said(r"^begins at (\d+)")[1])
    assert FAULT_STEP <= begins <= HOLD
    both = float(STEPS + FAULT_STEP + STEPS - begins)
    said = [each.said(rf"^finished {STEPS} (.*)$")[1] for each in (other, another)]
    assert f"[[{both}], [{both}]]" in said, f"{processes.all}"  # the one that reads them last


def test_trainers_that_take_the_steps_together_let_nobody_in(
    processes: Processes, script: str
) -> None:
    """The others may stand between two steps of an iteration that it would begin: they go on
    without it at once, and it is told so.
    """
    other, another = trainers(processes, script, "sync", "optimizer")

    assert other.status() == 0, f"{processes.all}"
    other.said(rf"^finished {STEPS} \[\[{STEPS}.0\], \[{STEPS}.0\]\]")
    assert another.status() != 0, f"{processes.all}"
    another.said("Refused: .*trainer 1 cannot join: .* after training has started")
