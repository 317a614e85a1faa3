"""A changed bit in any file of a checkpoint is noticed, and nothing is changed in the job."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pserver.checkpoint import checkpoint
from pserver.checkpoint.manifest import packed, unpacked
from tests.support.eager_jobs import assert_same
from trainer import DistributedEmbedding, fleet

READ, LOADED = 60, 6  # flips of each file, sampled


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = DistributedEmbedding(3, num_embeddings=9, name="emb")
        self.fc = nn.Linear(3, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc(self.emb(ids))
        return out


def step(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.arange(5)).square().mean().backward()
    optimizer.step()


def begun() -> tuple[Net, Any, Any]:
    """A job of this process alone, with a schedule."""
    fleet.init()
    model = Net()
    fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.001))
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A delta, beside the checkpoint that it continues."""
    model, optimizer, schedule = begun()
    step(model, optimizer)
    fleet.save(str(tmp_path / "base"), scheduler=schedule)
    step(model, optimizer)
    fleet.save(str(tmp_path / "delta"), scheduler=schedule, delta=True)
    fleet.finish()
    return tmp_path


def flips(saved: Path, count: int) -> Iterator[str]:
    """One changed bit at a time, in every file that a reader of the delta needs."""
    chosen = random.Random(11)
    for path in sorted(saved.glob("*/*")):
        if path.name.startswith("needed-by"):  # for the next save, not for readers
            continue
        whole = path.read_bytes()
        for _ in range(count):
            changed, bit = bytearray(whole), chosen.randrange(8 * len(whole))
            changed[bit // 8] ^= 1 << bit % 8
            path.write_bytes(changed)
            yield f"{path}, bit {bit}"
        path.write_bytes(whole)


def test_a_changed_bit_in_any_file_of_a_checkpoint_is_refused(saved: Path) -> None:
    """Metadata, tensors, rows, of the delta and of its base; unchanged they are read."""
    for where in flips(saved, READ):
        with pytest.raises(ValueError):
            checkpoint.reading(saved / "delta")
            pytest.fail(where)

    assert checkpoint.reading(saved / "delta").meta["step"] == 2


def test_a_checkpoint_that_is_refused_changes_nothing_in_the_job(saved: Path) -> None:
    """Parameters, states, rows, rates, schedule and step are what they were."""
    model, optimizer, schedule = begun()
    step(model, optimizer)

    def state() -> Any:
        rows = model.emb(torch.arange(9)).detach()
        held = model.fc.state_dict(), optimizer.state_dict(), schedule.state_dict()
        return copy.deepcopy([rows, *held, optimizer.steps])

    before = state()
    for where in flips(saved, LOADED):
        with pytest.raises(ValueError):
            fleet.load(str(saved / "delta"), scheduler=schedule)
            pytest.fail(where)
        assert_same(state(), before, where)

    assert fleet.load(str(saved / "delta"), scheduler=schedule) == 2


def test_every_bit_of_the_metadata_counts() -> None:
    """All of them, not a sample; a rate of 0.001 that became 9.001 is one."""
    whole = packed({"meta": {"groups": [{"lr": 0.001}]}, "files": {}})
    assert unpacked(whole, "here")["meta"] == {"groups": [{"lr": 0.001}]}
    for bit in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError):
            unpacked(bytes(changed), "here")
            pytest.fail(f"bit {bit}")


def test_metadata_of_older_versions_has_no_checksum_and_loads(saved: Path) -> None:
    """Formats 1 and 2; without its checksum the present one is refused."""
    path = saved / "base" / "checkpoint.json"
    found = json.loads(path.read_bytes())
    for key in ("checksum", "by"):
        del found[key]
    path.write_text(json.dumps(found | {"format": 2}))
    assert checkpoint.reading(saved / "base").meta["step"] == 1
    path.write_text(json.dumps(found))

    with pytest.raises(ValueError, match="checksum"):
        checkpoint.reading(saved / "base")


def test_a_damaged_note_keeps_the_files_that_a_delta_needs(saved: Path) -> None:
    """The next save to the base's place would otherwise remove them."""
    (note,) = (saved / "base").glob("needed-by-*")
    content = bytearray(note.read_bytes())
    content[-6] ^= 1
    note.write_bytes(content)
    checkpoint.save(saved / "base", {}, {})

    assert checkpoint.reading(saved / "delta").meta["step"] == 2
