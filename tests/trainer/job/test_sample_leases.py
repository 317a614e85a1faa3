"""Samples that servers deal out by leases, in jobs of one trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from pserver.config import ServerConfig
from pserver.leases.epoch import Account
from pserver.service.server import Server
from trainer import fleet
from trainer.job.current import present
from transpiler import DistributedStrategy

SAMPLES = 22
Step = Callable[[torch.Tensor], None]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(ServerConfig(keep_failed_seconds=0.0)) as running:
        yield running


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    fleet.finish()


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(torch.arange(SAMPLES), 4, **options)  # type: ignore[arg-type]  # it has a length


def begin(server: Server, checkpoint: str | None = None, **settings: Any) -> Step:
    """A job of one trainer: what trains on a batch, with a step."""
    strategy = DistributedStrategy()
    for name, value in settings.items():
        setattr(strategy, name, value)
    role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=[server.endpoint])
    every = None if checkpoint is None else 1e-6  # seconds: after each step
    fleet.init(role, strategy=strategy, checkpoint=checkpoint, every=every)
    model = fleet.distributed_model(nn.Linear(1, 1))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1e-4))

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x.float()[:, None]).mean().backward()
        optimizer.step()

    return step


def accounts(server: Server) -> dict[int, Account]:
    assert server.job.program is not None, "a job runs"
    return server.job.program.leases.accounts


MODES: dict[str, dict[str, Any]] = {
    "async": {},
    "half_async": {"a_sync_configs": {"half_async": True}},
    "geo": {"a_sync_configs": {"k_steps": 4}},
    "elastic sync": {"a_sync": False, "elastic": True},
    "elastic staleness": {"a_sync_configs": {"staleness": 1}, "elastic": True},
}


@pytest.mark.parametrize("mode", MODES)
def test_each_sample_is_in_one_decided_step(server: Server, mode: str) -> None:
    """Epoch by epoch."""
    step = begin(server, **MODES[mode])
    batches = fleet.shard(loader(shuffle=True), seed=3)
    for _ in range(2):
        seen = []
        for x in batches:
            step(x)
            seen += x.tolist()

        assert sorted(seen) == list(range(SAMPLES))
    for x in batches:  # the steps before are decided when a further pass has all its samples
        step(x)

    found = accounts(server)
    assert found[0] == found[1] == Account(SAMPLES, SAMPLES, 0, 0, over=True)


@pytest.mark.observes("elastic")
def test_an_elastic_sync_job_has_the_order_of_one_that_is_not(server: Server) -> None:
    """Batch by batch; only the elastic one asks for leases."""
    orders, dealt = [], []
    for elastic in (False, True):
        step = begin(server, a_sync=False, elastic=elastic)
        batches = fleet.shard(loader(shuffle=True), seed=3)
        order = []
        for _ in range(2):
            for x in batches:
                step(x)
                order.append(x.tolist())
        orders.append(order)
        dealt.append(sorted(accounts(server)))
        fleet.finish()

    assert orders[0] == orders[1]
    assert dealt == [[], [0, 1]]


def test_a_step_counts_all_batches_since_the_last_one(server: Server) -> None:
    """Those at the end without a step count as skipped, when the next pass begins."""
    step = begin(server)
    held = []
    batches = fleet.shard(loader(), seed=3)
    for x in batches:
        held.append(x)
        if len(held) == 4:
            step(torch.cat(held))
            held = []
    next(iter(batches))

    assert accounts(server)[0] == Account(SAMPLES, 16, 6, 0, over=True)


def test_a_step_behind_the_loop_has_its_last_batches(server: Server) -> None:
    """They are not skipped."""
    step = begin(server, a_sync=False, elastic=True)
    batches = fleet.shard(loader(), seed=3)
    held = [x for x in batches]
    step(torch.cat(held))

    assert accounts(server)[0] == Account(SAMPLES, SAMPLES, 0, 0, over=True)


def test_what_a_script_breaks_off_is_counted(server: Server) -> None:
    """It is skipped, as no other trainer is there to take it."""
    step = begin(server, a_sync=False, elastic=True)
    for x in fleet.shard(loader(), seed=3):
        step(x)
        break

    assert accounts(server)[0] == Account(SAMPLES, 4, 18, 0, over=True)


def test_an_evaluation_is_not_leased(server: Server) -> None:
    """Without gradients each trainer has its part of the data, as in a job without leases."""
    begin(server)
    with torch.no_grad():
        seen = [n for x in fleet.shard(loader(), seed=3) for n in x.tolist()]

    assert sorted(seen) == list(range(SAMPLES))
    assert accounts(server) == {}


class Stopped(Exception):
    """The process is killed here."""


@pytest.mark.parametrize("mode", ["async", "elastic sync"])
def test_a_script_that_is_started_again_trains_on_the_rest(
    server: Server, mode: str, tmp_path: Path
) -> None:
    """Of the epoch in which it was, in the same shuffle: what no saved step had."""

    def script(stop: int) -> list[list[int]]:
        step = begin(server, checkpoint=str(tmp_path), **MODES[mode])
        batches = fleet.shard(loader(shuffle=True), seed=3)
        trained: list[list[int]] = [[], [], []]
        left = stop
        for epoch in range(3):
            for x in batches:
                step(x)
                left -= 1
                if not left:
                    raise Stopped(trained)
                trained[epoch] += x.tolist()
        return trained

    with pytest.raises(Stopped) as stopped:
        script(9)  # it saves when it asks for a batch: the last step is in no checkpoint
    before = stopped.value.args[0]
    present().optimizers[0].close("killed")
    fleet.finish()
    after = script(0)

    both = [sorted(a + b) for a, b in zip(before, after, strict=True)]
    assert before[1] and not before[2] and not after[0]
    assert both == [list(range(SAMPLES))] * 3
