"""A model's life in programs, from capture to prediction: each part goes on where the last one
ended, and all of it is what plain torch computes.

``make check-pairs`` takes every model in every mode, in processes; ``make test`` one of them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support import lives
from tests.support.life_models import MODELS
from tests.support.matrix import crossed

WAITS = ("sync", "async")  # its one trainer waits for every result: an async one that flushes
# torch's own sparse Adagrad: whether its sum is fused with the product depends on the processor
ROUNDED = "two_tower"


def as_alone(folder: Path, model: str, mode: str) -> None:
    """All that was computed is what plain torch computes."""
    found = {
        **load_file(folder / "begins.safetensors"),
        **load_file(folder / "goes_on.safetensors"),
    }
    expected, prediction = lives.alone(model), lives.predicted(folder)
    assert torch.equal(prediction, found[max(key for key in found if key.startswith("prediction"))])
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if mode in WAITS and model != ROUNDED:
            assert torch.equal(found[name], value), name
        else:
            assert (found[name] - value).abs().max() <= 1e-6, name


@pytest.mark.processes
def test_a_model_lives_as_with_plain_torch(servers: Callable[[int], str], tmp_path: Path) -> None:
    """Tables, async, k-step and sync in one: saved on 2 servers, resumed on 3 in mid-schedule,
    evaluated, saved for inference; a process that has the file alone predicts.
    """
    lives.run("dlrm", "mixed", tmp_path, servers(2), resumes=False)
    lives.run("dlrm", "mixed", tmp_path, servers(3), resumes=True, seed=8)
    as_alone(tmp_path, "dlrm", "mixed")


@pytest.mark.processes
@crossed("lives", diagonal=False, model=MODELS, mode=lives.MODES)
def test_every_model_lives_as_with_plain_torch(tmp_path: Path, model: str, mode: str) -> None:
    """The same, each part in processes of its own.  To the bit where the one trainer waits for its
    results, but for sparse Adagrad; within 1e-6 otherwise.
    """
    for part in ("begins", "goes_on"):
        command = [sys.executable, "-m", "tests.support.lives", part, model, mode, str(tmp_path)]
        subprocess.run(command, cwd=lives.ROOT, check=True, timeout=240)
    as_alone(tmp_path, model, mode)
