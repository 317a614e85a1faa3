"""What each rank holds of a sharded model, and one effect for each option."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.support.many_ranks import on_ranks
from tests.support.sharded_nets import (
    LEVELS,
    assert_close,
    batches,
    live,
    net,
    pair,
    part,
    sharded,
    train,
)
from trainer.sharding import ShardedOptimizer, group_sharded_parallel, shards, units
from trainer.sharding.shards import FlatShards
from trainer.sharding.units import units_of

# ---- memory ----


@on_ranks(4)
def test_memory_of_a_rank_at_each_level(rank: int, scratch: Path) -> None:
    """Parameters, gradients and Adam's state: no more than the level says, plus 15 %, in forward
    and after backward and step.
    """
    groups = ((2, pair()), (4, None))
    kept: list[Any] = []
    gc.collect()
    gc.freeze()
    for ranks, group in groups:
        for level in LEVELS:
            base = live()
            model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(10)), nn.Linear(128, 100))
            whole = sum(parameter.nbytes for parameter in model.parameters())
            unit = max(sum(parameter.nbytes for parameter in layer.parameters()) for layer in model)
            most = {
                "os": whole + whole + 2 * whole / ranks,
                "os_g": whole + 3 * whole / ranks,
                "p_g_os": 4 * whole / ranks + unit,
            }[level]
            model, optimizer, _ = sharded(level, group, model)
            held: list[int] = []

            def look(*_: Any, base: int = base, held: list[int] = held) -> None:
                held.append(live() - base)

            for layer in list(model)[::3]:  # within the forward, while a unit is whole
                layer.register_forward_pre_hook(look)
            for _ in range(2):
                model(torch.ones(2, 128)).sum().backward()
                look()
                optimizer.step()
                look()
                optimizer.zero_grad()
            assert max(held) <= 1.15 * most, (
                level,
                ranks,
                [one / whole for one in held],
                most / whole,
            )
            assert max(held) >= 0.8 * most, (level, ranks, "the measurement misses something")
            kept.append((model, optimizer))  # freed when all is measured, and not within
    gc.unfreeze()


class Deep(nn.Module):
    """Layers that are no elements of a container."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        for number, layer in enumerate(layers):
            setattr(self, f"layer{number}", layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x)
        return x


@on_ranks(4)
def test_memory_of_a_deep_model_with_attention(rank: int, scratch: Path) -> None:
    """Torch's own layers, in a stack and one after the other: what a rank holds of parameters,
    gradients and state is its share, and two layers at the most.
    """
    layers = [nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True) for _ in range(8)]
    for model in (nn.TransformerEncoder(layers[0], 8), Deep(layers)):
        whole = sum(parameter.nbytes for parameter in model.parameters())
        gc.collect()
        gc.freeze()
        divided, optimizer, _ = sharded("p_g_os", None, model)
        held: list[int] = []

        def look(*_: Any, held: list[int] = held) -> None:
            held.append(live())

        inner = [part for part in model.modules() if isinstance(part, nn.MultiheadAttention)]
        for module in inner[::3]:
            module.register_forward_hook(look)
        for _ in range(2):
            divided(torch.ones(1, 1, 64)).sum().backward()
            look()
            optimizer.step()
            optimizer.zero_grad()
        assert 0.8 <= max(held) / whole <= 1.15 * (4 / 4 + 2 / 8), max(held) / whole
        del divided, optimizer
        gc.unfreeze()


@on_ranks(4)
def test_one_large_tensor_is_shared_evenly_too(rank: int, scratch: Path) -> None:
    """A model that is one matrix: no rank has more than its share of the state, at any level."""
    for level in LEVELS:
        model, optimizer, _ = sharded(level, model=nn.Linear(400, 300))
        model(torch.ones(1, 400)).sum().backward()
        optimizer.step()
        state = sum(
            value.nbytes
            for each in optimizer.state.values()
            for value in each.values()
            if value.dim()
        )
        assert state <= 1.01 * 2 * (400 * 300 + 300) * 4 / 4
        del model, optimizer


# ---- options ----


@on_ranks(4)
def test_offload_keeps_what_the_optimizer_steps_on_the_host(rank: int, scratch: Path) -> None:
    """offload: the state is on the CPU; pieces that are copies of the model's memory train
    alike.
    """
    for level in LEVELS:
        alone, data = net(), batches(4)
        train(alone, torch.optim.Adam(alone.parameters(), lr=1e-3), data)
        model, optimizer, _ = sharded(level, offload=True)
        train(model, optimizer, [part(batch, None) for batch in data])
        assert {
            value.device.type for state in optimizer.state.values() for value in state.values()
        } == {"cpu"}
        assert_close(model, alone)
        if level == "p_g_os":
            continue
        model = net()  # what happens where the model is on a GPU
        copies = FlatShards(
            list(model.parameters()), dist.group.WORLD, level == "os_g", 2**20, False, apart=True
        )
        wrapped = ShardedOptimizer(
            torch.optim.Adam(model.parameters(), lr=1e-3),
            copies,
            torch.device("cpu"),
            None,
            dict,
        )
        own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        assert not own & {
            piece.untyped_storage().data_ptr() for piece in copies.of.values() if piece.numel()
        }
        train(model, wrapped, [part(batch, None) for batch in data])
        assert_close(model, alone)


