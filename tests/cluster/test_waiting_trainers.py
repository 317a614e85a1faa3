"""``launch --max-restarts --checkpoint``: a trainer that comes back as the others have used up the
pass, and stand in a save: nobody waits for ever.
"""

from __future__ import annotations

import json
import re

import pytest

from tests.support.processes import Processes
from tests.support.tiers import RARE

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

SAMPLES = 80
DILOCO = {"k_steps": 2, "outer_optimizer": {"type": "sgd", "lr": 1.0}}
SCRIPT = f"""
import json, os, signal, sys, time
import torch
from pathlib import Path
from torch.utils.data import DataLoader
from trainer import fleet

mode, victim = json.loads(sys.argv[1]), int(sys.argv[2])


def wait_for(name):
    deadline = time.monotonic() + 100
    while not Path(name).exists() and time.monotonic() < deadline:
        time.sleep(0.01)


strategy = fleet.DistributedStrategy()
strategy.a_sync = not mode.pop("sync", False)
strategy.a_sync_configs = mode
fleet.init(strategy=strategy)
me = fleet.worker_index()
model = fleet.distributed_model(torch.nn.Linear(1, 1))
died = Path("died").exists() and me == victim
if died:
    wait_for("used up")
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1e-4))
if died:
    Path("back").touch()
loader = DataLoader(torch.arange({SAMPLES}), batch_size=4, shuffle=True)
for epoch in range(2):
    trained = 0
    for number, x in enumerate(fleet.shard(loader), 1):
        if epoch == 0 and me != victim and number == 5:
            wait_for("died")
        model(x.float()[:, None]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.flush()
        trained += len(x)
        if epoch == 0 and me == victim and number == 4 and not died:
            Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if epoch == 0 and me != victim and trained == {SAMPLES} - 16:
            Path("used up").touch()
            wait_for("back")  # and then it saves
            time.sleep(0.3)
fleet.finish()
print("finished after", optimizer.steps, "steps", flush=True)
"""


@pytest.mark.parametrize("victim", [0, RARE(1)])
@pytest.mark.parametrize(
    "mode",
    [
        DILOCO,
        RARE({"sync": True, "lost_trainer": "go_on"}),
        RARE({"staleness": 2}),
        RARE({}),
    ],
    ids=["diloco", "sync", "staleness", "async"],
)
def test_who_comes_back_at_the_end_of_a_pass_holds_up_nobody(
    processes: Processes, mode: dict[str, object], victim: int
) -> None:
    """Its script gets nothing of the pass, waits for its end, and comes to the save."""
    (processes.path / "script.py").write_text(SCRIPT)
    flags = ("--servers", "2", "--trainers", "2", "--max-restarts", "2", "--checkpoint", "saved")
    flags += ("--every", "0.2")
    launch = ("-m", "pserver", "launch", *flags, "script.py", json.dumps(mode), str(victim))
    started = processes.python("launch", *launch)
    status, text = started.status(patience=120), "\n".join(started.lines)

    assert status == 0, text
    assert len(re.findall(r"finished after \d+ steps", text)) == 2, text
    assert "starts it again (restart 1 of 2); the others go on" in text, text
    assert (processes.path / "back").exists() and "is put off" not in text, text


FINISHED = """
import os, signal, sys, threading, time
import torch
from pathlib import Path
from trainer import fleet

when = sys.argv[1]
fleet.init()
me = fleet.worker_index()
model = fleet.distributed_model(torch.nn.Linear(1, 1))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1e-4))
print("begins", flush=True)
for _ in range(5):
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def die():
    os.kill(os.getpid(), signal.SIGKILL)


if me == 1 and when == "in":
    threading.Timer(1.0, die).start()
if me == 0 and when == "in":
    time.sleep(3.0)
fleet.finish()
if me == 1:
    die()
"""


@pytest.mark.long  # tests/pserver/launcher/test_supervisor.py and test_attendance.py stand for it
@pytest.mark.parametrize("when", ["in", "after"])
def test_one_that_dies_when_it_has_finished_ends_nothing(processes: Processes, when: str) -> None:
    """The job is complete: it neither fails nor begins again."""
    (processes.path / "script.py").write_text(FINISHED)
    flags = ("--servers", "2", "--trainers", "2", "--max-restarts", "2")
    started = processes.python("launch", "-m", "pserver", "launch", *flags, "script.py", when)
    status, text = started.status(patience=60), "\n".join(started.lines)

    assert status == 0, text
    assert len(re.findall(r"\| begins", text)) == 2, text
