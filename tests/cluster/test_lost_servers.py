"""``launch --checkpoint --max-restarts`` where a server of an asynchronous job dies: it alone is
started again, goes on from its part of the last checkpoint, and says what is lost.

Every gradient is one.  So Adam moves each element of the parameters by its rate in each step, and
SGD each looked-up row: what a server holds says how many steps are in it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.support.load import Deadline
from tests.support.processes import PATIENCE, Processes, Started
from tests.support.tiers import RARE

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

SCRIPT = """
import json, os, sys, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader
from trainer import DistributedEmbedding, Constant, fleet, row_optimizers
from pserver.table import ids as id_arithmetic

mode, kills = json.loads(sys.argv[1]), int(sys.argv[2])
strategy = fleet.DistributedStrategy()
strategy.a_sync_configs = mode
fleet.init(strategy=strategy)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        rule = row_optimizers.SGD(lr=0.5)
        self.rows = DistributedEmbedding(4, name="rows", optimizer=rule, init=Constant(0.0))
        self.out = torch.nn.Linear(64, 400, bias=False)
        torch.nn.init.zeros_(self.out.weight)

    def forward(self, ids):
        return self.out(torch.ones(1, 64)).sum() + self.rows(ids).sum()

model = fleet.distributed_model(Net())
optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.125))
me, ids = fleet.worker_index(), torch.arange(64)
print("begins at", optimizer.steps, "in", os.getpid(), flush=True)

def steps(batches, done):
    for _ in batches:
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()
        if done():
            return

def saved():
    try:
        return len(json.loads(Path("saved/checkpoints.json").read_text())["checkpoints"])
    except (OSError, ValueError):
        return 0

batches = iter(fleet.shard(DataLoader(torch.arange(10**6))))
if kills < 0:  # a server kills itself while it saves, and then the job saves again
    steps(batches, lambda: Path("died").exists())
    have = saved()
    steps(batches, lambda: saved() > have)
