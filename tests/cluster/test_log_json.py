"""Log lines as JSON, of real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.processes import Processes

pytestmark = pytest.mark.processes

SCRIPT = """
import logging
import torch
from trainer import fleet

fleet.init()
model = fleet.distributed_model(torch.nn.Linear(2, 1))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
logging.getLogger("own").warning("one step")
fleet.finish()
"""


@pytest.mark.long
def test_servers_and_trainers_write_the_same_labels(processes: Processes, tmp_path: Path) -> None:
    """``launch --log-json``: job and run are alike, and what is printed stays as it is."""
    script = tmp_path / "clicks.py"
    script.write_text(SCRIPT)
    words = ("--servers", "1", "--trainers", "1", "--log-json", "--log-dir", str(tmp_path / "logs"))
    launch = processes.python("launch", "-m", "pserver", "launch", *words, str(script))
    assert launch.status() == 0, launch
    logs = [tmp_path / "logs" / name for name in ("server-0.log", "trainer-0.log")]
    server, trainer = (
        [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
        for log in logs
    )
    (said,) = [line for line in trainer if line["logger"] == "own"]
    installed = next(line for line in server if line["message"].startswith("holds "))

    assert said["message"] == "one step" and said["level"] == "WARNING"
    assert (said["process"], installed["process"]) == ("trainer 0", "server 0")
    assert said["job"] == installed["job"] == "clicks" and said["run"] == installed["run"] != ""
    ready = next(line for line in server if line["message"].startswith("pserver ready at"))
    assert ready["message"].startswith(f"pserver ready at {ready['endpoint']} (")
    assert ready["job"] == "clicks" and "\npserver ready" not in logs[0].read_text()
