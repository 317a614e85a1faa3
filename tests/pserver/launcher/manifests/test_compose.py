"""Promises of a file for Compose, kept by a container engine: ``make check-image``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pserver.__main__ import main
from tests.support.containers import Engine, found

IMAGE, PROJECT = "pserver-manifest-check", "pserver-manifest-check"
SERVICES = ("pserver0", "pserver1", "trainer0", "trainer1")
SCRIPT = """
import torch
from torch.nn.functional import mse_loss
from trainer import fleet

fleet.init()
model = fleet.distributed_model(torch.nn.Linear(2, 1))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
mse_loss(model(torch.ones(1, 2)), torch.ones(1, 1)).backward()
optimizer.step()
fleet.save("/data/saved")
print("trainer", fleet.worker_index(), "has saved after step", fleet.load("/data/saved"))
fleet.finish()
"""

pytestmark = [pytest.mark.containers, pytest.mark.processes, pytest.mark.timeout(1800)]


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Engine]:
    """A job of two servers and two trainers, with a volume and keys, has been started."""
    engine = found()
    if engine is None:
        pytest.skip("no container engine with compose on this machine")
    keys, script, file = tmp_path / "keys", tmp_path / "train.py", tmp_path / "job.yaml"
    script.write_text(SCRIPT, encoding="utf-8")
    asked = f"--servers 2 --trainers 2 --image {IMAGE} --data-dir /data --metrics 9400"
    line = f"--kind compose {asked} --output {file} {script}"
    assert main(["manifest", *line.split()]) == 0
    assert main(["keys", "init", str(keys), "--hosts", ",".join(SERVICES)]) == 0
    job = Engine(*engine, PROJECT, keys, file)
    for path in (keys, *keys.rglob("*")):
        os.chown(path, job.user, -1)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    job.build(IMAGE)
    job.compose("up", "-d")
    yield job
    job.compose("down", "-v")


def test_the_job_ends_by_itself(up: Engine) -> None:
    """All four exit with 0, and the trainers share the volume."""
    assert {name: up.status(name) for name in SERVICES} == dict.fromkeys(SERVICES, 0)
    for number in (0, 1):
        said = up("logs", up.container(f"trainer{number}"))

        assert f"trainer {number} has saved after step 1" in said
