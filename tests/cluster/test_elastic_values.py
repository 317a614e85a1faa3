"""Values that all trainers make, in a job that goes on without one that was lost."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.support.processes import Processes
from tests.support.tiers import RARE

DEADLINE = 2.0

SCRIPT = """
import json, os, signal, sys
import torch
from pserver.errors import TrainerLost
from trainer import fleet
from trainer.collective.elastic_group import ElasticGroup
from trainer.metrics import Mean
from transpiler import DistributedStrategy

mode, where = sys.argv[1:]
strategy = DistributedStrategy()
strategy.a_sync = mode == "async"
if not strategy.a_sync:
    strategy.a_sync_configs = {"lost_trainer": "go_on"}
fleet.init(strategy=strategy)
model = fleet.distributed_model(torch.nn.Linear(2, 1))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
me = fleet.worker_index()

def kill(*arguments, **named):
    os.kill(os.getpid(), signal.SIGKILL)

def step():
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

def values():
    mean = Mean()
    mean.update(torch.full((me + 1,), float(me)))
    return [
        fleet.all_reduce(torch.tensor([2.0**me])).item(),
        fleet.all_reduce(torch.tensor([float(me)]), "max").item(),
        fleet.all_reduce(torch.tensor([float(me)]), "mean").item(),
        [each.tolist() for each in fleet.all_gather(torch.arange(me + 1))],
        fleet.all_gather_object({"me": me}),
        fleet.broadcast_object(f"of {me}", src=2),
        mean.compute(),
    ]

step()
found = [values()]
if me == 1:
    if where == "between":
        kill()
    elif where == "told":  # the others count on it, and wait for it in the operation
        ElasticGroup.run = kill
    elif where == "confirmed":  # it has the result, as they have
        ElasticGroup.confirmed = kill
step()
found.append(values())
step()
found.append(values())
try:
    fleet.broadcast_object("", src=1)
except TrainerLost as error:
    found.append(str(error))
fleet.finish()
print("found", json.dumps(found), flush=True)
"""

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


def of(trainers: list[int]) -> list[object]:
    """What the calls give to these trainers."""
    samples = [float(t) for t in trainers for _ in range(t + 1)]
    return [
        sum(2.0**t for t in trainers),
        2.0,
        sum(trainers) / len(trainers),
        [list(range(t + 1)) for t in trainers],
        [{"me": t} for t in trainers],
        "of 2",
        sum(samples) / len(samples),
    ]


@pytest.mark.parametrize("where", [RARE("between"), "told", RARE("confirmed")])
@pytest.mark.parametrize("mode", ["sync", RARE("async")])
def test_values_are_those_of_the_trainers_that_are_there(
    processes: Processes, tmp_path: Path, mode: str, where: str
) -> None:
    """All that are left have the same; one that dies in a call takes its part with it, unless all
    others have the result already.
    """
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    endpoints = [endpoint for _, endpoint in processes.servers(2, DEADLINE, "--once")]
    first, killed, last = processes.trainers(3, endpoints, DEADLINE, str(script), mode, where)

    assert killed.status() == -signal.SIGKILL
    found = []
    for each in (first, last):
        assert each.status() == 0, f"{each}"
        found.append(json.loads(each.said(r"^found (.*)")[1]))
    after = of([0, 2])
    during = [7.0, *after[1:]] if where == "confirmed" else after
    for each in found:
        assert each[:3] == [of([0, 1, 2]), during, after]
        assert "trainer 1 is not among the live trainers: 0, 2" in each[3]
