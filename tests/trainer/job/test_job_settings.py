"""Settings of a strategy that act on a whole job: what its process goes by, what data it gets."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.eager_jobs import Servers, batches, train
from trainer import fleet
from trainer.compat.flags import WORKSPACE
from transpiler import DistributedStrategy, Ftrl


def strategy(**settings: Any) -> DistributedStrategy:
    made = DistributedStrategy()
    for name, value in settings.items():
        setattr(made, name, value)
    return made


def process() -> tuple[bool, str | None, int]:
    """What torch and cuDNN go by."""
    return torch.backends.cudnn.benchmark, os.environ.get(WORKSPACE), torch.get_num_threads()


ASKED = {
    "cudnn_exhaustive_search": True,
    "conv_workspace_size_limit": 1024,
    "execution_strategy": {"num_threads": 3},
}


@pytest.mark.observes(
    "cudnn_exhaustive_search", "conv_workspace_size_limit", "execution_strategy.num_threads"
)
@pytest.mark.parametrize("given_to", ["init", "optimizer"])
@pytest.mark.parametrize("is_collective", [False, True])
def test_torch_goes_by_the_strategy_while_the_job_runs(given_to: str, is_collective: bool) -> None:
    """From fleet.init, or distributed_optimizer, to fleet.finish; before and after it is as the
    script has it.
    """
    before, asked = process(), strategy(**ASKED)
    fleet.init(is_collective=is_collective, strategy=asked if given_to == "init" else None)
    try:
        model = fleet.distributed_model(nn.Linear(2, 1))
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        fleet.distributed_optimizer(sgd, strategy=asked if given_to == "optimizer" else None)
        during = process()
    finally:
        fleet.finish()

    assert during == (True, "1024", 3)
    assert process() == before


def test_it_is_put_back_after_a_failure(servers: Servers) -> None:
    """A job whose finish raises leaves the process as it found it."""
    before = process()
    role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=servers(1).split(","))
    fleet.init(role, strategy=strategy(a_sync=False, **ASKED))
    model = fleet.distributed_model(nn.Linear(2, 1))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert process() != before
    optimizer.close("a fault")
    with pytest.raises(Exception, match="fault|left|closed"):
        optimizer.step()
        fleet.finish()
    fleet.finish()

    assert process() == before


def test_a_script_that_set_a_flag_gets_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is put back is the script's value, not torch's default."""
    monkeypatch.setenv(WORKSPACE, "77")
    fleet.init(strategy=strategy(conv_workspace_size_limit=12))
    assert os.environ[WORKSPACE] == "12"
    fleet.finish()

    assert os.environ[WORKSPACE] == "77"


@pytest.mark.observes("split_data")
def test_split_data_divides_or_gives_everything(servers: Servers) -> None:
    """Trainer 0 of 2 gets every second batch, or with split_data off all of them."""
    got = {}
    for split in (True, False):
        role = fleet.UserDefinedRoleMaker(0, worker_num=2, server_endpoints=servers(1).split(","))
        fleet.init(role, strategy=strategy(split_data=split))
        data = list(range(6))
        got[split] = list(fleet.shard(data))
        fleet.finish()

    assert got == {True: [0, 2, 4], False: [0, 1, 2, 3, 4, 5]}


@pytest.mark.observes("build_strategy.fuse_all_optimizer_ops")
@pytest.mark.parametrize("job", ["alone", "collective", "servers"])
def test_updates_are_fused(servers: Servers, job: str) -> None:
    """Here torch's fused kernel runs; on servers the plan's rule has the flag.  20 steps give the
    values of the plain update to 1e-6.
    """
    found = []
    for fuse in (False, True):
        asked = strategy(a_sync=False, build_strategy={"fuse_all_optimizer_ops": fuse})
        endpoints = servers(1).split(",")
        role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=endpoints)
        fleet.init(
            role if job == "servers" else None,
            is_collective=job == "collective",
            strategy=asked,
        )
        torch.manual_seed(3)
        layers = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)
        model = fleet.distributed_model(nn.Sequential(*layers))
        adam = torch.optim.Adam(model.parameters(), lr=0.01)
        optimizer = fleet.distributed_optimizer(adam)
        with torch.profiler.profile() as profile:
            train(model, optimizer, batches(20))
        kernels = {event.key for event in profile.key_averages()}
        if optimizer.communicator is None:
            assert ("aten::_fused_adam_" in kernels) is fuse
        else:
            assert optimizer.communicator.plan.groups[0].flags.get("fused", False) is fuse
        found.append([each.detach().clone() for each in model.parameters()])
        fleet.finish()

    for plain, fused in zip(*found, strict=True):
        torch.testing.assert_close(fused, plain, rtol=0, atol=1e-6)


def test_a_rule_without_a_fused_update_is_refused() -> None:
    """The error names the rule, and those that have one."""
    fleet.init(strategy=strategy(build_strategy={"fuse_all_optimizer_ops": True}))
    model = fleet.distributed_model(nn.Linear(2, 1))
    with pytest.raises(ValueError, match="no fused update for 'ftrl'; it has some for sgd"):
        fleet.distributed_optimizer(Ftrl(model.parameters(), lr=0.1))
    fleet.finish()
