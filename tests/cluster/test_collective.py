"""Jobs without servers as a user starts them: one script, started by three means, and what happens
to one process told by all.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from pserver.launcher.cluster import free_port
from tests.support.load import scaled
from tests.support.processes import Processes

pytestmark = pytest.mark.processes
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1")

SMALLEST = """
import sys
import torch, torch.nn.functional as F
from trainer import fleet

fleet.init()
torch.manual_seed(fleet.worker_index())
net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
model = fleet.distributed_model(net)
optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=1e-3))
generator = torch.Generator().manual_seed(1)
x, y = torch.randn(45, 6, generator=generator), torch.randint(0, 2, (45,), generator=generator)
data, size = torch.utils.data.TensorDataset(x, y), 8 // fleet.worker_num()
loader = torch.utils.data.DataLoader(data, batch_size=size, shuffle=True, drop_last=True)
for x, y in fleet.shard(loader, seed=3):
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
path = sys.argv[1]
fleet.save(path + "/saved")
fleet.export(path + "/exported.pt")
torch.save(model.state_dict(), f"{path}/{fleet.worker_index()}.pt")
with torch.no_grad():
    model[0].weight.zero_()
assert fleet.load(path + "/saved") == 5
torch.save(model.state_dict(), f"{path}/again-{fleet.worker_index()}.pt")
print(fleet.transport(), fleet.worker_num(), fleet.metrics()["steps"])
fleet.finish()
"""
ENDLESS = """
import os, sys
import torch
from pserver.errors import PServerError
from trainer import DataParallel, init_parallel_env

init_parallel_env()
model = DataParallel(torch.nn.Linear(4, 4))
step = 0
try:
    while True:
        model(torch.ones(2, 4)).sum().backward()
        step += 1
        if step == 5:
            print("under way", os.getpid(), flush=True)
except PServerError as error:
    if sys.argv[1:] == ["say"]:
        print("told:", type(error).__name__, error, flush=True)
        os._exit(5)
    raise
"""


def values(path: Path, name: str) -> dict[str, torch.Tensor]:
    return dict(torch.load(path / f"{name}.pt", weights_only=True))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) for name, value in one.items()
    )


def test_one_script_runs_alone_under_launch_and_under_torchrun(processes: Processes) -> None:
    """Two trainers give the same parameters to the bit by either means, near those of one process
    on the joint batches; what they save is loaded again, and exported.
    """
    (processes.path / "smallest.py").write_text(SMALLEST)
    starts = {
        "alone": (),
        "launch": ("-m", "pserver", "launch", "--nccl2", "--trainers", "2"),
        "torchrun": (*TORCHRUN, "--master-port", str(free_port())),
    }
    running = {}
    for name, start in starts.items():
        (processes.path / name).mkdir()
        arguments = (*start, "smallest.py", str(processes.path / name))
        running[name] = processes.python(name, *arguments, GLOO_SOCKET_IFNAME="lo")
    for name, process in running.items():
        assert process.status() == 0, process
        assert process.said("local 1 5.0" if name == "alone" else "gloo 2 5.0")
    alone, launched, torchrun = (processes.path / name for name in starts)
    reference = values(alone, "0")

    for path in (launched, torchrun):
        for name in ("1", "again-0", "again-1", "exported"):
            assert same(values(path, name), values(launched, "0")), f"{path} {name}"
    for name, value in values(launched, "0").items():
        assert torch.allclose(value, reference[name], rtol=1e-5, atol=1e-6), name


def test_a_trainer_killed_under_launch_is_named_by_the_others(processes: Processes) -> None:
    """Status 137 within seconds, the others' own logs say who is lost, and nobody is left."""
    (processes.path / "endless.py").write_text(ENDLESS)
    words = ("-m", "pserver", "launch", "--nccl2", "--trainers", "2", "endless.py")
    launched = processes.python("launch", *words)
    pids = [int(launched.said(rf"trainer {n} \| under way (\d+)")[1]) for n in (0, 1)]
    os.kill(pids[1], signal.SIGKILL)
    killed = time.monotonic()

    assert launched.status() == 137 and launched.said("trainer 1 failed with status 137")
    assert time.monotonic() - killed < scaled(20)
    assert (
        "pserver.errors.TrainerLost: trainer 1 is lost: its connection ended without a goodbye"
        in (processes.path / "logs" / "trainer-0.log").read_text()
    )
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_trainer_that_falls_silent_is_named_by_the_others(processes: Processes) -> None:
    """Stopped, not dead: its connections stay open, so only the deadline ends the wait, in the
    midst of backward.
    """
    (processes.path / "endless.py").write_text(ENDLESS)
    job = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "PSERVER_HEARTBEAT_TIMEOUT": "2",
    }
    trainers = [
        processes.python(
            f"trainer {rank}",
            "endless.py",
            "say",
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            GLOO_SOCKET_IFNAME="lo",
            **job,
        )
        for rank in range(2)
    ]
    for trainer in trainers:
        trainer.said("under way")
    trainers[1].send(signal.SIGSTOP)

    silent = f"silent for {processes.scaled(2):g} s"
    assert trainers[0].said(f"told: TrainerLost trainer 1 is lost: {silent}")
    assert trainers[0].status() == 5
