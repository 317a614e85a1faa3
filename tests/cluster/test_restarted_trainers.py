"""``launch --max-restarts`` in a job that outlives a trainer: that trainer alone starts again."""

from __future__ import annotations

import re

import pytest

from tests.support.processes import Processes
from tests.support.tiers import RARE

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

STEPS = 40
# each step adds 1 to the only weight, but for what k-step deltas make of it
SCRIPT = f"""
import json, os, signal, sys, time
import torch
from pathlib import Path
from trainer import fleet

mode, deaths, again = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3]


def wait_for(name):
    deadline = time.monotonic() + (100 if again.startswith("not awaited") else 0)
    while not Path(name).exists() and time.monotonic() < deadline:
        time.sleep(0.01)


if Path("died-1").exists():
    Path("started").touch()
    wait_for("done")
    if again.endswith("fails"):
        sys.exit(9)
strategy = fleet.DistributedStrategy()
strategy.a_sync_configs = mode
fleet.init(strategy=strategy)
model = fleet.distributed_model(torch.nn.Linear(1, 1, bias=False))
torch.nn.init.zeros_(model.weight)
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
print("begins at", optimizer.steps, flush=True)
if optimizer.steps:
    Path("again").touch()
while optimizer.steps < {STEPS}:
    (-model(torch.ones(1, 1))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    while optimizer.steps == 20 and again == "awaited" and not Path("again").exists():
        time.sleep(0.01)
    died = Path(f"died-{{deaths}}")
    if fleet.worker_index() == 1 and optimizer.steps >= 5 and not died.exists():
        number = next(n for n in range(1, deaths + 1) if not Path(f"died-{{n}}").exists())
        Path(f"died-{{number}}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
wait_for("started")
fleet.finish()
Path("done").touch()
print("weight", model.weight.item(), flush=True)
"""


def launched(
    processes: Processes, mode: str, deaths: int, restarts: int, again: str = "awaited"
) -> tuple[int, list[str]]:
    """A job's exit status, and its lines."""
    (processes.path / "script.py").write_text(SCRIPT)
    flags = ("--servers", "2", "--trainers", "2", "--max-restarts", str(restarts))
    launch = ("-m", "pserver", "launch", *flags, "script.py", mode, str(deaths), again)
    started = processes.python("launch", *launch)
    return started.status(patience=200), started.lines


@pytest.mark.long  # test_returned_trainers stands for it
@pytest.mark.parametrize(
    "mode",
    [
        "{}",
        RARE('{"half_async": true}'),
        RARE('{"staleness": 4}'),
        RARE('{"k_steps": 4}'),
    ],
)
def test_only_the_trainer_that_died_starts_again(processes: Processes, mode: str) -> None:
    """It begins at the step of the slowest trainer, as the same number; the others are
    untouched.
    """
    status, lines = launched(processes, mode, 1, 3)
    text = "\n".join(lines)

    assert status == 0, text
    assert "killed by SIGKILL): starts it again (restart 1 of 3); the others go on" in text
    assert "starts the job again" not in text
    begun = re.findall(r"trainer (\d) *\| begins at (\d+)", text)
    assert sorted(begun)[:2] == [("0", "0"), ("1", "0")] and len(begun) == 3, text
    assert begun[2][0] == "1" and 0 < int(begun[2][1]) < STEPS, text
    assert len(re.findall(r"server \d *\| .* trainer 1 has ended: .*the job goes on", text)) == 2
    if mode == "{}":
        # what was decided of the one that died, what the other did, and the rest of the new one's
        weights = {float(each) for each in re.findall(r"weight (\S+)", text)}
        rest = STEPS - int(begun[2][1])
        assert max(weights) in (STEPS + 4 + rest, STEPS + 5 + rest), text


@pytest.mark.long
def test_the_others_finish_when_restarts_are_used_up(processes: Processes) -> None:
    """The job ends well although one trainer is missing at its end."""
    status, lines = launched(processes, "{}", 2, 1)
    text = "\n".join(lines)

    assert status == 0, text
    assert "starts it again (restart 1 of 1); the others go on" in text
    assert "killed by SIGKILL); the others go on without it" in text
    assert "done without trainer 1" in text


@pytest.mark.long
@pytest.mark.parametrize("again", ["not awaited", "not awaited, and fails"])
def test_a_trainer_that_comes_when_the_job_is_done_is_not_awaited(
    processes: Processes, again: str
) -> None:
    """The others need not wait for it, and it does not wait for servers that are gone; nor does it
    matter that it meets servers that end.
    """
    status, lines = launched(processes, "{}", 1, 1, again)
    text = "\n".join(lines)

    assert status == 0, text
    assert "trainer 1 started too late: the job is done without it" in text
