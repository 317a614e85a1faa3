"""Programs with sparse tables against real servers in this process: every mode, clipping, several
trainers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import trainer.executor.pserver_runtime
from pserver.config import ServerConfig
from pserver.service.server import Server
from tests.support.eager_modes import strategy_of
from tests.support.table_programs import (
    DIM,
    ROWS,
    Net,
    Servers,
    Tables,
    adagrad,
    assert_close,
    batches,
    begun,
    run,
    sgd,
    train,
    transpiled,
    values,
)
from trainer import DistributedEmbedding, Executor, ShowClickEntry
from transpiler import capture
from transpiler.program import Program

MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "sync, split at run time": {
        "sync_mode": False,
        "completely_not_async": True,
        "runtime_split_send_recv": True,
    },
    "async": {"sync_mode": False},
    "async, split at run time": {"sync_mode": False, "runtime_split_send_recv": True},
    "half-async": {"sync_mode": False, "half_async": True},
    "geo": {"sync_mode": False, "geo_sgd_mode": True, "geo_sgd_need_push_nums": 2},
    "geo, split at run time": {"k_steps": 2, "runtime_split_send_recv": True},
}


def test_every_mode_trains_tables_as_plain_torch_with_one_trainer(servers: Servers) -> None:
    """On one and on two servers, with a schedule; four lookups of three tables are one pull a step,
    or three where ids are split at run time; the trainer's weight of torch's own has its rows back
    when the Executor is closed.
    """
    data, reference = batches(6), Net()
    train(reference, adagrad(reference), data, gamma=0.8)
    for name, fields in MODES.items():
        for count in (1, 2) if name in ("sync", "geo") else (2,):
            model, optimizer, main, startup = begun(Net)
            transpiler = transpiled(main, startup, servers(count), **fields)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
            found, pulls = run(transpiler, data, model, schedule)

            most = 3 if "run time" in name else 1
            assert pulls == most if "geo" not in name else pulls <= most, name
            assert_close(found, values(reference), 1e-6)


def test_a_window_of_fresh_rows_asks_nothing(servers: Servers) -> None:
    """The second step of a window reads the rows of the first: no lookup is made, or counted."""
    model, _, main, startup = begun(Tables)
    transpiler = transpiled(main, startup, servers(2), **MODES["geo"])
    _, pulls = run(transpiler, batches(1) * 2, model)

    assert pulls == 0.5


class Chained(nn.Module):
    """Ids of the last lookup come from the rows of the first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.then = nn.Embedding(ROWS, 4, sparse=True), nn.Embedding(9, 4, sparse=True)
        self.fc = nn.Linear(4, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.first(ids[:, 0])
        then = (rows.detach().sum(1) * 1000).long().abs() % 9
        out: torch.Tensor = self.fc(rows + self.first(ids[:, 1]) + self.then(then))
        return out


def test_ids_that_come_from_rows_are_looked_up_after_them(servers: Servers) -> None:
    """Two pulls a step; values as in plain torch."""
    data, reference = batches(4), Chained()
    train(reference, sgd(reference), data)
    for fields in ({}, {"sync_mode": False}, {"sync_mode": False, "half_async": True}):
        model, _, main, startup = begun(Chained, sgd)
        found, pulls = run(transpiled(main, startup, servers(2), **fields), data, model)

        assert pulls == 2
        assert_close(found, values(reference), 1e-6)


@pytest.mark.parametrize(
    ("table", "dense"),
    [
        ("async", "sync"),
        ("sync", "async"),
        ("async", "geo"),
        ("geo", "sync"),
        ("sync", "half_async"),
    ],
)
def test_a_step_of_several_lanes_is_one_step(servers: Servers, table: str, dense: str) -> None:
    """Whichever of a program's ops ends each lane's part of it."""
    configs: dict[str, Any] = {"modes": {"fc.*": dense, "*": table}}
    if "geo" in (table, dense):
        configs["k_steps"] = 2
    _, _, main, startup = begun(Chained, sgd)
    transpiler = transpiled(main, startup, servers(1), strategy=strategy_of(**configs))
    with Executor() as exe:
        exe.run(transpiler.get_startup_program())
        for batch in batches(5):
            exe.run(transpiler.get_trainer_program(), feed=batch)

        assert exe._runtimes[0].communicator.step == 5


def test_a_server_that_is_started_by_hand_begins_with_its_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A script of the role PSERVER runs its two programs: rows of a weight, and those of settings
    alone, train as plain torch.
    """
    data, reference = batches(5), Net()
    train(reference, adagrad(reference), data)
    with Server(ServerConfig()) as other:  # a free port each
        endpoints = [other.endpoint]
    with Server(ServerConfig()) as other:
        endpoints.append(other.endpoint)
    model, _, main, startup = begun(Net)
    transpiler = transpiled(main, startup, ",".join(endpoints))
    given: list[tuple[ServerConfig, Program]] = []
    monkeypatch.setattr(
        trainer.executor.pserver_runtime,
        "serve_job",
        lambda config, program: given.append((config, program)),
    )
    for endpoint in endpoints:
        with Executor() as exe:
            exe.run(transpiler.get_startup_program(endpoint))
            exe.run(transpiler.get_pserver_program(endpoint))
    with Server(given[0][0], given[0][1]), Server(given[1][0], given[1][1]):
        found, _ = run(transpiler, data, model)

    assert_close(found, values(reference), 1e-6)


def test_statistics_travel_with_the_rows(servers: Servers) -> None:
    """A ShowClickEntry admits in a program what it admits in an eager script: ids with a click are
    trained, others are not.
    """

    class Shown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = DistributedEmbedding(
                DIM, entry=ShowClickEntry("show", "click", threshold=1.0)
            )

        def forward(self, ids: torch.Tensor, click: torch.Tensor) -> torch.Tensor:
            rows: torch.Tensor = self.emb(ids, click=click)
            return rows.square().mean()

    def loss(model: nn.Module, ids: torch.Tensor, click: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(ids, click)
        return out

    ids, click = torch.tensor([3, 4, 3, 7]), torch.tensor([0, 1, 0, 1])
    eager, alone, served = Shown(), Shown(), Shown()
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        loss(eager, ids, click).backward()
        optimizer.step()
    found = []
    for model in (alone, served):
        main, startup = capture(
            model, loss, torch.optim.SGD(model.parameters(), lr=0.5), (ids, click)
        )
        program, first = main, startup
        if model is served:
            transpiler = transpiled(main, startup, servers(2))
            program, first = transpiler.get_trainer_program(), transpiler.get_startup_program()
        with Executor() as exe, torch.no_grad():
            exe.run(first)
            for _ in range(2):
                exe.run(program, feed=(ids, click))
            found.append(model.emb(torch.arange(10)))
    with torch.no_grad():
        expected, untouched = eager.emb(torch.arange(10)), Shown().emb(torch.arange(10))

    assert torch.equal(found[0], expected) and torch.equal(found[1], expected)
    assert [int(i) for i in (expected != untouched).any(1).nonzero()] == [4, 7]


def test_a_deployment_without_values_is_refused(servers: Servers) -> None:
    """A trainer program with tables that came without its storage says what to do."""
    data = batches(1)
    _, _, main, startup = begun(Tables)
    program = replace(transpiled(main, startup, servers(1)).get_trainer_program(), storage=None)
    with Executor() as exe, pytest.raises(ValueError, match="holds no values"):
        exe.run(program, feed=data[0])
