"""Rows of tables beside dense layers on a GPU: every mode, and everything that changes gradients,
is what it is on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.devices import Servers, assert_near, on_gpu
from tests.support.tiers import RARE
from trainer import DistributedEmbedding, Uniform, fleet, row_optimizers
from transpiler import DistributedStrategy

pytestmark = pytest.mark.usefixtures("finished")

ROWS, DIM, SLOTS, STEPS = 50, 4, 3, 8


def modes(**configs: object) -> Callable[[DistributedStrategy], None]:
    return lambda strategy: setattr(strategy, "a_sync_configs", configs)


def switched_on(name: str, **configs: object) -> Callable[[DistributedStrategy], None]:
    def switch(strategy: DistributedStrategy) -> None:
        strategy.a_sync = False
        setattr(strategy, name, True)
        if configs:
            setattr(strategy, f"{name}_configs", configs)

    return switch


SETTINGS: dict[str, Callable[[DistributedStrategy], None]] = {
    "sync": modes(modes={"*": "sync"}),
    "async": modes(send_queue_size=1),
    "half-async": modes(half_async=True, max_merge_var_num=1),
    "geo": modes(k_steps=2),
    "diloco": modes(k_steps=2, outer_optimizer={"type": "sgd", "lr": 1.0}),
    "bounded staleness": modes(modes={"*": "async"}, staleness=1, send_queue_size=1),
    "rows sync, dense averaged": modes(modes={"emb*": "sync", "*": "collective"}),
    "gradient merge": switched_on("gradient_merge", k_steps=2),
    "dgc": switched_on("dgc", rampup_begin_step=2, rampup_step=2, sparsity=[0.75]),
    "lars": switched_on("lars"),
    "asp": switched_on("asp"),
    "recompute": switched_on("recompute", checkpoints=["net.1"]),
}


class Clicks(nn.Module):
    """A table, and a network over its rows; a layer that dgc compresses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        own = row_optimizers.SGD(lr=0.1)
        self.emb = DistributedEmbedding(
            DIM, num_embeddings=ROWS, init=Uniform(-0.5, 0.5), optimizer=own
        )
        self.net = nn.Sequential(
            nn.Linear(SLOTS * DIM, 1536), nn.Sequential(nn.Tanh(), nn.Linear(1536, 12)), nn.Tanh()
        )
        self.out = nn.Linear(12, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.out(self.net(self.emb(ids).flatten(1)))
        return logits


def trained(endpoints: str, device: str, setting: str) -> nn.Module:
    """The dense layers after some steps, and the rows beside them."""
    strategy = DistributedStrategy()
    SETTINGS[setting](strategy)
    model = Clicks().to(device)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=endpoints.split(","))
    fleet.init(role, strategy=strategy)
    fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(sgd)
    generator = torch.Generator().manual_seed(2)
    for _ in range(STEPS):
        ids = torch.randint(0, ROWS, (16, SLOTS), generator=generator).to(device)
        labels = torch.rand(16, 1, generator=generator).to(device)
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(model(ids), labels).backward()
        optimizer.step()
        optimizer.flush()
    found = nn.ModuleDict({"net": model.net, "out": model.out})
    with torch.no_grad():
        rows = model.emb(torch.arange(ROWS, device=device))
    assert {each.device.type for each in (rows, *found.parameters())} == {device.partition(":")[0]}
    found.register_buffer("rows", rows.cpu())
    fleet.finish()
    return found.cpu()


@pytest.mark.parametrize("device", [RARE("cpu"), on_gpu])
@pytest.mark.parametrize("setting", SETTINGS)
def test_rows_and_layers_equal_those_of_the_cpu(
    servers: Servers, device: str, setting: str
) -> None:
    """The same job on either; every value has moved."""
    found, expected = (trained(servers(2), each, setting) for each in (device, "cpu"))

    assert_near(found, expected)
    begun = Clicks()
    assert not torch.equal(found["net"][0].weight, begun.net[0].weight)
    assert not torch.equal(found.rows, begun.emb(torch.arange(ROWS)))
