"""``launch --record-log --checkpoint --max-restarts`` where a server is killed and comes back: what
``pserver replay`` gives is what the servers hold in the end, to the bit, and what they held before.
"""

from __future__ import annotations

import json
import re
import signal

import psutil
import pytest

from tests.cluster.test_lost_servers import said, servers_of
from tests.cluster.test_recorded_logs import check_same, held, run
from tests.support.processes import Processes, Started
from tests.support.tiers import RARE

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

# Both trainers stop after the same steps: when a checkpoint is there, and 8 steps later, in which
# one of the servers is killed.
SCRIPT = """
import json, sys, time
from pathlib import Path
import torch
from trainer import CountFilterEntry, DistributedEmbedding, fleet
from transpiler import DistributedStrategy

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = DistributedEmbedding(4, name="rows", entry=CountFilterEntry(2), capacity=60)
        self.out = torch.nn.Sequential(
            torch.nn.Linear(4, 9000), torch.nn.Tanh(), torch.nn.Linear(9000, 1)
        )

    def forward(self, ids):
        return self.out(self.rows(ids))

strategy = DistributedStrategy()
strategy.a_sync = True
strategy.a_sync_configs = json.loads(sys.argv[1])
fleet.init(strategy=strategy)
torch.manual_seed(fleet.worker_index())
model = fleet.distributed_model(Net())
adam = torch.optim.Adam(model.parameters(), lr=0.01)
optimizer = fleet.distributed_optimizer(adam)

def steps(count):
    for _ in range(count):
        (model(torch.randint(0, 100, (16,))) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

def saved():
    try:
        return bool(json.loads(Path("saved/checkpoints.json").read_text())["checkpoints"])
    except (OSError, ValueError):
        return False

deadline = time.monotonic() + 600  # the test's own waits end sooner
while not int(fleet.all_reduce(torch.tensor([int(saved())]), "min")):
    assert time.monotonic() < deadline
    steps(1)
steps(8)
fleet.save("before")
fleet.barrier_worker()
print("waits for the kill", flush=True)
while not Path("killed").exists():
    assert time.monotonic() < deadline
    time.sleep(0.01)
steps(4)
fleet.save("back")
steps(8)
fleet.save("end")
fleet.finish()
"""


def trained(processes: Processes, victim: int, configs: str) -> Started:
    """A job one of whose servers was killed; it has ended well."""
    (processes.path / "train.py").write_text(SCRIPT)
    saving = ("--checkpoint", "saved", "--every", "0.3", "--keep", "50", "--max-restarts", "1")
    cluster = ("--servers", "2", "--trainers", "2", "--record-log", "log", "--no-panel")
    words = ("-m", "pserver", "launch", *cluster, *saving, "train.py", configs)
    launch = processes.python("launch", *words)
    said(launch, "waits for the kill", 2)
    psutil.Process(servers_of(launch)[victim].pid).send_signal(signal.SIGKILL)
    (processes.path / "killed").touch()
    assert launch.status(patience=200) == 0, launch
    return launch


@pytest.mark.parametrize(
    ("victim", "configs"),
    [
        (0, "{}"),
        RARE(1, "{}"),
        RARE(1, '{"half_async": true}'),
        RARE(0, '{"send_queue_size": 1, "staleness": 4}'),
        RARE(1, '{"dc_asgd": 0.1}'),
    ],
)
def test_a_replay_gives_what_servers_hold_of_which_one_came_back(
    processes: Processes, victim: int, configs: str
) -> None:
    """From the log's beginning, from the checkpoint from which it came back and from a later one,
    and up to the record after which it was lost.
    """
    launch = trained(processes, victim, configs)
    text = "\n".join(launch.lines)
    assert "starts the job again" not in text, launch
    loss = re.search(rf"from (\S+)/server-{victim}: (\d+) decided steps since then", text)
    assert loss is not None and int(loss[2]) > 0, launch
    whole = run(processes, "whole", "replay", "log", "--to", "whole")
    run(processes, "later", "replay", "log", "--from", loss[1], "--to", "later")
    records = (processes.path / "before" / "checkpoint.json").read_text()
    record = max(each["record"] for each in json.loads(records)["meta"]["log"]["servers"])
    run(processes, "back", "replay", "log", "--from", "back", "--to", "from-back")
    run(processes, "until", "replay", "log", "--until", str(record), "--to", "until")

    assert f"server {victim} was lost after record" in "\n".join(whole)
    check_same(processes.path / "end", processes.path / "whole")
    check_same(processes.path / "end", processes.path / "later")
    check_same(processes.path / "end", processes.path / "from-back")
    counts = [name for name in held(processes.path / "back") if name.startswith("server/")]
    assert counts and all("@step" in name for name in counts)  # of steps: some are lost
    check_same(processes.path / "before", processes.path / "until")
