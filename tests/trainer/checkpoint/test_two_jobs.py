"""Two jobs that save to one path: ``fleet`` tells the second one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from pserver.checkpoint import checkpoint
from pserver.errors import Refused
from pserver.job import job_files
from pserver.storage.local import InUse
from trainer import fleet


def begun() -> None:
    fleet.init()
    model = fleet.distributed_model(nn.Linear(2, 1))
    fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def another_job(path: str) -> None:
    """Saves something else."""
    checkpoint.save(path, {}, {"step": 9})


def test_a_job_keeps_its_path_from_its_first_save_to_its_end(tmp_path: Path) -> None:
    """Another one is refused meanwhile, and not afterwards; loading takes nothing."""
    path = str(tmp_path)
    begun()
    fleet.save(path)
    fleet.finish()
    begun()
    fleet.load(path)
    another_job(str(tmp_path / "other"))
    fleet.save(path)
    with pytest.raises(InUse, match="give each job a path of its own"):
        another_job(path)
    assert checkpoint.load(path)[1]["step"] == 0
    fleet.finish()
    another_job(path)

    assert checkpoint.load(path)[1]["step"] == 9


@pytest.mark.parametrize("first", [fleet.save, fleet.load], ids=["saved", "loaded"])
def test_a_job_does_not_replace_what_another_has_put_behind_its_url(
    url: str, first: object
) -> None:
    """Since its own last save or load there; a save to another URL is its own."""
    begun()
    fleet.save(url)
    fleet.finish()
    begun()
    assert callable(first)
    first(url)
    another_job(url)
    with pytest.raises(InUse, match="two jobs write checkpoints to this path"):
        fleet.save(url)
    fleet.save(f"{url}/mine")

    assert checkpoint.load(url)[1]["step"] == 9


@pytest.mark.parametrize("given", ["s3://bucket/x", "s3:/bucket/x"])
def test_a_server_keeps_no_files_behind_urls(tmp_path: Path, given: str) -> None:
    """A trainer's Save or Load with one is refused, and no folder ``s3:`` is made."""
    with pytest.raises(Refused, match="a server's files: expected a path"):
        job_files.directory(str(tmp_path), given, 0)
