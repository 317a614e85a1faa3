"""Sums, lists and objects of all trainers in real jobs, with servers and without; and a trainer
that is killed meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from pserver.launcher.cluster import free_port
from tests.support.load import scaled
from tests.support.processes import Processes, Started
from tests.support.tiers import RARE
from trainer import init_parallel_env, spawn
from trainer.metrics import auc

pytestmark = pytest.mark.processes

DEADLINE = 3.0  # seconds without a heartbeat
SCRIPT = """
import json, os, signal, sys
import torch
from trainer import fleet

strategy = fleet.DistributedStrategy()
strategy.a_sync = False
if "servers" in sys.argv:
    strategy.a_sync_configs = {"lost_trainer": "stop"}
fleet.init(strategy=strategy)
model = fleet.distributed_model(torch.nn.Linear(2, 1))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
me = fleet.worker_index()
for number in range(3):
    model(torch.ones(1, 2) * me).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    total = fleet.all_reduce(torch.tensor([0.1 * (me + 1), number]), "mean")
parts = fleet.all_gather(torch.full((me, 2), 3 + me))
told = fleet.broadcast_object({"weight": model.weight.detach(), "me": me}, src=1)
everyone = fleet.all_gather_object(f"trainer {me}")
try:
    fleet.all_reduce(torch.zeros(me + 1))
except ValueError as error:
    differ = str(error)
same = torch.equal(told["weight"], model.weight)
print("found", json.dumps([total.tolist(), [p.tolist() for p in parts], told["me"], same, everyone,
    differ]), flush=True)
if "killed" in sys.argv:
    if me == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    fleet.all_reduce(torch.zeros(1))
fleet.finish()
"""


def tell_auc(path: str) -> None:
    """One of two processes with torch's process group, and without ``fleet``."""
    init_parallel_env()
    rank = dist.get_rank()
    whole = auc([0.1 + 0.4 * rank, 0.3], [0, 1])
    Path(path, str(rank)).write_text(str(whole))


def jobs(processes: Processes, kind: str, *arguments: str) -> list[Started]:
    """Two trainers, of a job with two servers or with none."""
    (processes.path / "shared.py").write_text(SCRIPT)
    if kind == "servers":
        endpoints = [endpoint for _, endpoint in processes.servers(2, DEADLINE)]
        return processes.trainers(2, endpoints, DEADLINE, "shared.py", kind, *arguments)
    world: Mapping[str, str] = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "PSERVER_HEARTBEAT_TIMEOUT": str(DEADLINE),
    }
    return [
        processes.python(
            f"trainer {rank}",
            "shared.py",
            kind,
            *arguments,
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            **world,
        )
        for rank in range(2)
    ]


def found(trainer: Started) -> Any:
    """What a trainer has found."""
    return json.loads(trainer.said(r"^found (.*)")[1])


@pytest.mark.parametrize("kind", ["servers", RARE("collective")])
def test_values_are_alike_on_all_until_a_trainer_is_killed(processes: Processes, kind: str) -> None:
    """Every call, between steps; then the other trainer ends with an error that names the lost
    one, within the deadline.
    """
    trainers = jobs(processes, kind, "killed")
    first, other = (found(trainer) for trainer in trainers)

    assert first == other
    total, parts, me, same, everyone, differ = first
    assert total == pytest.approx([0.15, 2.0]) and parts == [[], [[4, 4]]]
    assert (me, same, everyone) == (1, True, ["trainer 0", "trainer 1"])
    assert "trainer 0: all_reduce(float32 [1], 'sum'); trainer 1: all_reduce(float32 [2]" in differ
    assert trainers[0].status() != 0
    trainers[0].said(r"TrainerLost.*trainer 1")
    assert trainers[0].ended_at - trainers[1].ended_at < scaled(4 * DEADLINE)


@pytest.mark.long
def test_metrics_go_over_torchs_group_without_fleet(tmp_path: Path) -> None:
    """Negatives at 0.1 and 0.5, positives at 0.3: half of the pairs are in order."""
    spawn(tell_auc, (str(tmp_path),), nprocs=2)

    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["0.5", "0.5"]
