"""Tables of a model on a GPU: what the host waits for, with copies that are made when they are
waited for; and on a GPU, where there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.devices import Late, on_gpu, tables_on_a_device
from trainer import Constant, DistributedEmbedding, fleet
from trainer.embedding.joined_lookups import InputCopies

TABLES, ROWS, DIM = 3, 20, 4


class Clicks(nn.Module):
    """A table for each column of the ids; the last one has a padding, and a table has bags."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        own: dict[str, Any] = {"num_embeddings": ROWS, "init": Constant(0.5)}
        self.slots = nn.ModuleList(
            DistributedEmbedding(DIM, padding_idx=3 if i == TABLES - 1 else None, **own)
            for i in range(TABLES)
        )
        self.bags = DistributedEmbedding(DIM, pooling="mean", **own)
        self.dense = nn.Linear((TABLES + 1) * DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        rows = [slot(ids[:, i]) for i, slot in enumerate(self.slots)] + [self.bags(ids)]
        loss: Tensor = self.dense(torch.cat(rows, 1)).square().mean()
        return loss


def some_ids(step: int) -> Tensor:
    return torch.randint(0, ROWS, (8, TABLES), generator=torch.Generator().manual_seed(step))


def joined(endpoints: str, device: str = "cpu", **configs: int) -> tuple[Clicks, Any]:
    """A model of a job, and its optimizer."""
    strategy = fleet.DistributedStrategy()
    strategy.a_sync, strategy.a_sync_configs = bool(configs), configs
    role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=endpoints.split(","))
    fleet.init(role, strategy=strategy)
    model = fleet.distributed_model(Clicks().to(device))
    return model, fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def train(model: Clicks, optimizer: Any, steps: int = 6) -> Clicks:
    """The model after steps: one whose gradient is added to, one that is clipped by norm and one by
    value, with both kinds of zeroing.
    """
    device = next(model.dense.parameters()).device
    for step in range(steps):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        model(some_ids(step).to(device)).backward()
        if step == 1:
            model(some_ids(step + 100).to(device)).backward()
        if step == 3:
            clip_grad_norm_(model.parameters(), 0.01)
        if step == 4:
            clip_grad_value_(model.parameters(), 0.001)
        optimizer.step()
    return model


def rows_of(model: Clicks) -> list[Tensor]:
    """All rows, and the dense parameters."""
    every = torch.arange(ROWS, device=next(model.dense.parameters()).device)
    with torch.no_grad():
        found = [slot(every) for slot in model.slots] + [model.bags(every.unsqueeze(1))]
    return [each.detach().cpu() for each in (*found, *model.dense.parameters())]


@pytest.mark.parametrize("configs", [{}, {"k_steps": 0, "send_queue_size": 1}])
@pytest.mark.parametrize("count", [1, 2])
def test_training_is_as_in_main_memory(
    servers: Callable[[int], str],
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    configs: dict[str, int],
) -> None:
    """To the bit: the same numbers, which cross otherwise."""
    expected = rows_of(train(*joined(servers(count), **configs)))
    fleet.finish()
    tables_on_a_device(monkeypatch)
    found = rows_of(train(*joined(servers(count), **configs)))

    assert all(map(torch.equal, found, expected))
    assert not torch.equal(found[0], torch.full((ROWS, DIM), 0.5))


@pytest.mark.parametrize("device", [on_gpu])
@pytest.mark.parametrize("configs", [{}, {"k_steps": 0, "send_queue_size": 1}])
def test_training_on_a_gpu_is_near_that_in_main_memory(
    servers: Callable[[int], str], configs: dict[str, int], device: str
) -> None:
    """Within rounding."""
    expected = rows_of(train(*joined(servers(2), **configs)))
    fleet.finish()
    found = rows_of(train(*joined(servers(2), device, **configs)))

    for mine, other in zip(found, expected, strict=True):
        assert torch.allclose(mine, other, atol=1e-5)


