"""The example of clicks under ``pserver launch``: several trainers learn one model from one stream
of clicks.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.support.load import run

SCRIPT = Path(__file__).parent.parent.parent / "trainer" / "examples" / "ctr.py"
SMALL = (
    "--samples 12800 --batch 64 --categories 20 --dim 4 --hidden 16 --rate 0.03 "
    "--linear-rate 0.1 --every 50"
).split()

pytestmark = pytest.mark.processes


@pytest.mark.long  # tests/trainer/examples/test_recommenders.py stands for it
def test_two_trainers_learn_together(tmp_path: Path) -> None:
    """Asynchronously: near the truth's AUC; rows are counted on the servers; what they hold is
    exported.
    """
    command = [
        sys.executable,
        "-m",
        "pserver",
        "launch",
        "--servers",
        "1",
        "--trainers",
        "2",
        str(SCRIPT),
    ]
    done = run(
        [*command, *SMALL, "--export", str(tmp_path / "model.pt")],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"test auc (0\.\d+) \(the truth itself: (0\.\d+)\)", done.stdout)
    assert found is not None and float(found[2]) - float(found[1]) <= 0.06, done.stdout
    assert re.search(r"12800 samples .* 1040 rows, \d+ MiB  \(shm\)", done.stdout), done.stdout
    assert len(torch.load(tmp_path / "model.pt")["embedding.ids"]) == 26 * 20
