"""What becomes of a job of two trainers whose files fail: real processes, on a file system that is
full.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launched import LAUNCH, environment
from tests.support.load import run
from tests.support.tiers import RARE

SCRIPT = Path(__file__).with_name("failing_files.py")
SIZE = "160k"  # of the disk: a checkpoint of Linear(100, 100) and Adam has 120 KB
SECONDS = 60.0

pytestmark = pytest.mark.processes


@functools.cache
def mounts() -> bool:
    """Whether this user may mount a file system in a name space of its own."""
    tried = subprocess.run(
        ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"],
        capture_output=True,
        check=False,
    )
    return tried.returncode == 0


@pytest.mark.parametrize(
    ("mode", "disk"),
    [
        ("servers", "a full file system"),
        RARE("servers", "a limit of the process"),
        RARE("collective", "a full file system"),
        RARE("collective", "a limit of the process"),
    ],
)
def test_what_one_trainers_files_raise_all_raise_and_the_job_goes_on(
    tmp_path: Path, mode: str, disk: str
) -> None:
    """A full disk in save and export, a torn and a missing file in load, control-C in save: an
    error on both trainers, the old checkpoint stays, nothing changes, and both step on.
    """
    full = disk == "a full file system"
    if full and not mounts():
        pytest.skip("this user may not mount a file system")
    (tmp_path / "disk").mkdir()
    cluster = ["--servers", "1"] if mode == "servers" else ["--nccl2"]
    command = [*LAUNCH, *cluster, "--trainers", "2", str(SCRIPT), "disk"]
    if full:
        mount = f"mount -t tmpfs -o size={SIZE} tmpfs disk && exec "
        quoted = " ".join(f"'{word}'" for word in command)
        command = ["unshare", "-rm", "sh", "-c", mount + quoted]
    done = run(
        command,
        cwd=tmp_path,
        env=environment(PYTHONPATH=":".join(filter(None, sys.path))),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    for trainer in (0, 1):
        said = [
            line.partition(" | ")[2]
            for line in done.stdout.splitlines()
            if line.startswith(f"trainer {trainer} | ")
        ]
        assert said[-1] == "went on", done.stdout
