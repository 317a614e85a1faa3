"""How gradients and parameters cross between device and host: on a side stream, and nobody reads or
writes a buffer too early.

The last tests need no GPU: they take the same way through main memory with parameters that cannot
receive values in place.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.devices import (
    Flags,
    Servers,
    adam,
    assert_near,
    batches,
    joined,
    loss_of,
    net,
    on_a_device,
    train,
)
from trainer import fleet
from trainer.device_copies import DeviceCopy, PendingCopy
from trainer.senders.sync_lane import SyncSender
from transpiler import DistributedStrategy

pytestmark = pytest.mark.usefixtures("finished")

ON_THE_WAY: dict[str, dict[str, Any]] = {
    "sync": {"modes": {"*": "sync"}},
    "sync, overlap": {"modes": {"*": "sync"}, "overlap": True},
    "async, one slot": {"send_queue_size": 1},
    "async, a queue": {},
    "async, cut late": {"runtime_split_send_recv": True},
    "half-async": {"half_async": True, "max_merge_var_num": 1},
    "k-step": {"k_steps": 1},
    "DiLoCo": {"k_steps": 1, "outer_optimizer": {"type": "sgd", "lr": 1.0}},
}


def train_on(
    model: nn.Module,
    optimizer: Any,
    data: Any,
    scaler: Any = None,
    keeps: bool = False,
    flush: bool = True,
) -> nn.Module:
    """Every step sees the one before, with ``flush``; with ``keeps`` gradients stay where they are
    and are written to in place.
    """
    device = next(model.parameters()).device.type
    scaler = scaler or torch.amp.GradScaler(device, enabled=False)
    for x, y in data:
        optimizer.zero_grad(set_to_none=not keeps)
        with torch.autocast(device, enabled=scaler.is_enabled()):
            loss = loss_of(model, x.to(device), y.to(device))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if keeps:
            optimizer.zero_grad(set_to_none=False)
        if flush:
            getattr(optimizer, "flush", lambda: None)()
    return model


def strategy_of(configs: dict[str, Any]) -> DistributedStrategy:
    strategy = DistributedStrategy()
    strategy.a_sync_configs = configs
    return strategy


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("mode", ON_THE_WAY)
def test_gradients_and_parameters_cross_on_a_side_stream(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, mode: str, mixed: bool
) -> None:
    """Through pinned memory; what is trained, with autocast and GradScaler too, is what plain torch
    trains on the GPU.
    """
    seen = []

    class Seen(DeviceCopy):
        def _copy(
            self, source: torch.Tensor, target: torch.Tensor, unless: torch.Tensor | None = None
        ) -> PendingCopy:
            host = source if target.is_cuda else target
            seen.append(
                (
                    target.is_cuda,
                    host.is_pinned(),
                    self.stream != torch.cuda.current_stream(self.device),
                )
            )
            return super()._copy(source, target, unless)

    monkeypatch.setattr("trainer.senders.parameters.DeviceCopy", Seen)
    torch.backends.cudnn.deterministic = True
    model, reference = net("cuda:0"), net("cuda:0")
    scalers = [torch.amp.GradScaler("cuda", init_scale=256.0) if mixed else None for _ in range(2)]
    if mixed and ON_THE_WAY[mode].get("overlap"):
        pytest.skip("overlap refuses GradScaler")
    train_on(
        model,
        joined(servers(2), model, strategy=strategy_of(ON_THE_WAY[mode])),
        batches(),
        scalers[0],
    )
    fleet.finish()

    assert_near(model, train_on(reference, adam(reference), batches(), scalers[1]))
    assert seen and all(pinned and aside for _, pinned, aside in seen)
    assert {back for back, _, _ in seen} == {False, True}


# ---- the same way, without a GPU ----


@pytest.mark.parametrize("mode", ON_THE_WAY)
def test_nobody_reads_or_writes_a_buffer_before_its_copy_has_been_made(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """With copies that take as long as they may, and gradients written to after the step, it is
    plain torch to the bit.
    """
    on_a_device(monkeypatch)
    monkeypatch.setattr("trainer.senders.writes.DeviceFlags", Flags)
    model, reference = net(), net()
    train_on(
        model,
        joined(servers(2), model, strategy=strategy_of(ON_THE_WAY[mode])),
        batches(),
        keeps=True,
    )
    fleet.finish()

    train_on(reference, adam(reference), batches(), keeps=True)
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


@pytest.mark.parametrize("overlap", [False, True])
def test_a_sync_step_waits_for_the_device_once_when_it_is_closed(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """Behind all of its gradients, which may leave in backward; a write that no counter shows, in
    the step behind it, is found all the same.
    """
    on_a_device(monkeypatch)
    monkeypatch.setattr("trainer.senders.writes.DeviceFlags", Flags)
    send, data = SyncSender.send, batches()

    def sends(self: SyncSender, gradients: Mapping[str, torch.Tensor]) -> None:
        Flags.waits.extend("send" for _ in gradients)
        send(self, gradients)

    monkeypatch.setattr(SyncSender, "send", sends)

    def trained(model: nn.Module, optimizer: Any) -> nn.Module:
        for step in range(6):
            if step == 4:
                next(model.parameters()).data.mul_(0.5)
            Flags.waits.clear()
            train_on(model, optimizer, data[step % len(data) :][:1])
            if step in (3, 5):  # everything is compared in the first three, and at the write
                seen.append(list(Flags.waits))
        return model

    seen: list[list[str]] = []
    model, reference = net(), net()
    strategy = strategy_of({"modes": {"*": "sync"}, "overlap": overlap})
    trained(model, joined(servers(2), model, strategy=strategy))
    fleet.finish()
    before, _ = seen
    trained(reference, adam(reference))

    assert before.count("wait") == 1 and before[-1] == "wait" and before.count("send") > 3
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def looked_at(
    model: nn.Module, optimizer: Any, written_at: int, flush: bool, each: Any = lambda step: None
) -> nn.Module:
    """Trains for 9 steps; before one of them comes a write that no counter shows."""
    data = batches()
    for step in range(9):
        each(step)
        if step == written_at:
            next(model.parameters()).data.mul_(0.5)
        train_on(model, optimizer, data[step % len(data) :][:1], keeps=False, flush=flush)
    return model


@pytest.mark.parametrize("configs", [{}, {"send_queue_size": 4}, {"max_merge_var_num": 1}])
def test_an_async_step_waits_for_no_device(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, configs: dict[str, Any]
) -> None:
    """The script's thread asks what a device has found when it has queued the next step there."""
    on_a_device(monkeypatch)
    now, made, early = 0, 0, list[int]()

    class OfStep(Flags):
        def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
            nonlocal made
            super().__init__(pairs)
            self.step, made = now, made + 1

        def wait(self) -> list[bool]:
            if threading.current_thread() is threading.main_thread() and self.step == now > 3:
                early.append(now)
            return super().wait()

    def begins(step: int) -> None:
        nonlocal now
        now = step

    monkeypatch.setattr("trainer.senders.writes.DeviceFlags", OfStep)
    model = net()
    optimizer = joined(servers(1), model, strategy=strategy_of(configs))
    looked_at(model, optimizer, written_at=-1, flush=False, each=begins)
    waited = list(early)
    fleet.finish()

    assert made >= 8 and not waited


