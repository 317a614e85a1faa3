"""Promises of the number of a checkpoint's files: few a server, however many tables a job has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from pserver.checkpoint import checkpoint, manifest
from pserver.config import ServerConfig
from pserver.service.server import Server
from pserver.storage.place import place_at
from trainer import DistributedEmbedding, fleet
from trainer.job.job import present

TABLES, SERVERS, STEPS = 26, 2, 4
MOST = 3  # files of a server, and of what trainer 0 adds: docs/checkpoints.md
IDS: Any = torch.arange(4 * STEPS)


class Net(nn.Module):
    """Many tables, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleList(
            DistributedEmbedding(2, name=f"t{number}") for number in range(TABLES)
        )
        self.out = nn.Linear(2 * TABLES, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(torch.cat([table(ids) for table in self.tables], 1))
        return out


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[str]]:
    """The endpoints of servers that write their parts of checkpoints."""
    with ExitStack() as stack:
        config = ServerConfig(keep_failed_seconds=0.0, store=str(tmp_path))
        yield [stack.enter_context(Server(config)).endpoint for _ in range(SERVERS)]


def trained(endpoints: list[str], **options: Any) -> Iterator[tuple[Net, Any]]:
    """Steps, one at a time."""
    role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=endpoints)
    fleet.init(role, **options)
    model = Net()
    fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.1))
    for ids in fleet.shard(DataLoader(IDS, batch_size=4)):
        if (saves := present().saves) is not None:
            saves.finish()  # a save that is under way is complete
        optimizer.zero_grad()
        model(ids).square().mean().backward()
        optimizer.step()
        yield model, optimizer
    fleet.finish()


def files(path: Path) -> list[str]:
    """Of a directory, without its lock, and the notes of those that continue it."""
    names = (each.name for each in path.iterdir() if each.is_file())
    return sorted(name for name in names if not name.startswith((".lock", "needed-by-")))


def rows(path: Path) -> int:
    reader = checkpoint.reading(path)
    return sum(len(chunk["ids"]) for table in reader.tables for chunk in reader.chunks(table))


def test_a_save_has_three_files_a_server(tmp_path: Path, servers: list[str]) -> None:
    """One that has all rows, and those that continue it."""
    for _ in trained(servers, checkpoint=str(tmp_path), every=1e-6, keep=STEPS):
        pass
    found = sorted(tmp_path.glob("step-*"))
    deltas = [manifest.read(place_at(each / "server-1")).base is not None for each in found]

    assert len(found) >= 3 and not deltas[0] and sum(deltas) >= 2
    for each in found:
        parts = [each / f"server-{number}" for number in range(SERVERS)]
        counts = {where.name: len(files(where)) for where in (each, *parts)}
        assert max(counts.values()) <= MOST, {where.name: files(where) for where in (each, *parts)}
    assert rows(found[-1]) == TABLES * 4 * (len(found))


def test_a_trainer_writes_three_files(tmp_path: Path, servers: list[str]) -> None:
    """All rows, or, as a delta, those that have changed; where servers keep no files."""
    own = [tmp_path.with_name(f"{tmp_path.name}-own-{step}") for step in range(STEPS)]
    for step, _ in enumerate(trained(servers)):
        fleet.save(str(own[step]), delta=step > 0)

    for each in own:
        found = files(each)
        assert len(found) == MOST and found[0] == "checkpoint.json"
    assert rows(own[-1]) == TABLES * 4 * STEPS
