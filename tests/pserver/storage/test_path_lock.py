"""Promises of locks on local paths: one writer at a time, whoever it is, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from pserver.checkpoint import checkpoint
from pserver.checkpoint.checkpoint import MOST_LOCKS, Claims
from pserver.storage.local import InUse, PathLock

HOLDER = """
import sys, torch
from pserver.checkpoint import checkpoint
claims = checkpoint.Claims()
with checkpoint.writing(sys.argv[1], claims=claims) as writer:
    writer.commit({"step": 1})
print("saved", flush=True)
sys.stdin.read()
"""

FORKS = """
import os, sys
from pathlib import Path
from pserver.storage.local import PathLock
lock = PathLock(Path(sys.argv[1]))
reads, writes = os.pipe()
child = os.fork()
if child == 0:
    os.close(writes)
    os.read(reads, 1)
    os._exit(0)
lock.release()
PathLock(Path(sys.argv[1])).release()
print("locked again", flush=True)
os.close(writes)
os.waitpid(child, 0)
"""


@contextmanager
def another_job(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has saved to the path, and goes on."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdin is not None and holder.stdout is not None
    try:
        assert holder.stdout.readline() == "saved\n"
        yield holder
    finally:
        holder.stdin.close()
        holder.wait()
        holder.stdout.close()


def save(path: Path, claims: Claims | None = None) -> None:
    with checkpoint.writing(path, claims=claims) as writer:
        writer.tensors({"w": torch.ones(1)})
        writer.commit({"step": 2})


@pytest.mark.processes
def test_a_second_job_at_one_path_is_refused_and_told_who_is_there(tmp_path: Path) -> None:
    """While the first one runs, not only while it writes; and its death frees the path."""
    with another_job(tmp_path) as holder:
        with pytest.raises(InUse, match=f"process {holder.pid} on .* writes checkpoints") as said:
            save(tmp_path)
        assert f"process {os.getpid()} on" in str(said.value)
        assert checkpoint.load(tmp_path)[1] == {"step": 1}
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        save(tmp_path)

    assert checkpoint.load(tmp_path)[1] == {"step": 2}
    assert not (tmp_path / ".lock").exists()


def test_a_job_holds_its_paths_until_it_ends(tmp_path: Path) -> None:
    """Another job of this process too is refused; the job itself saves again, and may read."""
    claims = Claims()
    save(tmp_path, claims)
    save(tmp_path, claims)
    with pytest.raises(InUse):
        save(tmp_path)
    assert checkpoint.load(tmp_path)[1] == {"step": 2}
    claims.release()

    save(tmp_path)


def test_a_job_holds_the_paths_that_it_used_last(tmp_path: Path) -> None:
    """One that saves to a new path each time does not run out of files."""
    claims = Claims()
    for number in range(MOST_LOCKS + 1):
        save(tmp_path / str(number), claims)

    save(tmp_path / "0")
    with pytest.raises(InUse):
        save(tmp_path / "1")
    claims.release()


def test_a_directory_that_was_removed_is_locked_anew(tmp_path: Path) -> None:
    """The lock of a file that is gone keeps nobody out."""
    claims = Claims()
    save(tmp_path / "job", claims)
    for path in (tmp_path / "job").iterdir():
        path.unlink()
    (tmp_path / "job").rmdir()
    save(tmp_path / "job", claims)

    with pytest.raises(InUse):
        save(tmp_path / "job")
    claims.release()


def test_a_lock_that_is_released_lets_a_waiting_one_in(tmp_path: Path) -> None:
    """The file is removed while it is locked: who had opened it before takes a new one."""
    first = PathLock(tmp_path)
    opened = os.open(tmp_path / ".lock", os.O_RDWR)
    first.release()
    second = PathLock(tmp_path)
    os.close(opened)

    with pytest.raises(InUse):
        PathLock(tmp_path)
    second.release()
    assert not list(tmp_path.iterdir())


@pytest.mark.processes
def test_a_forked_process_does_not_keep_its_parents_lock(tmp_path: Path) -> None:
    """As a data loader's worker, which may live longer than the job.

    A small process forks: a fork of this one, which has held gigabytes, may be refused.
    """
    done = subprocess.run(
        [sys.executable, "-c", FORKS, str(tmp_path)], capture_output=True, text=True, timeout=60
    )

    assert done.stdout == "locked again\n", done.stderr