@pytest.mark.parametrize("configs", [{}, {"send_queue_size": 4}])
def test_a_write_that_a_device_finds_goes_before_the_gradient_of_its_step(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, configs: dict[str, Any]
) -> None:
    """The message waits for it: with every step applied at once it is plain torch, to the bit."""
    on_a_device(monkeypatch)
    monkeypatch.setattr("trainer.senders.writes.DeviceFlags", Flags)
    model, reference = net(), net()
    looked_at(model, joined(servers(2), model, strategy=strategy_of(configs)), 5, flush=True)
    fleet.finish()
    looked_at(reference, adam(reference), 5, flush=True)

    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_finds_a_write_while_the_next_step_is_queued(servers: Servers) -> None:
    """As above, on a GPU: what is trained is what plain torch trains there."""
    model, reference = net("cuda:0"), net("cuda:0")
    looked_at(model, joined(servers(2), model, strategy=strategy_of({})), 5, flush=True)
    fleet.finish()

    assert_near(model, looked_at(reference, adam(reference), 5, flush=True))


def strided(model: nn.Module) -> nn.Module:
    """Gives every parameter and floating-point buffer strides that are not row-major: values land
    elsewhere and are copied.
    """
    for tensor in (*model.parameters(), *(buffer for buffer in model.buffers() if buffer.dim())):
        room = torch.empty(*tensor.shape, 2, dtype=tensor.dtype)[..., 0]
        tensor.data = room.copy_(tensor.detach())
        assert not tensor.is_contiguous()
    return model


STRATEGIES: dict[str, dict[str, Any] | None] = {
    "sync": None,
    "async": {"send_queue_size": 1},
    "k_steps": {"k_steps": 2},
}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("mode", STRATEGIES)
def test_parameters_that_cannot_receive_in_place_are_trained_all_the_same(
    servers: Servers, mode: str, count: int
) -> None:
    """What a GPU's parameters go through: copied, sliced, and back; equal to plain torch to the
    bit, strides kept.
    """
    strategy = None
    if STRATEGIES[mode] is not None:
        strategy = DistributedStrategy()
        strategy.a_sync_configs = STRATEGIES[mode]
    model, reference = strided(net()), strided(net())
    strides = [(parameter.data_ptr(), parameter.stride()) for parameter in model.parameters()]

    train(model, joined(servers(count), model, strategy=strategy), batches())
    fleet.finish()

    train(reference, adam(reference), batches())
    for (name, mine), theirs in zip(
        model.state_dict().items(), reference.state_dict().values(), strict=True
    ):
        assert (
            torch.equal(mine, theirs)
            if mode != "k_steps"
            else torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6)
        ), name
    assert [
        (parameter.data_ptr(), parameter.stride()) for parameter in model.parameters()
    ] == strides


def test_a_checkpoint_of_strided_parameters_resumes_to_the_bit(
    servers: Servers, tmp_path: Path
) -> None:
    """Saving, loading and pushing take the same way."""
    model = strided(net())
    train(model, joined(servers(3), model), batches()[:5])
    fleet.save(str(tmp_path / "saved"))
    fleet.finish()
    again = strided(net())
    optimizer = joined(servers(2), again)
    fleet.load(str(tmp_path / "saved"))
    train(again, optimizer, batches()[5:])

    reference = train(whole := strided(net()), adam(whole), batches())
    for (name, mine), theirs in zip(
        again.state_dict().items(), reference.state_dict().values(), strict=True
    ):
        assert torch.equal(mine, theirs), name
