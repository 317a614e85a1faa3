"""Parameters and buffers that few models have, with servers: each as in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.seeded import seeded
from tests.support.table_trainers import Servers
from trainer import DistributedEmbedding, fleet
from trainer.job.job import Job
from transpiler import DistributedStrategy

DILOCO = {"k_steps": 1, "outer_optimizer": {"type": "sgd", "lr": 1.0}}
MODES: dict[str, dict[str, Any] | None] = {
    "sync": None,
    "async": {"send_queue_size": 1},
    "half_async": {"half_async": True},
    "staleness": {"staleness": 2},
    "geo": {"k_steps": 1},
    "diloco": DILOCO,
}


def joined(endpoints: str, model: nn.Module, configs: dict[str, Any] | None) -> Job:
    """A job of one trainer, SGD with rate 0.1."""
    strategy = DistributedStrategy()
    if configs is not None:
        strategy.a_sync, strategy.a_sync_configs = True, configs
    role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=endpoints.split(","))
    job = Job(role, strategy)
    job.models.append(model)
    job.join(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    return job


def step(job: Job, loss: torch.Tensor) -> None:
    """One step."""
    job.optimizers[0].zero_grad()
    loss.backward()
    job.optimizers[0].step()
    job.optimizers[0].flush()


class Complex(nn.Module):
    """Two complex numbers."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.z = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j], dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_a_complex_parameter_keeps_both_parts(
    servers: Servers, mode: str, dtype: torch.dtype
) -> None:
    """In every mode."""
    model, plain = Complex(dtype), Complex(dtype)
    job, optimizer = joined(servers(2), model, MODES[mode]), torch.optim.SGD([plain.z], lr=0.1)
    for _ in range(2):
        step(job, (model.z * (1 + 3j)).abs().square().sum())
        optimizer.zero_grad()
        (plain.z * (1 + 3j)).abs().square().sum().backward()
        optimizer.step()

    assert model.z.detach().imag.abs().min() > 0
    assert torch.allclose(model.z, plain.z)
    job.finish()


class Expanded(nn.Module):
    """A buffer and a frozen parameter whose elements share memory."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(1):
            self.layer = nn.Linear(2, 3)
        self.mask: torch.Tensor
        self.register_buffer("mask", torch.full((1,), 0.5).expand(3))
        repeated = torch.tensor([[2.0], [3.0]]).expand(2, 3)
        self.scale = nn.Parameter(repeated, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = (self.layer(x) * self.mask * self.scale).sum()
        return out


@pytest.mark.parametrize("mode", MODES)
def test_what_expand_repeats_stays_so(servers: Servers, mode: str) -> None:
    """What arrives is written once; the model trains as in plain torch."""
    model, plain, x = Expanded(), Expanded(), torch.tensor([[1.0, 2.0]])
    job = joined(servers(2), model, MODES[mode])
    step(job, model(x))
    plain(x).backward()

    assert model.mask.tolist() == [0.5] * 3 and model.mask.stride() == (0,)
    assert model.scale.tolist() == [[2.0] * 3, [3.0] * 3]
    expected = plain.layer.weight.detach() - 0.1 * plain.layer.weight.grad  # type: ignore[operator]
    assert torch.allclose(model.layer.weight, expected)
    job.finish()


@pytest.mark.parametrize("finishes", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_what_is_written_before_the_first_step_reaches_the_servers(
    servers: Servers, mode: str, finishes: bool
) -> None:
    """Also where no step follows; in the k-step modes when the trainer leaves."""
    model = nn.Linear(2, 1)
    job = joined(servers(1), model, MODES[mode])
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[5.0, 7.0]]))
    if not finishes:
        step(job, model(torch.zeros(1, 2)).sum() * 0.0)
    job.finish()

    assert model.weight.tolist() == [[5.0, 7.0]]


@pytest.mark.parametrize("mode", MODES)
def test_after_the_end_nothing_changes(servers: Servers, mode: str) -> None:
    """A further step raises before it steps; a lookup names the table."""
    with seeded(2):
        model = nn.ModuleDict({"emb": DistributedEmbedding(2), "layer": nn.Linear(2, 1)})
    if mode == "diloco":
        model = nn.ModuleDict({"layer": model["layer"]})
    job = joined(servers(1), model, MODES[mode])
    job.finish()
    model["layer"](torch.ones(1, 2)).sum().backward()
    before = [parameter.detach().clone() for parameter in model["layer"].parameters()]
    with pytest.raises(RuntimeError, match="this trainer has left the job: no step after"):
        job.optimizers[0].step()

    assert all(map(torch.equal, before, model["layer"].parameters()))
    if mode != "diloco":
        with pytest.raises(RuntimeError, match="has left the job: no lookup in table 'emb' after"):
            model["emb"](torch.tensor([1]))