for kill in range(kills):
    have = saved()
    steps(batches, lambda: saved() > have)
    most = optimizer.steps + 10
    steps(batches, lambda: optimizer.steps >= most)
    print("waits for kill", kill, flush=True)
    deadline = time.monotonic() + 600  # the test's own waits end sooner
    while not Path(f"killed-{kill}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
last = optimizer.steps + 10
steps(batches, lambda: optimizer.steps >= last)
batches.close()
fleet.barrier_worker()
communicator = optimizer.communicator
communicator.pull()
rows = model.rows(ids).detach()
counted = []
begin = 0
flat = model.out.weight.detach().reshape(-1)
for part in communicator.plan.placement("out.weight").slices:
    size = torch.Size(part.shape).numel()
    dense = (-flat[begin:begin + size] / 0.125).round().unique().tolist()
    begin += size
    counted.append(dense)
order, offsets = id_arithmetic.partition(ids.numpy(), 2)
for server in (0, 1):
    own = rows[torch.from_numpy(order[offsets[server]:offsets[server + 1]])]
    counted[server] += (-own / 0.5).unique().tolist()
fleet.finish()
print("counted", json.dumps([optimizer.steps, counted]), flush=True)
"""


def launched(processes: Processes, mode: str, kills: int, **role: str) -> Started:
    """A job of two servers, which saves when its first step is over, and then each few steps."""
    (processes.path / "script.py").write_text(SCRIPT)
    words = ("-m", "pserver", "launch", "--servers", "2", "--trainers", "2")
    saving = ("--checkpoint", "saved", "--every", "1.5", "--max-restarts", "3")
    return processes.python("launch", *words, *saving, "script.py", mode, str(kills), **role)


def servers_of(launch: Started) -> list[psutil.Process]:
    """The servers that run, the oldest first: numbers of processes begin again."""
    family = psutil.Process(launch.pid).children(recursive=True)
    found = (each for each in family if "serve" in each.cmdline())
    return sorted(found, key=lambda p: (p.create_time(), p.pid))


def said(launch: Started, pattern: str, count: int) -> list[re.Match[str]]:
    """So many lines that hold the pattern; waits for them."""
    deadline = Deadline(3 * PATIENCE)
    while not deadline.over:
        ended = not launch.running
        found = [match for line in list(launch.lines) if (match := re.search(pattern, line))]
        if len(found) >= count:
            return found
        if ended:
            break
        time.sleep(0.02)
    raise AssertionError(f"expected {count} times {pattern!r}\n{launch}")


def kill(launch: Started, processes: Processes, number: int, victim: int = 1) -> None:
    """A server dies when both trainers wait for it, and has come back; the others stay."""
    said(launch, f"waits for kill {number}", 2)
    found = servers_of(launch)
    dies = found[-1] if victim or number else found[0]  # one that has come back is the youngest
    dies.send_signal(signal.SIGKILL)
    (processes.path / f"killed-{number}").touch()
    said(launch, "decided steps since then are lost here", number + 1)
    assert {each.pid for each in found} - {each.pid for each in servers_of(launch)} == {dies.pid}


def counted(launch: Started) -> tuple[list[int], list[list[float]]]:
    """The steps that trainers have taken; and by server, how many are in all that it holds."""
    found = [json.loads(match[1]) for match in said(launch, r"counted (\[.*\])", 2)]
    held = [sorted(set(counts)) for counts in found[0][1]]
    assert found[0][1] == found[1][1], launch
    return [steps for steps, _ in found], held


def lost(launch: Started, count: int, victim: int = 1) -> list[int]:
    """How many steps were lost, as the server said each time that it had come back."""
    pattern = rf"from \S+/server-{victim}: (\d+) decided steps since then are lost here"
    return [int(match[1]) for match in said(launch, pattern, count)]


@pytest.mark.parametrize("victim", [0, RARE(1)])
def test_only_what_the_server_had_not_saved_is_lost(processes: Processes, victim: int) -> None:
    """Twice.  The trainers and the other server stay; that one has every step once, and this one
    all but those that it has named, in Adam's parameters and in rows.  Server 0, which has the
    job's log, goes on with it.
    """
    # a trainer says that it waits after a tenth of this: before any server has come back
    role = {"PSERVER_HEARTBEAT_TIMEOUT": "8"}
    launch = launched(processes, '{"send_queue_size": 1}', 2, **role)
    for number in range(2):
        kill(launch, processes, number, victim)
    assert launch.status(patience=200) == 0, launch
    steps, held = counted(launch)
    missing = lost(launch, 2, victim)

    assert len(said(launch, "begins at 0 in", 2)) == 2
    assert held[1 - victim] == [sum(steps)], launch
    assert held[victim] == [sum(steps) - sum(missing)], launch
    assert min(missing) > 0
    text = "\n".join(launch.lines)
    assert "starts the job again" not in text and "(restart 2 of 3)" in text, launch
    for trainer in (0, 1):
        awaited = rf"trainer {trainer} *\| waits for server {victim} at .*, which does not"
        assert re.search(awaited, text)
    assert len(re.findall(f"server {victim} has come back; the job goes on", text)) == 2


@pytest.mark.parametrize(
    "mode",
    [
        RARE('{"half_async": true}'),
        RARE('{"send_queue_size": 1, "staleness": 4}'),
        RARE('{"k_steps": 4}'),
        RARE('{"k_steps": 4, "outer_optimizer": {"type": "sgd", "lr": 1.0}}'),
    ],
)
def test_every_mode_that_waits_for_nobody_goes_on(processes: Processes, mode: str) -> None:
    """The job ends well, and its trainers have taken all their steps."""
    launch = launched(processes, mode, 1)
    kill(launch, processes, 0)

    assert launch.status(patience=200) == 0, launch
    said(launch, r"counted \[", 2)
    assert len(said(launch, "begins at 0 in", 2)) == 2


DYING_SERVER = """
import os, signal, sys
from pathlib import Path

if "serve" in sys.orig_argv:
    from pserver.checkpoint import checkpoint

    commit = checkpoint.Writer.commit

    def dies(self, meta):
        first = Path("saved/checkpoints.json").exists() and not Path("died").exists()
        if first and f"server-{os.environ['DIES']}" in str(self._place):
            Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return commit(self, meta)

    checkpoint.Writer.commit = dies
"""


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_a_server_that_dies_while_it_saves_comes_back_from_the_save_before(
    processes: Processes, victim: int
) -> None:
    """What it was writing counts for nothing, and the job saves on."""
    (processes.path / "sitecustomize.py").write_text(DYING_SERVER)
    found = os.pathsep.join([str(processes.path), os.environ.get("PYTHONPATH", "")])
    dies = {"PYTHONPATH": found, "DIES": str(victim)}
    launch = launched(processes, '{"send_queue_size": 1}', -1, **dies)

    assert launch.status(patience=200) == 0, launch
    steps, held = counted(launch)
    missing = lost(launch, 1, victim)
    assert held[1 - victim] == [sum(steps)], launch
    assert held[victim] == [sum(steps) - sum(missing)], launch
    assert (processes.path / "died").exists()
    assert "starts the job again" not in "\n".join(launch.lines), launch
    (path,) = [
        match[1] for match in said(launch, rf"starts it again from (\S+)/server-{victim}", 1)
    ]
    listed = json.loads((processes.path / "saved" / "checkpoints.json").read_text())
    assert Path(path).name < listed["checkpoints"][-1]["name"]


STEPPING = """
import json, sys, time
from pathlib import Path
import torch
from trainer import fleet

strategy = fleet.DistributedStrategy()
strategy.a_sync = sys.argv[1] == "async"
fleet.init(strategy=strategy)
model = fleet.distributed_model(torch.nn.Linear(64, 400))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
while optimizer.steps < 10:
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if optimizer.steps == 5:
        print("waits for kill 0", flush=True)
        deadline = time.monotonic() + 600  # the test's own waits end sooner
        while not Path("killed-0").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
fleet.finish()
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "reason"), [("sync", "in sync mode all go back"), ("async", "no checkpoint yet")]
)
def test_other_jobs_go_back_as_a_whole(processes: Processes, mode: str, reason: str) -> None:
    """A sync job, and one that has not saved: launch says why, and starts all processes again."""
    (processes.path / "script.py").write_text(STEPPING)
    words = ("-m", "pserver", "launch", "--servers", "2", "--trainers", "2", "--max-restarts", "1")
    saving = ("--checkpoint", "saved", "--every", "1000")
    launch = processes.python("launch", *words, *saving, "script.py", mode)
    said(launch, "waits for kill 0", 2)
    servers_of(launch)[-1].send_signal(signal.SIGKILL)
    (processes.path / "killed-0").touch()

    assert launch.status(patience=200) == 0, launch
    said(launch, f"server 1 cannot be restarted alone: .*{reason}", 1)
    said(launch, "starts the job again \\(restart 1 of 1\\)", 1)
