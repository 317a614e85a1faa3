"""``fleet.init(loggers=[...])`` in real processes: a leader that is killed, a script that fails."""

from __future__ import annotations

import re

import pytest

from tests.support.processes import Processes

# a run is a file; the library that it stands for ends it with the process, as W&B's does
SCRIPT = """
import atexit, os, signal, sys
import torch
from trainer import fleet

class Run:
    opened = calls = 0

    def __init__(self):
        self.file = open(f"run-{fleet.worker_index()}-{Run.opened}", "w")
        atexit.register(self.file.close)
        Run.opened += 1

    def log(self, values, step):
        lines = (f"{step} {name}={value:g}\\n" for name, value in values.items())
        self.file.writelines(lines)
        self.file.flush()
        Run.calls += 1

    def close(self):
        self.file.write("ended\\n")
        self.file.close()

fleet.init(loggers=[Run])
strategy = fleet.DistributedStrategy()
strategy.a_sync = True
model = fleet.distributed_model(torch.nn.Linear(4, 1))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.01), strategy)

def step():
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    fleet.report(samples=2, trainer=fleet.worker_index())

step()
if sys.argv[1] == "fails":
    while not Run.calls:
        step()
    raise ArithmeticError("the data are gone")
if fleet.worker_index() == 0:
    while not (Run.calls and os.path.exists("mate")):
        step()
    os.kill(os.getpid(), signal.SIGKILL)
open("mate", "w").close()
while not Run.calls:
    step()
fleet.finish()
"""

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


def test_a_script_that_fails_ends_its_loggers(processes: Processes, script: str) -> None:
    """With the last values, and before the exit handlers of what they have opened."""
    started = processes.python("alone", script, "fails")

    assert started.status() == 1
    assert [line for line in started.lines if "a logger: off" in line] == []
    *_, last, end = (processes.path / "run-0-0").read_text().splitlines()
    assert re.fullmatch(r"\d+ pserver/samples_per_second=\S+", last) and end == "ended"


@pytest.mark.long
def test_a_killed_leaders_successor_opens_a_run(processes: Processes, script: str) -> None:
    """Of its own, said once; the killed one's is not ended, and has no line of the other's."""
    ((_, endpoint),) = processes.servers(1, 3.0)
    killed, other = processes.trainers(2, [endpoint], 3.0, script, "")

    assert other.status() == 0, other
    assert killed.status() == -9
    said = "trainer 1 is the leader now, and opens the loggers"
    assert len([line for line in other.lines if said in line]) == 1
    runs = {path.name: path.read_text() for path in processes.path.glob("run-*")}
    assert sorted(runs) == ["run-0-0", "run-1-0"]
    for number, ended in (0, False), (1, True):
        text = runs[f"run-{number}-0"]
        assert set(re.findall(r"^\d+ trainer=(\d)$", text, re.MULTILINE)) == {str(number)}
        assert text.endswith("ended\n") == ended
