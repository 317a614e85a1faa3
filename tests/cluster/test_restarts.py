"""``launch --max-restarts --checkpoint``: a job of which a process dies ends as if none had."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from tests.support.processes import Processes
from tests.support.tiers import RARE

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

SCRIPT = """
import json, os, signal, sys
import torch
from pathlib import Path
from torch.utils.data import DataLoader
from trainer import DistributedEmbedding, fleet

export, deaths, tables = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3] == "tables"

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = DistributedEmbedding(4, name="rows") if tables else torch.nn.Embedding(48, 4)
        self.out = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))

    def forward(self, ids):
        return self.out(self.rows(ids))

strategy = fleet.DistributedStrategy()
if tables:
    strategy.a_sync, strategy.a_sync_configs = False, {"lost_trainer": "stop"}
fleet.init(strategy=strategy)
torch.manual_seed(fleet.worker_index())
model = fleet.distributed_model(Net())
optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.1))
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
for epoch in range(3):
    for ids in fleet.shard(DataLoader(torch.arange(48), batch_size=4, shuffle=True)):
        (model(ids) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        name = f"trainer {fleet.worker_index()}, step {optimizer.steps}"
        if name in deaths and not Path(name).exists():
            Path(name).touch()
            os.kill(os.getpid() if deaths[name] == "trainer" else server(), signal.SIGKILL)
    scheduler.step()
fleet.export(export)
fleet.finish()
"""
# of the last of two servers that this launch has started
SERVER = """
import psutil

def server():
    family = psutil.Process(os.getppid()).children(recursive=True)
    return max(each.pid for each in family if "serve" in each.cmdline())

"""
JOBS = {
    "tables": ("--servers", "2", "--trainers", "2"),
    "collective": ("--nccl2", "--trainers", "2"),
}


def launched(
    processes: Processes, job: str, export: str, deaths: dict[str, str], *flags: str
) -> tuple[int, list[str]]:
    """A job's exit status, and its lines."""
    (processes.path / "restarted.py").write_text(SERVER + SCRIPT)
    words = ("-m", "pserver", "launch", *JOBS[job], *flags, "restarted.py")
    deaths_said = json.dumps(deaths)
    started = processes.python(export, *words, export, deaths_said, job, GLOO_SOCKET_IFNAME="lo")
    return started.status(patience=200), started.lines


def weights(path: Path) -> dict[str, torch.Tensor]:
    """The rows in the order of their ids."""
    found = torch.load(path, weights_only=True)
    if "rows.ids" in found:
        order = found.pop("rows.ids").argsort()
        found["rows.weight"] = found["rows.weight"][order]
    return {name: value for name, value in found.items() if name.endswith(("weight", "bias"))}


@pytest.mark.long  # test_parts_killed, and test_automatic_saves.py in one process, stand for it
@pytest.mark.parametrize(
    ("job", "deaths"),
    [
        ("tables", {"trainer 1, step 8": "trainer"}),
        RARE("tables", {"trainer 0, step 13": "server", "trainer 0, step 14": "trainer"}),
        RARE("collective", {"trainer 1, step 5": "trainer", "trainer 0, step 13": "trainer"}),
    ],
)
def test_a_job_whose_processes_die_ends_as_one_of_which_none_dies(
    processes: Processes, job: str, deaths: dict[str, str]
) -> None:
    """Equal to the bit: values, tables, states of Adam, rates, data and dropout go on."""
    status, lines = launched(processes, job, "whole.pt", {}, "--checkpoint", "whole")
    assert status == 0, lines
    saving = ("--checkpoint", "saved", "--every", "0.01", "--keep", "2")
    status, lines = launched(
        processes, job, "restarted.pt", deaths, *saving, "--max-restarts", str(len(deaths))
    )
    assert status == 0, lines
    whole, restarted = (weights(processes.path / name) for name in ("whole.pt", "restarted.pt"))

    for number in range(1, len(deaths) + 1):
        assert f"(restart {number} of {len(deaths)})" in "\n".join(lines)
    said = [line for line in lines if re.match(r"trainer [01] *\| continues from", line)]
    assert len(said) == 2 * len(deaths), lines
    assert whole.keys() == restarted.keys() and len(whole) >= 3
    assert [name for name in whole if not torch.equal(whole[name], restarted[name])] == []
    assert "starts the job again" not in (processes.path / "logs" / "trainer-0.log").read_text()


def test_a_job_that_goes_on_failing_fails(processes: Processes) -> None:
    """After the restarts that it was given, with the status of the process that failed."""
    (processes.path / "script.py").write_text("print('begun', flush=True)\nraise SystemExit(3)\n")
    launch = ("-m", "pserver", "launch", "--nccl2", "--trainers", "1", "--max-restarts", "2")
    started = processes.python("failing", *launch, "script.py")

    assert started.status() == 3, started
    assert sum(line.endswith("| begun") for line in started.lines) == 3, started
    assert (processes.path / "logs" / "trainer-0.log").read_text() == "begun\n" * 3
