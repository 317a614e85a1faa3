"""A directory of other things is no place where a job begins anew by mistake."""

from __future__ import annotations

import uuid
from pathlib import Path

import fsspec
import pytest
import torch

from pserver.checkpoint import checkpoint

TENSORS = {"a": torch.ones(2)}


@pytest.mark.parametrize(
    "left",
    [
        (),
        ("tensors-0f3a.safetensors", "rows-77d0.safetensors"),  # of a save that stopped
        ("checkpoint.json.0f3a", "checkpoints.json"),
        ("server-0/checkpoint.json", ".lock", "lost+found/"),
    ],
    ids=lambda each: each[0] if each else "nothing",
)
def test_what_no_save_has_completed_is_missing(tmp_path: Path, left: tuple[str, ...]) -> None:
    """Nothing, and what a stopped save or the system has left: FileNotFoundError."""
    for name in left:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.mkdir() if name.endswith("/") else path.touch()

    with pytest.raises(FileNotFoundError, match="no complete checkpoint in"):
        checkpoint.reading(tmp_path)
    with pytest.raises(FileNotFoundError, match="no complete checkpoint in"):
        checkpoint.reading(tmp_path / "missing")


def test_other_files_are_no_missing_checkpoint(tmp_path: Path) -> None:
    """Of a script, of logs, or a file in place of the directory: another error, which names some
    of them.
    """
    for name in ("train.py", "job.log", "a.txt", "b.txt"):
        (tmp_path / name).touch()

    with pytest.raises(
        ValueError, match="is no checkpoint: it has no checkpoint.json, but a.txt, b.txt, job.log a"
    ):
        checkpoint.reading(tmp_path)
    with pytest.raises(ValueError, match="expected the directory of a checkpoint, got a file"):
        checkpoint.reading(tmp_path / "train.py")


def test_the_folder_of_a_jobs_own_checkpoints_names_the_newest(tmp_path: Path) -> None:
    """Which is what its user meant."""
    for name in ("step-000010", "step-000120"):
        checkpoint.save(tmp_path / name, TENSORS, {})
    (tmp_path / "step-000130").mkdir()  # being written

    with pytest.raises(ValueError, match=f"; expected the path of one, as {tmp_path}/step-000120$"):
        checkpoint.reading(tmp_path)
    assert checkpoint.reading(tmp_path / "step-000120").tensors().keys() == TENSORS.keys()


def test_behind_a_url_it_is_the_same() -> None:
    """Objects and prefixes stand for files and directories."""
    url = f"memory://{uuid.uuid4().hex}"
    with pytest.raises(FileNotFoundError):
        checkpoint.reading(url)
    checkpoint.save(f"{url}/step-000010", TENSORS, {})
    with fsspec.open(f"{url}/notes.txt", "w") as file:
        file.write("mine")

    with pytest.raises(ValueError, match="but notes.txt, step-000010; expected the path of one"):
        checkpoint.reading(url)
