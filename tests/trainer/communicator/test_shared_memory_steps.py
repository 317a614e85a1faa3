"""Large tensors over shared memory, which are copied once each way: every result is plain torch's,
to the bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from pserver.config import ServerConfig
from pserver.service.server import Server
from pserver.transport import zones
from pserver.transport.stream import MISSED
from tests.faults.faults import Injector, injected
from trainer import fleet
from transpiler import DistributedStrategy

STEPS = 4
MODES: dict[str, Mapping[str, Any]] = {
    "sync": {},
    "async": {"k_steps": 0, "send_queue_size": 1},
    "half-async": {"k_steps": 0, "max_merge_var_num": 1, "send_queue_size": 1},
}


def net() -> nn.Module:
    """Tensors of several frames, of one, and small ones."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(300, 2500), nn.ReLU(), nn.Linear(2500, 40))


def train(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        x, y = torch.randn(4, 300, generator=generator), torch.randn(4, 40, generator=generator)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return copy.deepcopy(dict(model.state_dict()))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


@pytest.fixture
def expected() -> dict[str, torch.Tensor]:
    model = net()
    return train(model, adam(model))


def trained(
    configs: Mapping[str, Any], transport: str = "shm", make: Callable[[], nn.Module] = net
) -> dict[str, torch.Tensor]:
    """What a job of one trainer makes of the model."""
    strategy = DistributedStrategy()
    strategy.a_sync = bool(configs)
    if configs:
        strategy.a_sync_configs = dict(configs)
    with Server(ServerConfig(transport=transport)) as server:
        role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=[server.endpoint])
        fleet.init(role, strategy=strategy)
        model = fleet.distributed_model(make())
        found = train(model, fleet.distributed_optimizer(adam(model)))
        fleet.finish()
    return found


def layers() -> nn.Module:
    """Tensors of 300 KB, of 120 KB and of 1 KB and less, which share frames while others leave."""
    torch.manual_seed(0)
    wide = [nn.Linear(300, 250), nn.Linear(250, 120), nn.Linear(120, 300)]
    return nn.Sequential(
        *(copy.deepcopy(each) for _ in range(5) for each in wide), nn.Tanh()
    ).append(nn.Linear(300, 40))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("mode", MODES)
def test_every_step_of_tensors_that_share_frames_is_plain_torchs(
    mode: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many of them leave together."""
    model = layers()
    expected = train(model, adam(model))
    monkeypatch.setenv("PSERVER_TRANSPORT", transport)
    found = trained(MODES[mode], transport, layers)

    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("mode", MODES)
def test_every_step_is_plain_torchs(
    mode: str, expected: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the modes that have an equal."""
    monkeypatch.setenv("PSERVER_TRANSPORT", "shm")
    found = trained(MODES[mode])

    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("mode", MODES)
def test_values_that_are_missed_are_asked_for(
    mode: str, expected: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever a value changes while it is read, the reply brings a copy all the same."""
    monkeypatch.setenv("PSERVER_TRANSPORT", "shm")
    missed: list[bool] = []
    receive = zones.ReadZones.receive

    def now_and_then(own: zones.ReadZones, *arguments: Any) -> memoryview:
        missed.append(len(missed) % 3 != 0)
        return MISSED if missed[-1] else receive(own, *arguments)

    monkeypatch.setattr(zones.ReadZones, "receive", now_and_then)
    found = trained(MODES[mode])

    assert any(missed)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("seed", range(3))
def test_frames_that_are_lost_or_come_twice_change_nothing(
    seed: int, expected: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams break, frames come late and twice: the same values."""
    monkeypatch.setenv("PSERVER_TRANSPORT", "shm")
    with injected(Injector(seed=seed, rate=0.3), "shm") as injector:
        found = trained(MODES["sync" if seed % 2 else "async"])

    assert injector.done
    assert all(torch.equal(found[name], value) for name, value in expected.items())
