"""``pserver plan``: the split of a real script, without starting any of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

SCRIPT = """
import sys, torch
from torch import nn
from trainer import fleet
fleet.init()
model = fleet.distributed_model(nn.Linear(100, int(sys.argv[1])))
fleet.distributed_optimizer(torch.optim.Adam(model.parameters()))
print("trained")
"""


def plan(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pserver", "plan", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_plan_prints_the_split_bytes_and_memory_and_starts_nothing(tmp_path: Path) -> None:
    """The script runs up to its first connection; options may stand before it or behind its
    arguments.
    """
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    done = plan(str(script), "300", "--servers", "2", "--trainers", "3")

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "sync: 3 trainers, 2 servers"
    weight = next(line for line in lines if line.startswith("weight"))
    # the first variable's first block goes to the first server
    assert weight.endswith("0: 15000, 1: 15000")
    # 15000 of weight and 300 of bias, 4 bytes each
    assert any(line.startswith("0 ") and "61.2 KB" in line for line in lines)
    assert "trained" not in done.stdout


@pytest.mark.parametrize(
    ("words", "status"),
    [(("nothing.py", "--servers", "1", "--trainers", "1"), 1), (("x.py", "--servers", "1"), 2)],
)
def test_mistakes_are_one_line(words: tuple[str, ...], status: int) -> None:
    """No traceback, and the usual exit statuses."""
    done = plan(*words)

    assert done.returncode == status
    assert len(done.stderr.splitlines()) == 1
