"""``launch --checkpoint --max-restarts`` where server 0 of an asynchronous job dies, which has the
job's log, its lease table, and the barriers: it alone is started again, and every sample counts
once.
"""

from __future__ import annotations

import json
import signal
from collections import Counter

import psutil
import pytest

from tests.cluster.test_lost_servers import said, servers_of
from tests.support.processes import Processes, Started
from tests.support.tiers import RARE

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

SAMPLES, EPOCHS = 1200, 2

# Every gradient is one, so Adam moves each element by its rate in each step.
SCRIPT = """
import json, sys, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader
from trainer import fleet

samples, epochs, where = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
strategy = fleet.DistributedStrategy()
strategy.a_sync_configs = json.loads(sys.argv[4])
fleet.init(strategy=strategy)
model = torch.nn.Linear(64, 400, bias=False)
torch.nn.init.zeros_(model.weight)
model = fleet.distributed_model(model)
optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.125))
me = fleet.worker_index()
loader = fleet.shard(DataLoader(torch.arange(samples), batch_size=4, shuffle=True))
print("begins at", optimizer.steps, flush=True)

def saved():
    try:
        return bool(json.loads(Path("saved/checkpoints.json").read_text())["checkpoints"])
    except (OSError, ValueError):
        return False

since = 0
for epoch in range(epochs):
    seen = []
    for batch in loader:
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += batch.tolist()
        since += saved()
        if since == 5 and where == "stepping":
            print("is at it", flush=True)
        time.sleep(0.01)  # what a step computes
    print("consumed", json.dumps([epoch, seen]), flush=True)
    if epoch == 0 and where == "meeting" and me == 1:
        print("is at it", flush=True)
        deadline = time.monotonic() + 600  # the test's own waits end sooner
        while not Path("killed").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
    print("together", int(fleet.all_reduce(torch.tensor([len(seen)]))), flush=True)
    fleet.barrier_worker()
optimizer.communicator.pull()
counts = (-model.weight.detach() / 0.125).round().unique().tolist()
print("counted", json.dumps([optimizer.steps, counts]), flush=True)
fleet.finish()
"""


def launched(
    processes: Processes, servers: int, where: str, mode: str = '{"send_queue_size": 1}'
) -> Started:
    """A job in which a trainer is at it."""
    (processes.path / "script.py").write_text(SCRIPT)
    words = ("-m", "pserver", "launch", "--servers", str(servers), "--trainers", "2")
    saving = ("--checkpoint", "saved", "--every", "0.3", "--max-restarts", "1")
    script = ("script.py", str(SAMPLES), str(EPOCHS), where, mode)
    launch = processes.python("launch", *words, "--heartbeat-timeout", "5", *saving, *script)
    said(launch, "is at it", 1)
    return launch


def check_samples(launch: Started) -> None:
    """Each was in one step of each epoch."""
    found = [json.loads(match[1]) for match in said(launch, r"consumed (\[.*\])", 2 * EPOCHS)]
    for epoch in range(EPOCHS):
        consumed = Counter(sample for number, seen in found if number == epoch for sample in seen)
        assert consumed == Counter(range(SAMPLES)), launch


def killed(processes: Processes, servers: int, where: str, mode: str) -> Started:
    """A job whose server 0 was killed when a trainer was at it; it has ended well."""
    launch = launched(processes, servers, where, mode)
    first = servers_of(launch)[0]
    psutil.Process(first.pid).send_signal(signal.SIGKILL)
    (processes.path / "killed").touch()
    assert launch.status(patience=200) == 0, launch
    return launch


@pytest.mark.parametrize(
    ("servers", "where", "mode"),
    [
        (1, "stepping", '{"send_queue_size": 1}'),
        RARE(2, "meeting", '{"send_queue_size": 1}'),
        RARE(2, "stepping", '{"send_queue_size": 1}'),
        RARE(1, "meeting", '{"send_queue_size": 1}'),
        RARE(2, "stepping", '{"half_async": true}'),
        RARE(2, "stepping", '{"send_queue_size": 1, "staleness": 4}'),
        RARE(2, "stepping", '{"k_steps": 4}'),
        RARE(2, "stepping", '{"k_steps": 4, "outer_optimizer": {"type": "sgd", "lr": 1.0}}'),
    ],
)
def test_every_sample_counts_once_although_server_0_has_died(
    processes: Processes, servers: int, where: str, mode: str
) -> None:
    """Both trainers go on, nobody waits at a barrier for ever, and the lease table goes on where it
    was, although the checkpoint's is older.
    """
    launch = killed(processes, servers, where, mode)
    text = "\n".join(launch.lines)

    assert "starts the job again" not in text, launch
    assert len(said(launch, "begins at 0", 2)) == 2
    (loss,) = said(launch, r"from \S+/server-0: (\d+) decided steps since then are lost here", 1)
    check_samples(launch)
    totals = [int(match[1]) for match in said(launch, r"together (\d+)", 2 * EPOCHS)]
    assert totals == [SAMPLES] * 2 * EPOCHS
    counted = [json.loads(match[1]) for match in said(launch, r"counted (\[.*\])", 2)]
    if "k_steps" not in mode and "half" not in mode:
        steps = sum(taken for taken, _ in counted)
        held = {steps - int(loss[1])} | ({steps} if servers > 1 else set())
        assert {count for _, counts in counted for count in counts} == held, launch


@pytest.mark.long
@pytest.mark.parametrize("paused", [0, 1])
def test_a_server_that_was_only_paused_follows_again(processes: Processes, paused: int) -> None:
    """For longer than the heartbeat timeout: nothing is lost, and nobody starts again."""
    launch = launched(processes, 2, "stepping")
    server = servers_of(launch)[paused]
    server.send_signal(signal.SIGSTOP)
    said(launch, "nothing is applied until it has come back", 1)
    server.send_signal(signal.SIGCONT)

    assert launch.status(patience=200) == 0, launch
    text = "\n".join(launch.lines)
    assert "lost here" not in text and "starts" not in text, launch
    assert len(said(launch, "begins at 0", 2)) == 2
    check_samples(launch)