@pytest.mark.parametrize("device", [on_gpu])
def test_a_model_may_leave_its_gpu_between_a_backward_and_the_step(
    servers: Callable[[int], str], device: str
) -> None:
    """The gradient of the backward counts, with one that is added in main memory."""
    at_step: list[Tensor] = []
    for moved in (False, True):
        model, optimizer = joined(servers(1), device if moved else "cpu")
        model(some_ids(0).to(device if moved else "cpu")).backward()
        model.cpu()
        model(some_ids(1)).backward()
        optimizer.step()
        at_step.append(torch.cat([rows.flatten() for rows in rows_of(model)]))
        fleet.finish()

    assert torch.allclose(*at_step, atol=1e-5)


class Reads(TorchDispatchMode):
    """Counts the numbers that the host reads of tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_a_step_waits_for_the_device_twice(
    servers: Callable[[int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the ids of all tables, and for the gradients of all tables: every copy has begun when the
    first is waited for.  No other number is read.
    """
    events: list[str] = []
    begin, wait = Late.to_host, Late.Copy.synchronize

    def begun(self: Late, source: Tensor, target: Tensor) -> Late.Copy:
        events.append("begin")
        return begin(self, source, target)

    def waited(self: Late.Copy) -> None:
        events.append("wait")
        wait(self)

    monkeypatch.setattr(Late, "to_host", begun)
    monkeypatch.setattr(Late.Copy, "synchronize", waited)
    tables_on_a_device(monkeypatch)
    model, optimizer = joined(servers(1))
    train(model, optimizer, steps=3)  # after which the lookups of a forward are joined
    optimizer.zero_grad()

    events.clear()
    loss = model(some_ids(7))
    assert events == ["begin", "wait"]
    events.clear()
    with Reads() as reads:
        loss.backward()
        assert events == [] and reads.count == 0
        optimizer.step()
    tables = TABLES + 1
    assert events == ["begin"] * 2 * tables + ["wait"] * 2 * tables


def test_a_gradient_is_read_again_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy of an earlier moment is given: the script changes the gradient between two reads."""
    tables_on_a_device(monkeypatch)
    model = Clicks()
    model(some_ids(1)).backward()
    slot: Any = model.slots[0]
    first = slot.gradient().rows
    slot.proxy.grad.mul_(0.5)

    assert torch.equal(slot.gradient().rows, first * 0.5)
    assert torch.equal(slot.proxy.pending_rows(), first * 0.5)
    slot.proxy.grad.zero_()
    assert len(slot.gradient().ids) == 0


SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=3)


@st.composite
def parts(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """An input, itself perhaps a part of a larger tensor, and a view of it."""

    def view(tensor: Tensor) -> Tensor:
        for _ in range(draw(st.integers(0, 3))):
            dim = draw(st.integers(0, tensor.dim() - 1)) if tensor.dim() else 0
            kind = draw(st.sampled_from(["narrow", "select", "transpose", "step"]))
            if tensor.dim() == 0:
                break
            if kind == "narrow":
                begin = draw(st.integers(0, tensor.shape[dim] - 1))
                tensor = tensor.narrow(dim, begin, tensor.shape[dim] - begin)
            elif kind == "select":
                tensor = tensor.select(dim, draw(st.integers(0, tensor.shape[dim] - 1)))
            elif kind == "transpose":
                tensor = tensor.transpose(0, dim)
            else:
                tensor = tensor.movedim(dim, 0)[::2].movedim(0, dim)
        return tensor

    sizes = draw(SIZES)
    whole = torch.arange(torch.Size(sizes).numel()).view(sizes)
    own = view(whole)
    return own, view(own)


@given(parts(), st.booleans())
def test_a_part_of_the_inputs_is_found_by_its_place(
    both: tuple[Tensor, Tensor], changed: bool
) -> None:
    """Whatever view it is; and never once the inputs have been written to."""
    whole, part = both
    other = torch.arange(4)
    with pytest.MonkeyPatch.context() as patch:
        tables_on_a_device(patch)
        copies = InputCopies()
        assert copies.of([other, whole], other) is not None
        found = copies.of([other, whole], part)
        if found is not None:
            assert found.shape == part.shape and torch.equal(found, part)
            assert found.data_ptr() != part.data_ptr()
        if part is whole and whole.is_contiguous():
            assert found is not None
        if changed:
            whole.add_(1)
            assert copies.of([other, whole], part) is None
        assert copies.of([other, whole], whole.clone()) is None
        assert copies.of([other, whole], part.to(torch.int32)) is None
