"""Models within wrappers, and with wrapped parts, have the names of what is wrapped: on servers, in
checkpoints and exports, and for patterns.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from tests.support.eager_jobs import Servers
from trainer import fleet
from trainer.modules.recompute import recomputed
from trainer.sharding.units import anchor_modules
from transpiler import DistributedStrategy
from transpiler.ir import two_of_four
from transpiler.ir.plain_names import named_buffers, named_modules, named_parameters, plain_name


class Net(nn.Module):
    """A table, a part that is named as wrappers name theirs, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.emb = nn.Embedding(8, 4)
        self.module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.head = nn.Linear(8, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.module(self.emb(ids)))
        return out


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def ddp(module: nn.Module) -> nn.Module:
    """One that has joined no other process."""
    made = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(made)
    made.module = module
    return made


def part_of(wrap: Callable[[nn.Module], Any]) -> Callable[[Net], nn.Module]:
    def wrapped(net: Net) -> nn.Module:
        net.module[0], net.head = wrap(net.module[0]), wrap(net.head)
        return net

    return wrapped


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "compiled": compiled,
    "compiled in place": lambda net: (net.compile(backend="eager"), net)[1],
    "DataParallel": nn.DataParallel,
    "AveragedModel": AveragedModel,
    "DDP": ddp,
    "compiled DataParallel": lambda net: compiled(nn.DataParallel(net)),
    "compiled parts": part_of(compiled),
    "parts in DataParallel": part_of(nn.DataParallel),
    "everything": lambda net: compiled(part_of(compiled)(nn.DataParallel(net).module)),
}
LIVE = [name for name in WRAPPERS if name != "DDP"]


@pytest.mark.parametrize("how", WRAPPERS)
def test_names_are_those_of_what_is_wrapped(how: str) -> None:
    """Of modules, parameters, buffers and keys; a user's own "module" keeps its name."""
    plain, wrapped = Net(), WRAPPERS[how](Net())
    own = {"n_averaged"}  # what an averaged model adds
    assert [n for n, _ in named_parameters(wrapped)] == [n for n, _ in plain.named_parameters()]
    buffers = {name for name, _ in named_buffers(wrapped)} - own
    assert buffers == {name for name, _ in plain.named_buffers()}
    assert dict(named_modules(wrapped)).keys() == dict(plain.named_modules()).keys()
    assert all(type(module) is not nn.DataParallel for _, module in named_modules(wrapped))
    keys = map(plain_name(wrapped), wrapped.state_dict())
    assert set(keys) - own == plain.state_dict().keys()


@pytest.mark.parametrize("how", WRAPPERS)
def test_patterns_find_what_is_wrapped(how: str) -> None:
    """Of recomputation, sparsity and sharding."""
    model = WRAPPERS[how](Net())
    strategy = DistributedStrategy()
    strategy.recompute_configs = {"checkpoints": ["module.0"]}
    recomputed(model, strategy)
    assert "_recomputed" in vars(dict(named_modules(model))["module.0"])
    assert anchor_modules(model, ["head.weight", "module"]) == ("head", "module")
    two_of_four.exclude(model, ["head"])
    assert not any("head" in name for name in two_of_four.sparse_weights(model))
    two_of_four.include(model)


def trained(endpoints: str, model: nn.Module, steps: int = 3) -> Any:
    """A job whose modes and tables are given by patterns."""
    strategy = DistributedStrategy()
    strategy.a_sync = True
    strategy.a_sync_configs = {
        "modes": {"head.*": "async", "module.*": "sync", "*": "sync"},
        "embeddings": ["emb"],
        "send_queue_size": 1,
    }
    role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=endpoints.split(","))
    fleet.init(role, strategy=strategy)
    model = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.arange(8).roll(step)).square().sum().backward()
        optimizer.step()
    return optimizer


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's
@pytest.mark.parametrize("how", LIVE)
def test_a_wrapped_model_has_the_plan_and_the_files_of_the_plain_one(
    how: str, servers: Servers, tmp_path: Path
) -> None:
    """The plan is the same, so patterns chose the same; exports are equal, and a checkpoint of
    either goes on in the other.
    """
    plans, exports = [], []
    for name, wrap in (("plain", lambda net: net), ("wrapped", WRAPPERS[how])):
        optimizer = trained(servers(2), wrap(Net()))
        plans.append(optimizer.communicator.plan.fingerprint())
        fleet.save(str(tmp_path / f"{name}-checkpoint"))
        fleet.export(str(tmp_path / f"{name}.pt"))
        fleet.finish()
        exports.append(torch.load(tmp_path / f"{name}.pt", weights_only=True))
    for each in exports:
        each.pop("n_averaged", None)
    plain, wrapped = exports
    if "Averaged" not in how:  # whose buffer is one more
        assert plans[0] == plans[1]
    assert plain.keys() == wrapped.keys() == Net().state_dict().keys()
    assert all(torch.equal(value, wrapped[name]) for name, value in plain.items())

    for name, wrap in (("plain", WRAPPERS[how]), ("wrapped", lambda net: net)):
        if "Averaged" in how:
            continue
        trained(servers(2), wrap(Net()), steps=0)
        fleet.load(str(tmp_path / f"{name}-checkpoint"))
        fleet.export(str(tmp_path / "again.pt"))
        fleet.finish()
        again = torch.load(tmp_path / "again.pt", weights_only=True)
        assert all(torch.equal(value, again[name]) for name, value in plain.items())
