"""``launch --checkpoint`` where every server writes its part: what is killed meanwhile leaves the
checkpoint before whole.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch

from pserver.checkpoint import checkpoint
from tests.support.processes import Processes, Started
from tests.support.tiers import RARE

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

# trains until it is stopped, or through its epochs; its process says when it dies
SCRIPT = """
import os, signal, sys, threading, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader
from pserver.checkpoint import checkpoint
from trainer import DistributedEmbedding, fleet

export, victim = sys.argv[1:]

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = DistributedEmbedding(4, name="rows")
        self.out = torch.nn.Linear(4, 3000)

    def forward(self, ids):
        return self.out(self.rows(ids))

def server():
    import psutil
    family = psutil.Process(os.getppid()).children(recursive=True)
    return max(each.pid for each in family if "serve" in each.cmdline())

def dies(pid, name):
    if not Path(name).exists():
        Path(name).touch()
        os.kill(pid, signal.SIGKILL)

written = checkpoint.Writer.commit

def commit(self, meta):  # all files of trainer 0 are there, and all parts; the manifest is not
    if Path("saved/checkpoints.json").exists():
        dies(os.getpid(), "died")
    return written(self, meta)

if victim == "trainer":
    checkpoint.Writer.commit = commit
strategy = fleet.DistributedStrategy()
strategy.a_sync, strategy.a_sync_configs = False, {"lost_trainer": "stop"}
fleet.init(strategy=strategy)
torch.manual_seed(0)
model = fleet.distributed_model(Net())
optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.1))
for epoch in range(2):
    for ids in fleet.shard(DataLoader(torch.arange(48), batch_size=4, shuffle=True)):
        (model(ids) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if victim and optimizer.steps == 5 and fleet.worker_index() == 0:
            deadline = time.monotonic() + 600  # the test's own waits end sooner
            while not Path("saved/checkpoints.json").exists() and time.monotonic() < deadline:
                threading.Event().wait(0.01)
        if victim == "server" and optimizer.steps == 6 and fleet.worker_index() == 0:
            dies(server(), "died")
fleet.export(export)
fleet.finish()
"""
# of the first server that writes another part when a checkpoint is complete: all but its manifest
# is there.  Every process of the job imports it as it starts.
DYING_SERVER = """
import os, signal, sys
from pathlib import Path

if "serve" in sys.orig_argv:
    from pserver.checkpoint import checkpoint

    commit = checkpoint.Writer.commit

    def dies(self, meta):
        if Path("saved/checkpoints.json").exists() and not Path("died").exists():
            Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return commit(self, meta)

    checkpoint.Writer.commit = dies
"""


def launched(processes: Processes, export: str, victim: str, servers: int, *flags: str) -> Started:
    """A job of two trainers."""
    (processes.path / "parts.py").write_text(SCRIPT)
    words = ["-m", "pserver", "launch", "--servers", str(servers), "--trainers", "2", *flags]
    if victim == "saving server":
        (processes.path / "sitecustomize.py").write_text(DYING_SERVER)
    found = os.pathsep.join([str(processes.path), os.environ.get("PYTHONPATH", "")])
    return processes.python(export, *words, "parts.py", export, victim, PYTHONPATH=found)


def weights(path: Path) -> dict[str, torch.Tensor]:
    """The rows in the order of their ids."""
    found = torch.load(path, weights_only=True)
    order = found.pop("rows.ids").argsort()
    return {name: v[order] if name.startswith("rows.w") else v for name, v in found.items()}


@pytest.fixture
def whole(processes: Processes) -> dict[str, torch.Tensor]:
    """What a job trains in which nothing dies."""
    assert launched(processes, "whole.pt", "", 2).status(patience=120) == 0
    return weights(processes.path / "whole.pt")


@pytest.mark.parametrize("victim", [RARE("trainer"), RARE("server"), "saving server"])
def test_a_job_that_is_killed_while_it_saves_ends_as_one_that_is_not(
    processes: Processes, whole: dict[str, torch.Tensor], victim: str
) -> None:
    """Trainer 0 or a server dies when all is written but its manifest, or a server between two
    saves; the job goes on from the checkpoint before, then on 3 servers.
    """
    saving = ("--checkpoint", "saved", "--every", "0.001", "--keep", "2")
    first = launched(processes, "first.pt", victim, 2, *saving)
    assert first.status(patience=120) != 0 and (processes.path / "died").exists(), first
    listed = json.loads((processes.path / "saved" / "checkpoints.json").read_text())
    names = [each["name"] for each in listed["checkpoints"]]
    for name in names:
        reader = checkpoint.reading(processes.path / "saved" / name)
        assert reader.meta["step"] == int(name.removeprefix("step-"))
        assert len(list((processes.path / "saved" / name).glob("server-*"))) == 2
    second = launched(processes, "second.pt", "", 3, *saving)
    assert second.status(patience=120) == 0, second
    resumed = weights(processes.path / "second.pt")

    said = [line for line in second.lines if re.search(r"continues from", line)]
    assert len(said) == 2 and names[-1] in said[0], second
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []
