"""Rows that steps move without touching them, in a k-step lane: one trainer and its servers have
what plain torch has.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.table_trainers import Servers
from tests.support.threads import at_once
from trainer import Constant, DistributedEmbedding, ShowClickEntry, fleet
from trainer.checkpoint.export import export
from trainer.environment.environment import Role, RoleMaker
from trainer.job.job import Job
from trainer.job.save_load import _table_rows
from transpiler import DistributedStrategy

ROWS, STEPS = 10, 7
IDS = [[7, 8], [7], [7], [1, 7], [7], [2], [7]]  # by step
Make = Callable[[Any], torch.optim.Optimizer]
MAKES: dict[str, Make] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "decay": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
    "both": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
}


def plain(make: Make) -> torch.Tensor:
    """An nn.Embedding of ones after all steps."""
    model = nn.Embedding(ROWS, 2)
    nn.init.ones_(model.weight)
    optimizer = make(model.parameters())
    for ids in IDS:
        optimizer.zero_grad()
        model(torch.tensor(ids)).sum().backward()
        optimizer.step()
    return model.weight.detach()


class Net(nn.Module):
    """A table of ones."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.emb = DistributedEmbedding(2, init=Constant(1.0), **options)


def trained(
    endpoints: str, make: Make, k_steps: int, number: int = 0, trainers: int = 1, **options: Any
) -> Job:
    """A job after all steps."""
    strategy = DistributedStrategy()
    strategy.a_sync = k_steps > 0
    if k_steps:
        strategy.a_sync_configs = {"k_steps": k_steps}
    role = fleet.UserDefinedRoleMaker(
        number, worker_num=trainers, server_endpoints=endpoints.split(",")
    )
    job = Job(role, strategy)
    job.models.append(Net(**options))
    optimizer = job.join(make(job.models[0].parameters()))
    for ids in IDS:
        optimizer.zero_grad()
        job.models[0].emb(torch.tensor(ids)).sum().backward()  # type: ignore[operator, union-attr]
        optimizer.step()
    return job


def served(job: Job, ids: list[int]) -> torch.Tensor:
    """Rows as the servers have them."""
    assert job.communicator is not None and job.communicator.lookups is not None
    return job.communicator.lookups.pull("emb", torch.tensor(ids))


@pytest.mark.parametrize("options", [{}, {"num_embeddings": ROWS}], ids=["any id", "a range"])
@pytest.mark.parametrize("k_steps", [1, 2, 5])
@pytest.mark.parametrize("name", MAKES)
def test_servers_have_what_plain_torch_has(
    servers: Servers, name: str, k_steps: int, options: dict[str, int]
) -> None:
    """Of every row that the trainer has looked up, when it has flushed."""
    job, expected = trained(servers(2), MAKES[name], k_steps, **options), plain(MAKES[name])
    # where ids may be anything a row begins with its first push
    rows = [7, 8, *([1, 2] if options else [])]
    job.optimizers[0].flush()

    assert (served(job, rows) - expected[rows]).abs().max() <= 1e-5
    with torch.no_grad():
        read = job.models[0].emb(torch.tensor(rows))  # type: ignore[operator, union-attr]
    assert (read - expected[rows]).abs().max() <= 1e-5
    job.finish()


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_servers_evict_and_trainers_do_not(servers: Servers, eviction: str) -> None:
    """A table of any eviction may be in a k-step lane."""
    job = trained(servers(1), MAKES["momentum"], 1, capacity=3, eviction=eviction)
    job.optimizers[0].flush()
    assert job.communicator is not None

    (status,) = job.communicator.clients[0].table_status()

    assert status.rows == 3
    job.finish()


def test_a_row_that_is_looked_up_late_has_decayed(servers: Servers) -> None:
    """In a table of a range it was there from the first step on."""
    job = trained(servers(1), MAKES["decay"], 2, num_embeddings=ROWS)
    with torch.no_grad():
        read = job.models[0].emb(torch.tensor([3]))  # type: ignore[operator, union-attr]

    assert (read - plain(MAKES["decay"])[3]).abs().max() <= 1e-6
    job.optimizers[0].flush()
    assert (served(job, [3]) - read).abs().max() <= 1e-6
    job.finish()


def test_nothing_is_sent_where_nothing_moves(servers: Servers) -> None:
    """A flush sends no row again that plain SGD has left alone."""
    job = trained(servers(1), lambda p: torch.optim.SGD(p, lr=0.1), 1)
    job.optimizers[0].flush()
    assert job.communicator is not None
    sent = job.communicator.variable_bytes()["emb"]["bytes_out"]
    job.optimizers[0].flush()

    assert job.communicator.variable_bytes()["emb"]["bytes_out"] == sent
    job.finish()


def test_rows_that_were_only_moved_were_not_shown(servers: Servers) -> None:
    """Their show and click counts stay as they are."""
    job = trained(servers(1), MAKES["momentum"], 2, entry=ShowClickEntry("show", "click"))
    job.optimizers[0].flush()
    assert job.communicator is not None and job.communicator.lookups is not None
    (chunk,) = [chunk for chunk, _ in job.communicator.lookups.scan("emb")]
    shown = dict(zip(chunk["ids"].tolist(), chunk["show"].tolist(), strict=True))

    assert (served(job, [8]) - plain(MAKES["momentum"])[8]).abs().max() <= 1e-6
    assert shown == {1: 1, 2: 1, 7: 6, 8: 1}
    job.finish()


def test_several_trainers_send_their_part(servers: Servers) -> None:
    """Each the movement of its own rows, divided by the number of trainers: all together as one."""
    endpoints = servers(2)

    def play(number: int) -> torch.Tensor:
        job = trained(endpoints, MAKES["momentum"], 100, number, 2)
        for _ in range(2):  # the second time there is nothing to send
            job.optimizers[0].flush()
        job.optimizers[0].barrier("flushed")
        rows = served(job, [7, 8])
        job.finish()  # nor here, while the other one reads
        return rows

    rows = at_once(lambda: play(0), lambda: play(1))
    for each in rows:
        assert (each - plain(MAKES["momentum"])[[7, 8]]).abs().max() <= 1e-5


@pytest.mark.parametrize("alone", [False, True])
def test_an_export_of_a_range_has_decayed(servers: Servers, tmp_path: Path, alone: bool) -> None:
    """Rows that nobody has touched, too, in a sync job and in a process that trains alone."""
    make = MAKES["both"]
    if alone:
        job = Job(RoleMaker(Role.SINGLE), None)
        job.models.append(Net(num_embeddings=ROWS))
        optimizer = job.join(make(job.models[0].parameters()))
        for ids in IDS:
            optimizer.zero_grad()
            job.models[0].emb(torch.tensor(ids)).sum().backward()  # type: ignore[operator, union-attr]
            optimizer.step()
    else:
        job = trained(servers(2), make, 0, num_embeddings=ROWS)
    assert job.tables is not None
    path = tmp_path / "model.pt"
    export(path, {}, _table_rows(job, job.tables))
    weight = torch.load(path, weights_only=True)["emb.weight"]

    assert (weight - plain(make)).abs().max() <= 1e-6
    job.finish()
