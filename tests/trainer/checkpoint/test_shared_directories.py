"""A save does not put a checkpoint's files among those of others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch import nn

from trainer import Executor, fleet
from transpiler import capture

Save = Callable[[str], None]


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).sum()


@pytest.fixture(params=["fleet", "Executor"])
def save(request: Any) -> Iterator[Save]:
    """``fleet.save``, or ``Executor.save``, of a job of one process."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if request.param == "Executor":
        program, _ = capture(model, loss, optimizer, (torch.ones(1, 2),))
        with Executor() as executor:
            yield lambda path: executor.save(path, program)
    else:
        fleet.init()
        model = fleet.distributed_model(model)
        fleet.distributed_optimizer(optimizer)
        yield fleet.save
        fleet.finish()


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(each.relative_to(folder)): each.read_bytes()
        for each in folder.rglob("*")
        if each.is_file()
    }


def test_a_directory_of_other_files_is_refused(save: Save, tmp_path: Path) -> None:
    """Before anything is written, and nothing is removed; one below it is taken."""
    for name in ("train.py", "logs/job.log", "tensors-mine.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    before = contents(tmp_path)
    said = f"{tmp_path}: expected a new directory, an empty one, or that of a checkpoint, got one "
    said += f"with logs, train.py: give the checkpoint a directory of its own, as {tmp_path}/saved"
    with pytest.raises(ValueError, match=re.escape(said)):
        save(str(tmp_path))
    assert contents(tmp_path) == before
    save(str(tmp_path / "saved"))

    assert (tmp_path / "saved" / "checkpoint.json").exists()


@pytest.mark.parametrize(
    "there",
    [
        (),
        ("lost+found/", ".hidden", ".git/"),
        ("tensors-0f3a.safetensors", "writing-0f3a", "checkpoint.json.0f3a"),
    ],
    ids=["nothing", "the system's", "of a stopped save"],
)
def test_a_directory_without_other_files_is_taken(
    save: Save, tmp_path: Path, there: tuple[str, ...]
) -> None:
    """Once a checkpoint is there, any file may lie beside it; so may other checkpoints before."""
    save(str(tmp_path / "epoch-1"))
    for name in there:
        (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).touch()
    save(str(tmp_path))
    (tmp_path / "notes.txt").write_text("mine")
    save(str(tmp_path))

    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_behind_a_url_it_is_the_same(save: Save, url: str) -> None:
    """Where directories are what names begin with."""
    with fsspec.open(f"{url}/data/part-0.csv", "w") as file:
        file.write("mine")
    with pytest.raises(ValueError, match=r"got one with data: give the checkpoint a directory"):
        save(url)
    save(f"{url}/saved")

    with fsspec.open(f"{url}/data/part-0.csv") as file:
        assert file.read() == b"mine"
