"""Parameters of no element and of gigabytes pass through a real server."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from pserver.config import ServerConfig
from pserver.service.server import Server
from tests.support.stranger import Servers
from trainer import fleet


def test_an_empty_parameter_passes(servers: Servers, transport: str) -> None:
    """Zero elements, beside others and with optimizer state, over either transport."""
    model = nn.ParameterDict(
        {"none": nn.Parameter(torch.zeros(0, 3)), "one": nn.Parameter(torch.ones(2))}
    )
    fleet.init(fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=[servers(1)]))
    fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(
        torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    )
    for _ in range(2):
        optimizer.zero_grad()
        (model["none"].sum() + model["one"].sum()).backward()
        optimizer.step()

    assert model["none"].shape == (0, 3) and torch.equal(
        model["one"], torch.full((2,), 1 - 0.5 - 0.5 * 1.9)
    )


LARGE = 3 * 2**30  # bytes: more than a protobuf message holds, more than 32 bits count


NEEDS = 15 * 2**30  # the parameter and its gradient, each on both sides, and room


def available() -> int:
    """Main memory that nobody uses, in bytes."""
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text().splitlines() if meminfo.exists() else []
    return next(
        (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), 0
    )


@pytest.mark.long  # a minute of copying; other tests have all that is smaller
def test_a_parameter_of_3_gb_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploaded, stepped and received whole, in one slice: every element has taken its step."""
    if available() < NEEDS:
        pytest.skip(
            f"needs {NEEDS / 2**30:.0f} GiB of free memory, there are {available() / 2**30:.1f}"
        )
    monkeypatch.setenv("PSERVER_TRANSPORT", "tcp")
    elements = LARGE // 4
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(elements))})
    with Server(ServerConfig()) as server:
        fleet.init(fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=[server.endpoint]))
        fleet.distributed_model(model)
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        model["w"].grad = torch.full((elements,), 0.25)
        model["w"].grad[-1] = 0.5
        optimizer.step()
        fleet.finish()

    assert bool((model["w"][:-1] == 0.75).all()) and model["w"][-1] == 0.5
