"""The end of a process beside gloo's threads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trainer.collective.rendezvous import wait_for_rest

# an operation whose tensors gloo's thread frees last, at the very end of the script
SCRIPT = """
import torch, torch.distributed as dist
from trainer import init_parallel_env

init_parallel_env()
for _ in range(20):
    dist.all_reduce(torch.ones(1), async_op=True).wait()
"""


def _describe(tasks: Path, name: str, *states: str) -> None:
    for number, state in enumerate(states):
        (tasks / f"{name}{number}").mkdir()
        (tasks / f"{name}{number}" / "stat").write_text(f"7 ({name}) {state} 1 7 7 0 -1 4194304")


@pytest.mark.parametrize(
    ("states", "rests"),
    [("", True), ("S", True), ("SS", True), ("SR", False), ("D", False)],
)
def test_threads_of_gloos_that_run_are_waited_for(tmp_path: Path, states: str, rests: bool) -> None:
    """Other threads may do as they like; where nothing is known there is nothing to wait for."""
    _describe(tmp_path, "python", "R", "S")
    _describe(tmp_path, "pt_gloo_runloop", *states)
    assert wait_for_rest(tmp_path, longest_seconds=20.0 if rests else 0.05) == rests
    assert wait_for_rest(tmp_path / "nowhere", longest_seconds=20.0)


@pytest.mark.processes
def test_a_script_that_ends_in_a_collective_ends_well() -> None:
    """Its last tensors are freed before the interpreter ends."""
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stderr) == (0, "")
