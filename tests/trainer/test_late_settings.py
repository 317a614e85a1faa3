"""Settings of a strategy that come too late, or cannot act: all of them are named at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.eager_jobs import Servers
from tests.support.settings import assign, other
from trainer import fleet
from transpiler import DistributedStrategy
from transpiler.strategy.strategy import every_setting


def test_all_offenders_are_named_in_one_error() -> None:
    """Switches, keys of dictionaries, and keys that another one makes meaningless."""
    strategy = DistributedStrategy()
    strategy.qat, strategy.semi_auto, strategy.fuse_grad_size_in_MB = True, True, 8
    strategy.hybrid_configs = {"mp_degree": 2}
    strategy.a_sync, strategy.a_sync_configs = False, {"staleness": 3, "dc_asgd": 0.5}
    with pytest.raises(ValueError) as raised:
        fleet.init(strategy=strategy)

    said = str(raised.value)
    for name in ("qat", "semi_auto", "fuse_grad_size_in_MB", "hybrid_configs.mp_degree"):
        assert f"strategy.{name}: " in said
    assert "staleness=3 has no effect with a_sync=False" in said
    assert "dc_asgd=0.5 has no effect with a_sync=False" in said
    assert "no job reads it in this version" in said and "fleet.init(is_collective=True" in said


def test_embeddings_of_the_optimizers_strategy_come_too_late(servers: Servers) -> None:
    """They are refused; the same ones that fleet.init got are not."""
    strategy = DistributedStrategy()
    strategy.a_sync_configs = {"embeddings": ["0"]}
    role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=servers(1).split(","))
    for early, late in ((strategy, strategy), (None, strategy)):
        fleet.init(role, strategy=early)
        model = fleet.distributed_model(nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if early is None:
            with pytest.raises(ValueError, match="give the strategy to fleet.init"):
                fleet.distributed_optimizer(optimizer, strategy=late)
        else:
            assert fleet.distributed_optimizer(optimizer, strategy=late).communicator is not None
            assert list(fleet.table_status()) == ["0"]
        fleet.finish()


def test_a_strategy_reads_what_torch_does() -> None:
    """The defaults of switches about torch are torch's own."""
    strategy = DistributedStrategy()

    assert strategy.cudnn_exhaustive_search is torch.backends.cudnn.benchmark


def test_what_comes_too_late_is_named_with_the_others() -> None:
    """One error for both reasons."""
    fleet.init()
    model = fleet.distributed_model(nn.Linear(4, 4))
    strategy = DistributedStrategy()
    strategy.qat = strategy.amp = strategy.asp = True
    with pytest.raises(ValueError, match="strategy.qat: no job .*amp, strategy.asp: fleet"):
        fleet.distributed_optimizer(torch.optim.SGD(model.parameters()), strategy=strategy)


def test_a_change_that_nothing_reads_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """After fleet.distributed_optimizer, until the job ends."""
    strategy = DistributedStrategy()
    fleet.init(strategy=strategy)
    model = fleet.distributed_model(nn.Linear(4, 4))
    strategy.gradient_merge = False
    fleet.distributed_optimizer(torch.optim.SGD(model.parameters()))
    assert "assigned after" not in caplog.text
    strategy.gradient_merge = True
    assert "strategy.gradient_merge: assigned after fleet.distributed_optimizer" in caplog.text
    caplog.clear()
    fleet.finish()
    strategy.gradient_merge = False
    assert "assigned after" not in caplog.text


@pytest.mark.parametrize(
    ("assigned", "lines"),
    [
        ({}, 1),
        ({"a_sync_configs": {"nonfinite": "stop"}}, 1),  # sync mode reads it, too
        ({"a_sync": True}, 0),
        ({"a_sync": False}, 0),
        ({"a_sync_configs": {"send_queue_size": 4}}, 0),
        ({"a_sync_configs": {"k_steps": 2}}, 0),
        ({"a_sync_configs": {"modes": {"*": "async"}}}, 0),
        (None, 0),
    ],
)
def test_a_job_that_is_async_by_default_says_so_once(
    assigned: dict[str, Any] | None,
    lines: int,
    servers: Servers,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On trainer 0, where nothing that the script has assigned says that it knows."""
    strategy = None if assigned is None else DistributedStrategy()
    for name, value in (assigned or {}).items():
        setattr(strategy, name, value)
    role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=servers(1).split(","))
    fleet.init(role, strategy=strategy)
    models = [fleet.distributed_model(nn.Linear(2, 1)) for _ in range(2)]
    for model in models:
        fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    fleet.finish()

    assert caplog.text.count("strategy.a_sync is True unless assigned") == lines


def elastic(on: bool) -> DistributedStrategy:
    strategy = DistributedStrategy()
    strategy.a_sync, strategy.a_sync_configs = False, {"lost_trainer": "stop"}
    strategy.elastic = on
    return strategy


def test_leases_that_are_asked_for_late_are_refused(servers: Servers) -> None:
    """With the optimizer's strategy, or by a change of init's before it: fleet.shard reads them
    from what fleet.init got.
    """
    role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=servers(1).split(","))
    for changes in (True, False):
        first = elastic(False)
        fleet.init(role, strategy=first)
        model = fleet.distributed_model(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if changes:
            first.elastic = True
        late = None if changes else elastic(True)
        with pytest.raises(ValueError, match="strategy.elastic: fleet.shard reads it, from"):
            fleet.distributed_optimizer(optimizer, strategy=late)
        fleet.finish()


def test_a_change_that_hides_behind_the_optimizers_own_strategy_is_refused() -> None:
    """Init's strategy changes, and the optimizer gets another one that says nothing of it."""
    first = DistributedStrategy()
    fleet.init(strategy=first)
    model = fleet.distributed_model(nn.Linear(4, 2))
    first.elastic = True
    with pytest.raises(ValueError, match="strategy.elastic: fleet.shard reads it, from"):
        fleet.distributed_optimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), strategy=DistributedStrategy()
        )


EARLY = [name for name, setting in every_setting() if setting.early]


@pytest.mark.parametrize("own", [True, False])
def test_no_early_setting_is_taken_after_the_optimizer(own: bool) -> None:
    """Each raises, and changes nothing, in init's strategy and in the optimizer's own; assigned
    once more as it is, it does not, and after the job it is free.
    """
    first, further = DistributedStrategy(), DistributedStrategy()
    fleet.init(strategy=first)
    model = fleet.distributed_model(nn.Linear(4, 2))
    fleet.distributed_optimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), strategy=further if own else None
    )
    for each in (first, further) if own else (first,):
        for name in EARLY:
            setting = dict(every_setting())[name]
            with pytest.raises(ValueError, match=f"strategy.{name}: acts as in the strategy given"):
                assign(each, name, other(name, setting))
            assert not each.is_set(name)
        each.amp = False
    fleet.finish()
    first.amp = True
