"""Promises of ``pserver.checkpoint.checkpoint``: whole or refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from pserver.checkpoint import checkpoint
from pserver.storage import plain_file
from pserver.storage.local import DiskFile

OLD = {"w": torch.arange(6.0).reshape(2, 3)}
NEW = {"w": torch.arange(6.0).reshape(2, 3) + 1, "b": torch.ones(2)}


def data_file(path: Path) -> Path:
    (found,) = path.glob("tensors-*.safetensors")
    return found


def test_what_was_saved_is_what_is_loaded(tmp_path: Path) -> None:
    """Values of every dtype, strided, empty, scalar and memory-sharing tensors come back to the
    bit, with the metadata.
    """
    shared = torch.randn(4, 4)
    tensors = {
        "half": torch.randn(3).to(torch.bfloat16),
        "whole": torch.tensor([1, 2**40]),
        "flag": torch.tensor(True),
        "empty": torch.empty(0, 3),
        "transposed": torch.randn(3, 5).t(),
        "tied.a": shared,
        "tied.b": shared,
        "row": shared[1],
    }
    checkpoint.save(tmp_path / "job", tensors, {"step": 7, "rate": 0.1})
    loaded, meta = checkpoint.load(tmp_path / "job")

    assert meta == {"step": 7, "rate": 0.1}
    assert list(loaded) and set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor), name


class Killed(BaseException):
    """Stands for a process that stops: no ``except Exception`` may swallow it."""


def kill_at(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, call: int, partial: bool
) -> None:
    real = getattr(module, name)
    calls = 0

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != call:
            return real(*args, **kwargs)
        if partial:
            real(*args, **kwargs)
        raise Killed

    monkeypatch.setattr(module, name, wrapper)


STEPS = [
    (DiskFile, "write", 1),
    (DiskFile, "write", 2),
    (DiskFile, "finish", 1),
    (os, "fsync", 1),
    (os, "fsync", 2),
    (os, "fsync", 3),
    (os, "fsync", 4),
    (os, "replace", 1),
    (plain_file, "write_bytes", 1),
]


@pytest.mark.parametrize("tidies", [True, False], ids=["raises", "stops dead"])
@pytest.mark.parametrize("partial", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("module", "name", "call"), STEPS, ids=[f"{n}-{c}" for _, n, c in STEPS])
def test_a_save_that_stops_anywhere_leaves_the_old_checkpoint_or_the_new_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    name: str,
    call: int,
    partial: bool,
    tidies: bool,
) -> None:
    """Whatever step it stops at, before or after its effect, ``load`` gives all of the old state or
    all of the new one.
    """
    checkpoint.save(tmp_path, OLD, {"step": 1})
    with monkeypatch.context() as patch:
        kill_at(patch, module, name, call, partial)
        if not tidies:  # a kill -9 runs no cleanup
            patch.setattr(Path, "unlink", lambda self, missing_ok=False: None)
        with pytest.raises(Killed):
            checkpoint.save(tmp_path, NEW, {"step": 2})
    loaded, meta = checkpoint.load(tmp_path)

    expected = OLD if meta["step"] == 1 else NEW
    assert set(loaded) == set(expected) and all(
        torch.equal(loaded[key], expected[key]) for key in expected
    )
    checkpoint.save(tmp_path, NEW, {"step": 3})
    assert checkpoint.load(tmp_path)[1] == {"step": 3} and len(list(tmp_path.iterdir())) == 2


def test_a_first_save_that_stops_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors without a manifest are not loaded."""
    kill_at(monkeypatch, os, "replace", 1, partial=False)
    with pytest.raises(Killed):
        checkpoint.save(tmp_path, NEW, {})

    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        checkpoint.load(tmp_path)


def test_metadata_that_is_not_json_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """A TypeError, and the directory is as it was."""
    with pytest.raises(TypeError):
        checkpoint.save(tmp_path / "new", OLD, {"what": object()})

    assert not (tmp_path / "new").exists()
    checkpoint.save(tmp_path / "new", OLD, {"what": [1]})
    assert json.loads((tmp_path / "new" / "checkpoint.json").read_text())["meta"] == {"what": [1]}
