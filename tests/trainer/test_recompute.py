"""recompute in scripts: modules that keep only their inputs, with results equal to the bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from tests.support.eager_jobs import Servers, assert_same, batches
from tests.support.table_trainers import Net
from trainer import fleet
from trainer.modules import recompute
from transpiler import DistributedStrategy

cuda = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def strategy(*checkpoints: str, **configs: Any) -> DistributedStrategy:
    made = DistributedStrategy()
    made.recompute = True
    made.recompute_configs = {"checkpoints": list(checkpoints), **configs}
    return made


def net() -> nn.Module:
    """Two blocks with dropout, the second one with batch norm."""
    torch.manual_seed(3)
    first = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Dropout(0.3), nn.Linear(64, 6))
    second = nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 6))
    return nn.Sequential(first, nn.Dropout(0.2), second, nn.Linear(6, 2))


def trained(asked: DistributedStrategy | None, **init: Any) -> dict[str, Tensor]:
    """What a model is after some steps; dropout draws the same numbers in every call."""
    fleet.init(strategy=asked, **init)
    model = fleet.distributed_model(net())
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    torch.manual_seed(7)
    for x, y in batches(4):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    found = copy.deepcopy(dict(model.state_dict()))
    fleet.finish()
    return found


def kept(model: nn.Module, rows: int = 256) -> int:
    """Bytes that autograd keeps between a forward and its backward, parameters not counted."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(torch.randn(rows, 6))
    del output
    return sum(held.values())


@pytest.mark.observes("recompute", "recompute_configs.checkpoints")
@pytest.mark.parametrize("where", ["alone", "servers", "trainers"])
def test_results_are_equal_to_the_bit(where: str, servers: Servers) -> None:
    """Dropout draws what it drew, and batch norm's statistics change once a step."""
    init: dict[str, Any] = {"trainers": {"is_collective": True}}.get(where, {})
    asked, plain = strategy("0", "2"), DistributedStrategy()
    asked.a_sync = plain.a_sync = False
    if where == "servers":
        endpoints = servers(1).split(",")
        init = {
            "role_maker": fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=endpoints)
        }

    assert_same(trained(asked, **init), trained(plain, **init))


@pytest.mark.observes("recompute", "recompute_configs.checkpoints")
def test_only_inputs_are_kept() -> None:
    """A block of 64 columns keeps its input of 6."""
    model = net()
    before = kept(model)
    recompute.recomputed(model, strategy("0", "2"))

    assert kept(model) < before / 4


def test_a_copy_computes_with_its_own_parameters() -> None:
    """As for an average of models."""
    model = recompute.recomputed(net(), strategy("0")).eval()
    other, x = copy.deepcopy(model), torch.randn(2, 6)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()

    assert other(x).abs().sum() == 0 and model(x).abs().sum() > 0
    assert list(model.state_dict()) == list(net().state_dict())


@pytest.mark.observes("recompute_configs.enable_offload")
def test_what_is_kept_goes_to_main_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The inputs of the named modules, and nothing else, wait where the hooks put them; where they
    are there already, each module says it once.
    """
    packed: list[tuple[int, ...]] = []
    to_host = recompute.to_host

    def watched(tensor: Tensor) -> Any:
        packed.append(tuple(tensor.shape))
        return to_host(tensor)

    monkeypatch.setattr(recompute, "to_host", watched)
    offloaded = trained(strategy("0", "2", enable_offload=True))

    assert [shape for shape in packed if shape != (0,)] == [(8, 6)] * 8
    assert_same(offloaded, trained(None))
    said = [each.getMessage() for each in caplog.records if "enable_offload" in each.getMessage()]
    assert len(said) == 2 and "the inputs of '0' are in main memory already" in said[0]


@pytest.mark.observes("recompute_configs.enable_offload")
@pytest.mark.parametrize("device", [pytest.param("cuda:0", marks=cuda)])
def test_a_gpu_holds_less_between_forward_and_backward(device: str) -> None:
    """The inputs are in pinned memory, and the gradients are equal to the bit."""
    found = []
    for offload in (False, True):
        model = recompute.recomputed(net().to(device), strategy("0", "2", enable_offload=offload))
        x = torch.randn(4096, 6, device=device, requires_grad=True).tanh()
        torch.manual_seed(5)
        before = torch.cuda.memory_allocated()
        output = model(x).sum()
        found.append((torch.cuda.memory_allocated() - before, output))
        output.backward()
        found[-1] = (found[-1][0], [p.grad.clone() for p in model.parameters()])

    assert found[1][0] < found[0][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


@pytest.mark.observes("recompute_configs.checkpoint_shape")
def test_an_offloaded_activation_has_the_shape_that_is_said() -> None:
    """Another one is an error that names the module and both shapes."""
    model = recompute.recomputed(net(), strategy("0", enable_offload=True, checkpoint_shape=[8, 6]))
    model(torch.randn(8, 6)).sum().backward()
    with pytest.raises(ValueError, match=r"expected \[8, 6\], got \[7, 6\] for the input of '0'"):
        model(torch.randn(7, 6))


@pytest.mark.parametrize(
    ("configs", "said"),
    [
        ({}, "recompute: has no effect without recompute_configs.checkpoints"),
        (
            {"checkpoints": ["0"], "checkpoint_shape": [1]},
            "no effect without .*enable_offload",
        ),
    ],
)
def test_what_says_nothing_is_refused(configs: dict[str, Any], said: str) -> None:
    """No checkpoints, and a shape of what is not offloaded."""
    made = strategy()
    made.recompute_configs = configs
    with pytest.raises(ValueError, match=said):
        fleet.init(strategy=made)


def test_modules_that_cannot_be_recomputed_are_named() -> None:
    """Names of no module, with close ones; and lookups of rows that may change meanwhile."""
    with pytest.raises(ValueError, match=r"names of modules, got 'encodr'; close names: encoder"):
        recompute.recomputed(nn.ModuleDict({"encoder": nn.Linear(2, 2)}), strategy("encodr"))
    model = recompute.recomputed(Net(), strategy("emb"))
    with pytest.raises(ValueError, match="'emb' looks up a DistributedEmbedding"):
        model.emb(torch.tensor([1]))
