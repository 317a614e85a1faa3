"""Promises of checkpoints whose writer is killed: what is read is always one whole save, the last
one or the one under way.
"""

from __future__ import annotations

import os
import random
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pserver.checkpoint import checkpoint
from pserver.checkpoint.checkpoint import Saved
from pserver.storage import plain_file
from pserver.storage.local import DiskFile
from tests.support.fork_server import finished

ROWS = 20


def save(path: Path, step: int, told: Callable[[], None] = lambda: None) -> None:
    """Every third save is full; the others hold one changed row and remove another."""
    base: Saved | None = checkpoint.saved_in(path) if step % 3 else None
    ids = np.arange(ROWS) if base is None else np.array([step % ROWS])
    with checkpoint.writing(path, base) as writer:
        told()
        writer.tensors({"w": torch.full((2000,), float(step))})
        told()
        chunks = [
            {"ids": ids[part::2], "values": np.full((len(ids[part::2]), 1), step, np.float32)}
            for part in range(2)
        ]
        if base is not None:
            chunks[1]["removed"] = np.array([(step + 7) % ROWS])
        writer.chunks("emb", chunks)
        told()
        writer.commit({"step": step})
    told()


def whole(path: Path) -> int:
    """The step of the checkpoint that is read, after all of it was compared with what that step
    saved.
    """
    reader = checkpoint.reading(path)
    step = reader.meta["step"]
    rows = dict.fromkeys(range(ROWS), step - step % 3)
    for later in range(step - step % 3 + 1, step + 1):
        rows[later % ROWS] = later
        rows.pop((later + 7) % ROWS)
    found = {
        own: int(value)
        for part in reader.chunks("emb")
        for own, value in zip(part["ids"], part["values"][:, 0], strict=True)
    }
    assert found == rows and torch.equal(reader.tensors()["w"], torch.full((2000,), float(step)))
    return int(step)


def saves_until_killed(path: Path, step: int) -> int:
    """Starts a process that saves for ever, kills it with -9 at some moment of the third save or
    later; the steps it began.
    """
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reads)
        while True:
            os.write(writes, b"s")
            save(path, step, lambda: os.write(writes, b".") and None)
            step += 1
    os.close(writes)
    told = random.randrange(10, 20)
    got = b""
    while len(got) < told:
        got += os.read(reads, 1)
    # not to be killed where it writes to the pipe
    select.select([], [], [], random.random() * 0.004)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while piece := os.read(reads, 4096):
        got += piece
    os.close(reads)
    return got.count(b"s")


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_a_process_that_is_killed_while_it_saves_leaves_one_whole_save(tmp_path: Path) -> None:
    """kill -9 at random moments of real saves, full ones and deltas in place: the last save that
    ended, or the one under way.
    """
    done = finished([__file__, str(tmp_path)], seconds=50.0)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "12 kills"


class Stopped(BaseException):
    """Stands for a process that stops: no ``except Exception`` may swallow it."""


STAGES = [
    (os, "fsync"),
    (os, "replace"),
    (plain_file, "write_bytes"),
    (DiskFile, "write"),
    (DiskFile, "finish"),
]


@pytest.mark.parametrize("partial", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("module", "name"), STAGES, ids=[name for _, name in STAGES])
@pytest.mark.parametrize("step", [2, 3], ids=["delta of a delta", "full"])
def test_a_save_that_stops_at_any_call_leaves_one_whole_save(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    name: str,
    partial: bool,
    step: int,
) -> None:
    """Stopped dead before or after each call that reaches the disk, in turn; and the save after it
    leaves no trace of it.
    """
    real = getattr(module, name)
    left = 0

    def stops(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        result = real(*args, **kwargs) if partial or left != 0 else None
        if left == 0:
            raise Stopped
        return result

    for at in range(1, 100):
        path = tmp_path / str(at)
        for earlier in range(step):
            save(path, earlier)
        left = at
        with monkeypatch.context() as patch:
            patch.setattr(module, name, stops)
            # a kill -9 runs no cleanup
            patch.setattr(Path, "unlink", lambda self, missing_ok=False: None)
            try:
                save(path, step)
            except Stopped:
                assert whole(path) in (step - 1, step)
            else:
                assert at > 1 and left > 0
                break
        save(path, 3)
        assert whole(path) == 3 and len(list(path.iterdir())) == 3
    else:
        pytest.fail("expected a save to end")


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    random.seed(5)
    save(directory, 0)
    following = 1
    for _ in range(12):
        began = saves_until_killed(directory, following)
        at = whole(directory)
        assert following + began - 2 <= at <= following + began - 1, (following, began, at)
        following = at + 1
    while following % 3:
        following += 1
    save(directory, following)
    assert whole(directory) == following and len(list(directory.iterdir())) == 3, list(
        directory.iterdir()
    )
    print("12 kills")