@on_ranks(2)
def test_gradients_on_the_host_are_those_of_the_model(rank: int, scratch: Path) -> None:
    """A GradScaler unscales the model's and the optimizer's, and what the script changes in the
    model's counts, before and after that.
    """

    def trained(model: nn.Module, optimizer: Any, scaler: Any, data: Any) -> None:
        for x, y in data:
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            model[0].weight.grad.mul_(0.5)
            model[-1].bias.grad = None
            scaler.unscale_(optimizer)
            model[0].bias.grad.mul_(0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    sgd = partial(torch.optim.SGD, lr=0.5, momentum=0.9)
    for enabled in (True, False):
        scalers = [torch.amp.GradScaler("cpu", 1024.0, enabled=enabled) for _ in range(2)]
        alone, model, data = net(), net(), batches(2)
        trained(alone, sgd(alone.parameters()), scalers[0], data)
        with mock.patch("trainer.sharding.levels._already_there", return_value=False):
            model, optimizer, scaler = group_sharded_parallel(
                model, sgd(model.parameters()), "os", scalers[1], offload=True
            )
        trained(model, optimizer, scaler, [part(batch, None) for batch in data])
        assert_close(model, alone)


@on_ranks(4)
def test_sync_buffers_makes_them_equal_on_all_ranks(rank: int, scratch: Path) -> None:
    """After a step running statistics are the first rank's with sync_buffers, and each rank's own
    without.
    """
    for level in LEVELS:
        for sync in (True, False):
            model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
            model, optimizer, _ = sharded(level, model=model, sync_buffers=sync)
            train(model, optimizer, [part(batch, None) for batch in batches(4, 2)])
            means = [torch.zeros(8) for _ in range(4)]
            dist.all_gather(means, model[1].running_mean)
            assert all(torch.equal(mean, means[0]) for mean in means) is sync


@on_ranks(4)
def test_buffer_max_size_decides_the_number_of_reductions(rank: int, scratch: Path) -> None:
    """Gradients travel in reductions of at most so many elements: fewer elements, more reductions,
    the same training.
    """
    sizes = [parameter.numel() for parameter in net().parameters()]
    alone, data = net(), batches(4, 1)
    train(alone, torch.optim.Adam(alone.parameters(), lr=1e-3), data)
    for level, options in (("os", {}), ("os_g", {}), ("p_g_os", {"segment_size": 10**6})):
        counts = []
        for most in (10**6, 24 * 24 + 24, 1):
            model, optimizer, _ = sharded(level, buffer_max_size=most, **options)
            train(model, optimizer, [part(batch, None) for batch in data])
            counts.append(optimizer.shards.reducer.reductions)
            assert_close(model, alone)
        assert counts[0] == 1 and counts[1] == 5 and counts[2] == len(sizes), counts


@on_ranks(4)
def test_segment_size_is_the_smallest_tensor_that_is_sharded(rank: int, scratch: Path) -> None:
    """A tensor of exactly segment_size elements is sharded, smaller ones are whole on every rank;
    nothing is by default here.
    """
    for least, expected in (
        (24 * 24, [False, True, True, True, False]),
        (2**20, [False] * 5),
        (1, [True] * 5),
    ):
        model, _, _ = sharded("p_g_os", segment_size=least)
        weights = [tensor for tensor in model.parameters() if tensor.dim() == 2]
        assert [hasattr(tensor, "placements") for tensor in weights] == expected, least


@pytest.mark.long  # the profiler of four processes: tests of equality are in every run
@on_ranks(4)
def test_sync_comm_leaves_nothing_to_overlap(rank: int, scratch: Path) -> None:
    """With sync_comm a collective has ended before anything else happens; without, the next one
    starts meanwhile.
    """
    events: list[str] = []

    class Watched:
        def __init__(self, work: Any) -> None:
            self.work = work

        def wait(self) -> None:
            events.append("end")
            self.work.wait()

    def started(call: Any) -> Any:
        def begin(*args: Any, **kwargs: Any) -> Any:
            events.append("start")
            return Watched(call(*args, **kwargs))

        return begin

    x, y = part(batches(4)[0], None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "reduce_scatter", started(shards.reduce_scatter))
        for sync, order in (
            (True, ["start", "end"] * 5),
            (False, ["start"] * 3 + ["end", "start"] * 2 + ["end"] * 3),
        ):
            events.clear()
            model, optimizer, _ = sharded("os_g", sync_comm=sync, buffer_max_size=24 * 24 + 24)
            F.cross_entropy(model(x), y).backward()
            assert events == order, (sync, events)

    for sync in (True, False):
        model, optimizer, _ = sharded("p_g_os", sync_comm=sync)
        train(model, optimizer, [(x, y)])  # the first time orders what is gathered
        events.clear()
        kind = units.BlockingAllGather if sync else units.DefaultAllGather

        def noted(*args: Any, call: Any = kind.__call__, **kwargs: Any) -> Any:
            events.append("gather")
            return call(*args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kind, "__call__", noted)
            for unit in optimizer.shards.units:
                unit.register_forward_pre_hook(lambda *_: events.append("use"))
            model(x)
        ahead = max(
            events[:at].count("gather") - events[:at].count("use") for at in range(len(events) + 1)
        )
        assert ahead == (1 if sync else 2), events


# ---- units ----


def test_units_are_repeated_blocks() -> None:
    """Elements of the outermost containers; what holds more than half of the model is opened;
    leaves elsewhere.
    """
    model = net()
    assert units_of(model, set(model.parameters())) == [
        model[0],
        model[2],
        model[3],
        model[4],
        model[5],
    ]
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3))
    whole = nn.ModuleDict(
        {"body": nn.ModuleList([nn.Sequential(*blocks)]), "head": nn.Linear(4, 2)}
    )
    assert units_of(whole, set(whole.parameters())) == [*blocks, whole["head"]]
    assert units_of(whole, set(whole["head"].parameters())) == [whole["head"]]
