"""``--trainers MIN:MAX``: a job begins with MIN trainers, and others join it later, by the same
command on other hosts.
"""

from __future__ import annotations

import re

import pytest

from pserver.launcher.cluster import free_port
from tests.support.processes import Processes, Started

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

STEPS = 40
# each step of an async job adds 1 to the only weight
SCRIPT = f"""
import sys, time
import torch
from pathlib import Path
from trainer import fleet

strategy = fleet.DistributedStrategy()
strategy.a_sync = sys.argv[1] == "async"
if sys.argv[1] == "stop":
    strategy.a_sync_configs = {{"lost_trainer": "stop"}}
fleet.init(strategy=strategy)
model = fleet.distributed_model(torch.nn.Linear(1, 1, bias=False))
torch.nn.init.zeros_(model.weight)
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
print("begins at", optimizer.steps, "as", fleet.worker_index(), flush=True)
if optimizer.steps:
    Path("joined").touch()
while optimizer.steps < {STEPS}:
    (-model(torch.ones(1, 1))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    deadline = time.monotonic() + 600  # the test's own waits end sooner
    while optimizer.steps == 20 and not Path("joined").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
fleet.finish()
print("weight", model.weight.item(), flush=True)
"""


def launched(
    processes: Processes, port: int, host: str, trainers: str, mode: str = "async", *more: str
) -> Started:
    """One host's launch; the first host's name is that of the only server."""
    (processes.path / "script.py").write_text(SCRIPT)
    place = ("--servers", f"127.0.0.1:{port}", "--trainers", trainers, "--host", host)
    words = ("-m", "pserver", "launch", *place, "--log-dir", f"logs-{host}", *more)
    return processes.python(host, *words, "script.py", mode)


def test_a_host_that_comes_later_joins_at_the_slowest_trainers_step(processes: Processes) -> None:
    """By the same command; the job is over when those that have joined are done."""
    port = free_port()
    first = launched(processes, port, "127.0.0.1", "1:3")
    first.said("begins at 0 as 0")
    later = launched(processes, port, "later", "1:3")

    assert later.status(patience=100) == 0 and first.status() == 0, [first, later]
    place = later.said(r"joins the job as trainer ([12])$")[1]
    begun = int(later.said(rf"trainer {place} *\| begins at (\d+) as {place}")[1])
    assert 0 < begun <= 20
    # the weight that the last one to finish has seen
    said = re.findall(r"weight (\S+)", "\n".join([*first.lines, *later.lines]))
    assert max(map(float, said)) == STEPS + STEPS - begun, [first, later]


@pytest.mark.long
def test_a_job_that_has_all_its_trainers_takes_no_more(processes: Processes) -> None:
    """The launch says so, and ends."""
    port = free_port()
    first = launched(processes, port, "127.0.0.1", "1:1")
    first.said("begins at 0 as 0")
    later = launched(processes, port, "later", "1:1")

    assert later.status() == 1, later
    assert "got none: --trainers 1:1 has all it may have" in "\n".join(later.lines)
    (processes.path / "joined").touch()
    assert first.status() == 0, first


@pytest.mark.long
def test_a_job_that_stops_without_a_trainer_has_no_places_to_join(processes: Processes) -> None:
    """It is refused: nobody may be missing."""
    first = launched(processes, free_port(), "127.0.0.1", "1:3", "stop")

    assert first.status() == 1, first
    assert "min_trainers=1 needs an elastic job" in "\n".join(first.lines), first
