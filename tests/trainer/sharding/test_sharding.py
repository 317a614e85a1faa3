"""``group_sharded_parallel``: what each rank holds, that training is that of one process, and one
effect for each option.
"""

from __future__ import annotations

import copy
import functools
import gc
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from pserver.errors import FingerprintMismatch
from tests.support.many_ranks import on_ranks, summed
from trainer.sharding import (
    ShardedOptimizer,
    collectives,
    group_sharded_parallel,
    reducer,
    save_group_sharded_model,
    units,
)
from trainer.sharding.shards import FlatShards
from trainer.sharding.units import Units, units_of, whole_of
from transpiler import ClipGradByGlobalNorm, ClipGradByNorm, ClipGradByValue

LEVELS = ("os", "os_g", "p_g_os")


# ---- what the tests share ----


@functools.cache
def pair() -> Any:
    """The group of this rank and its neighbour."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return groups[dist.get_rank() // 2]


def net(width: int = 24, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, width),
        nn.Tanh(),
        *(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3)),
        nn.Linear(width, 3),
    )


def batches(ranks: int, count: int = 4, seed: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of all ranks together, 4 samples each."""
    source = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(4 * ranks, 6, generator=source),
            torch.randint(0, 3, (4 * ranks,), generator=source),
        )
        for _ in range(count)
    ]


def part(batch: Any, group: Any) -> Any:
    rank = dist.get_rank(group)
    return tuple(tensor[4 * rank : 4 * rank + 4] for tensor in batch)


def train(
    model: nn.Module, optimizer: Any, data: Any, clip: Any = None, scheduler: Any = None
) -> None:
    for x, y in data:
        F.cross_entropy(model(x), y).backward()
        if clip is not None:
            clip(list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


def sharded(
    level: str, group: Any = None, model: Any = None, rule: Any = torch.optim.Adam, **options: Any
) -> Any:
    """A model divided at a level, every tensor of it where parameters are divided too."""
    model = net() if model is None else model
    options = ({"segment_size": 1} if level == "p_g_os" else {}) | options
    return group_sharded_parallel(
        model, rule(model.parameters(), lr=1e-3), level, group=group, **options
    )


def values(model: nn.Module) -> list[torch.Tensor]:
    return [whole_of(tensor.detach()) for tensor in model.parameters()]


def assert_close(model: nn.Module, reference: nn.Module, exactly: bool = False) -> None:
    for (name, theirs), mine in zip(reference.named_parameters(), values(model), strict=True):
        if exactly:
            assert torch.equal(mine, theirs), name
        else:
            torch.testing.assert_close(mine, theirs.detach(), rtol=0, atol=1e-6, msg=name)


def live() -> int:
    """Bytes of all memory that tensors of this process hold, but for those that were there before
    ``gc.freeze()``.
    """
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                tensor = getattr(tensor, "_local_tensor", tensor)
                if tensor is not None and tensor.device.type != "meta":
                    found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(found.values())


# ---- the same training ----


@on_ranks(4)
def test_every_level_equals_ddp_to_the_bit_on_two_ranks_and_one_process_on_any(
    rank: int, scratch: Path
) -> None:
    """On two ranks a level's parameters are those of torch's DDP exactly; on 2 and 4, those of one
    process on the whole batch.
    """
    for level in LEVELS:
        for group, ranks in ((pair(), 2), (None, 4)):
            alone, data = net(), batches(ranks)
            train(alone, torch.optim.Adam(alone.parameters(), lr=1e-3), data)
            model, optimizer, _ = sharded(level, group, net(seed=rank % ranks))
            mine = [part(batch, group) for batch in data]
            train(model, optimizer, mine)
            assert_close(model, alone)
            if ranks == 2:
                replica = net()
                ddp = nn.parallel.DistributedDataParallel(replica, process_group=group)
                train(ddp, torch.optim.Adam(ddp.parameters(), lr=1e-3), mine)
                assert_close(model, replica, exactly=True)


@on_ranks(4)
def test_level_os_equals_torchs_own_zero(rank: int, scratch: Path) -> None:
    """Training is that of DDP with ZeroRedundancyOptimizer, to the bit."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    data = [part(batch, pair()) for batch in batches(2)]
    replica = net()
    ddp = nn.parallel.DistributedDataParallel(replica, process_group=pair())
    zero = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.Adam, process_group=pair(), lr=1e-3
    )
    train(ddp, zero, data)
    model, optimizer, _ = sharded("os", pair())
    train(model, optimizer, data)
    assert_close(model, replica, exactly=True)


RULES: tuple[Any, ...] = (
    functools.partial(torch.optim.SGD, momentum=0.9, nesterov=True),
    functools.partial(torch.optim.AdamW, amsgrad=True, weight_decay=0.1),
    functools.partial(torch.optim.AdamW, fused=True),
    functools.partial(torch.optim.Adam, foreach=True),
    functools.partial(torch.optim.RMSprop, centered=True),
    torch.optim.Adagrad,
)


@on_ranks(4)
def test_every_level_takes_element_wise_rules(rank: int, scratch: Path) -> None:
    """SGD with momentum, AdamW, RMSprop, Adagrad, fused and foreach forms: as one process, within
    1e-6.
    """
    for level in LEVELS:
        for rule in RULES:
            alone, data = net(), batches(4, 3)
            train(alone, rule(alone.parameters(), lr=1e-3), data)
            model, optimizer, _ = sharded(level, model=net(), rule=rule)
            train(model, optimizer, [part(batch, None) for batch in data])
            assert_close(model, alone)


def two_groups(model: nn.Sequential) -> torch.optim.Adam:
    return torch.optim.Adam(
        [
            {"params": model[0].parameters(), "lr": 3e-3},
            {"params": model[1:].parameters(), "weight_decay": 0.1},
        ],
        lr=1e-3,
    )


@on_ranks(4)
def test_groups_state_and_schedule_go_on(rank: int, scratch: Path) -> None:
    """What the optimizer had before sharding (groups, rates, moments, the scheduler made for it)
    goes on; state_dict is whole.
    """
    before, after = batches(4, 2, seed=1), batches(4, 3, seed=2)
    for level in LEVELS:
        alone, model = net(), net()
        plain, given = two_groups(alone), two_groups(model)
        theirs, mine = (torch.optim.lr_scheduler.StepLR(one, 2, 0.5) for one in (plain, given))
        train(alone, plain, before + after, scheduler=theirs)
        train(model, given, before, scheduler=mine)
        options: Any = {"segment_size": 20} if level == "p_g_os" else {}
        model, optimizer, _ = group_sharded_parallel(model, given, level, **options)
        train(model, optimizer, [part(batch, None) for batch in after], scheduler=mine)
        assert_close(model, alone)
        assert [group["lr"] for group in optimizer.param_groups] == [
            group["lr"] for group in plain.param_groups
        ]
        held, expected = optimizer.state_dict(), plain.state_dict()
        assert held["param_groups"] == expected["param_groups"]
        torch.testing.assert_close(held["state"], expected["state"], rtol=0, atol=1e-6)

        two_groups(alone).load_state_dict(held)  # the plain optimizer takes it
        other = net()
        other.load_state_dict({name: whole_of(value) for name, value in model.state_dict().items()})
        fresh = two_groups(other)
        other, fresh_sharded, _ = group_sharded_parallel(
            other, fresh, level, **({"segment_size": 20} if level == "p_g_os" else {})
        )
        fresh_sharded.load_state_dict(held)
        for one, its in ((other, fresh_sharded), (alone, plain)):
            train(one, its, [part(batch, None) for batch in after] if one is other else after)
        assert_close(other, alone)


@on_ranks(4)
def test_grad_clip_is_that_of_one_process(rank: int, scratch: Path) -> None:
    """Clipping by value, by norm and by global norm sees whole gradients, wherever their parts
    lie.
    """
    data = batches(4, 3)
    cases: tuple[tuple[Any, Any], ...] = (
        (ClipGradByValue(0.01), lambda ps: nn.utils.clip_grad_value_(ps, 0.01)),
        (ClipGradByNorm(0.05), lambda ps: [nn.utils.clip_grad_norm_(p, 0.05) for p in ps]),
        (ClipGradByGlobalNorm(0.05), lambda ps: nn.utils.clip_grad_norm_(ps, 0.05)),
    )
    for level in LEVELS:
        for clip, plainly in cases:
            alone, model = net(), net()
            train(alone, torch.optim.SGD(alone.parameters(), lr=0.5), data, clip=plainly)
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
            optimizer.grad_clip = clip
            options = {"segment_size": 20} if level == "p_g_os" else {}  # biases stay whole
            model, optimizer, _ = group_sharded_parallel(model, optimizer, level, **options)
            assert optimizer.grad_clip is clip
            train(model, optimizer, [part(batch, None) for batch in data])
            assert_close(model, alone)


@on_ranks(4)
def test_an_overflow_anywhere_skips_the_step_everywhere(rank: int, scratch: Path) -> None:
    """The scaler keeps its state, unscales every part, and halves on all ranks where one rank's
    gradient is infinite.
    """
    data = batches(4, 3)
    for level in LEVELS:
        alone, model = net(), net()
        plain = torch.optim.Adam(alone.parameters(), lr=1e-3)
        train(alone, plain, data[:2])
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        options = {"segment_size": 20} if level == "p_g_os" else {}
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        model, wrapped, scaler = group_sharded_parallel(model, optimizer, level, scaler, **options)
        assert scaler is not None and scaler.get_scale() == 64.0
        for step, batch in enumerate([data[0], data[2], data[1]]):
            x, y = part(batch, None)
            loss = F.cross_entropy(model(x), y)
            scaler.scale(loss * (float("inf") if step == 1 and rank == 2 else 1.0)).backward()
            scaler.step(wrapped)
            scaler.update()
            wrapped.zero_grad()
        assert scaler.get_scale() == 32.0
        assert_close(model, alone)


class Uneven(nn.Module):
    """A layer that only some ranks use, one that nobody does, a frozen one, and a tensor used
    twice.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.sometimes, self.never = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 6)
        self.head.weight = self.first.weight

    def forward(self, x: torch.Tensor, use: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.first(x).tanh())
        mixed = torch.stack(
            [self.sometimes(row) if flag else row for row, flag in zip(x, use, strict=True)]
        )
        return self.head(mixed)


@on_ranks(4)
def test_unused_frozen_and_tied_parameters(rank: int, scratch: Path) -> None:
    """A gradient that some ranks lack counts as zero, one that all lack leaves its parameter alone,
    ties stay tied.
    """
    use, x = torch.arange(16) < 4, torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
    for level in ("os", "os_g"):
        alone, model = Uneven(), Uneven()
        plain = torch.optim.AdamW(alone.parameters(), lr=1e-3, weight_decay=0.1)
        model, optimizer, _ = sharded(
            level, model=model, rule=functools.partial(torch.optim.AdamW, weight_decay=0.1)
        )
        for _ in range(3):
            alone(x, use).square().mean().backward()
            model(x[4 * rank :][:4], use[4 * rank :][:4]).square().mean().backward()
            for one in (plain, optimizer):
                one.step()
                one.zero_grad()
        assert_close(model, alone)
        assert model.head.weight is model.first.weight
        assert torch.equal(model.never.weight, Uneven().never.weight)
        model.frozen.weight.grad = torch.ones(6, 6)
        with pytest.raises(RuntimeError, match="frozen when group_sharded_parallel was called"):
            (optimizer.param_groups[0]["params"]).append(model.frozen.weight)
            optimizer._frozen.append(model.frozen.weight)
            optimizer.step()


class TiedEnds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.blocks = (
            nn.Linear(6, 6),
            nn.ModuleList(nn.Linear(6, 6) for _ in range(3)),
        )
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x).tanh()
        return self.head(x)[:, :3]


@on_ranks(4)
def test_tied_ends_are_gathered_with_the_model_itself(rank: int, scratch: Path) -> None:
    """At p_g_os a tensor used in two places belongs to no unit, and training is that of one
    process.
    """
    alone, data = TiedEnds(), batches(4)
    train(alone, torch.optim.Adam(alone.parameters(), lr=1e-3), data)
    model, optimizer, _ = sharded("p_g_os", model=TiedEnds())
    assert [type(unit) for unit in optimizer.shards.units] == [
        type(block) for block in model.blocks
    ]
    train(model, optimizer, [part(batch, None) for batch in data])
    assert_close(model, alone)


@on_ranks(4)
def test_gradients_accumulate_and_a_failed_backward_is_forgotten(rank: int, scratch: Path) -> None:
    """Two backward passes before a step add up; zero_grad of model or optimizer drops all; a
    backward that raises harms none.
    """
    (x, y), (other, labels) = batches(4, 2)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            raise ArithmeticError("on purpose")

    for level in LEVELS:
        alone = net()
        plain = torch.optim.SGD(alone.parameters(), lr=0.1)
        model, optimizer, _ = sharded(level, model=net(), rule=torch.optim.SGD)
        for group in (*plain.param_groups, *optimizer.param_groups):
            group["lr"] = 0.1
        mine = slice(4 * rank, 4 * rank + 4)
        if level != "p_g_os":  # FSDP2 needs reset_iter_state() after it
            with pytest.raises(ArithmeticError):
                model[2:](Fails.apply(model[:2](x[mine]))).sum().backward()
            model.zero_grad()
        F.cross_entropy(model(x[mine]), y[mine]).backward()
        model.zero_grad()  # what was there is gone
        for step in range(2):
            for images, targets in ((x, y), (other, labels)):
                F.cross_entropy(alone(images), targets).backward()
                F.cross_entropy(model(images[mine]), targets[mine]).backward()
            for one in (plain, optimizer):
                one.step()
                one.zero_grad(set_to_none=step == 0)
        assert_close(model, alone)


# ---- memory ----


@on_ranks(4)
def test_memory_of_a_rank_at_each_level(rank: int, scratch: Path) -> None:
    """Parameters, gradients and Adam's state: no more than the level says, plus 15 %, in forward
    and after backward and step.
    """
    groups = ((2, pair()), (4, None))
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
            del model, optimizer
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
            torch.optim.Adam(model.parameters(), lr=1e-3), copies, torch.device("cpu"), None
        )
        own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        assert not own & {
            piece.untyped_storage().data_ptr() for piece in copies.of.values() if piece.numel()
        }
        train(model, wrapped, [part(batch, None) for batch in data])
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
        patch.setattr(reducer, "reduce_scatter", started(collectives.reduce_scatter))
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


# ---- files ----


@on_ranks(4)
def test_saved_files_are_plain(rank: int, scratch: Path) -> None:
    """safetensors and torch alone load the model and the optimizer's state, and training goes on
    from them.
    """
    more = batches(4, 2, seed=8)
    for level in LEVELS:
        model, optimizer, _ = sharded(level)
        train(model, optimizer, [part(batch, None) for batch in batches(4)])
        save_group_sharded_model(model, str(scratch / level), optimizer)
        plain = net(seed=5)
        plain.load_state_dict(safetensors.torch.load_file(scratch / level / "model.safetensors"))
        assert_close(model, plain, exactly=True)
        its = torch.optim.Adam(plain.parameters())
        its.load_state_dict(torch.load(scratch / level / "optimizer.pt", weights_only=True))
        train(model, optimizer, [part(batch, None) for batch in more])
        train(plain, its, more)
        assert_close(model, plain)
        assert sorted(path.name for path in (scratch / level).iterdir()) == [
            "model.safetensors",
            "optimizer.pt",
        ]

        save_group_sharded_model(model, scratch / f"{level} alone")
        assert [path.name for path in (scratch / f"{level} alone").iterdir()] == [
            "model.safetensors"
        ]


@on_ranks(4)
def test_what_cannot_be_saved_is_said(rank: int, scratch: Path) -> None:
    """A model that is not sharded, a file in the directory's place, another optimizer, a directory
    that cannot be written.
    """
    model, optimizer, _ = sharded("os")
    file = scratch / f"a file of {rank}"
    file.write_text("")
    with pytest.raises(ValueError, match="not sharded"):
        save_group_sharded_model(net(), scratch / "out")
    with pytest.raises(ValueError, match="expected a directory, got the file"):
        save_group_sharded_model(model, file)
    with pytest.raises(TypeError, match="group_sharded_parallel returned, got Adam"):
        save_group_sharded_model(model, scratch / "out", torch.optim.Adam(model.parameters()))
    with pytest.raises(OSError):
        save_group_sharded_model(model, file / "below a file", optimizer)


# ---- the page's example, and errors ----


@on_ranks(4)
def test_the_pages_example(rank: int, scratch: Path) -> None:
    """Line by line; its level "p_g" raises and names the three, and with "p_g_os" it trains."""
    scaler = torch.amp.GradScaler("cpu")

    group = dist.new_group([0, 1])
    if rank > 1:
        with pytest.raises(ValueError, match=f"rank {rank} is not of the group"):
            model = nn.Linear(10, 10)
            group_sharded_parallel(model, torch.optim.AdamW(model.parameters()), "os", group=group)
        return
    model = nn.Linear(1000, 1000)

    clip = ClipGradByGlobalNorm(clip_norm=1.0)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.001, weight_decay=0.00001)
    optimizer.grad_clip = clip

    with pytest.raises(ValueError, match="'os', 'os_g', 'p_g_os', got 'p_g'"):
        group_sharded_parallel(model, optimizer, "p_g", scaler=scaler, group=group)
    model, optimizer, scaler = group_sharded_parallel(
        model, optimizer, "p_g_os", scaler=scaler, group=group, segment_size=10**6
    )

    img, label = torch.randn(4, 1000), torch.randint(0, 1000, (4,))
    label.requires_grad = False
    img.requires_grad = False

    before = whole_of(model.weight.detach()).clone()
    out = model(img)
    loss = F.cross_entropy(input=out, target=label)

    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert not torch.equal(whole_of(model.weight.detach()), before)


@on_ranks(4)
def test_wrong_arguments_are_named(rank: int, scratch: Path) -> None:
    """Every message says what was expected and what came."""
    model, frozen = net(), net().requires_grad_(False)
    adam = torch.optim.Adam(model.parameters())
    clipped: Any = torch.optim.Adam(model.parameters())
    clipped.grad_clip = 1.0
    cases: tuple[tuple[type[Exception], str, Any, Any, str, dict[str, Any]], ...] = (
        (TypeError, "expected a torch.nn.Module, got int", 3, adam, "os", {}),
        (TypeError, "expected a torch.optim.Optimizer, got int", model, 3, "os", {}),
        (ValueError, "none of the model's", nn.Linear(2, 2), adam, "os", {}),
        (ValueError, "got none", frozen, torch.optim.Adam(frozen.parameters()), "os", {}),
        (
            ValueError,
            "rows and columns",
            model,
            torch.optim.Adafactor(model.parameters()),
            "os",
            {},
        ),
        (TypeError, "grad_clip: expected one of transpiler's", model, clipped, "os", {}),
        (
            ValueError,
            "segment_size: has an effect at level 'p_g_os' only",
            model,
            adam,
            "os_g",
            {"segment_size": 5},
        ),
        (
            ValueError,
            "sync_buffers: the model has no buffers",
            model,
            adam,
            "os",
            {"sync_buffers": True},
        ),
        (TypeError, "offload: expected True or False, got 1", model, adam, "os", {"offload": 1}),
        (
            ValueError,
            "buffer_max_size: expected a whole number of elements",
            model,
            adam,
            "os",
            {"buffer_max_size": 0},
        ),
        (TypeError, "expected a torch.amp.GradScaler, got int", model, adam, "os", {"scaler": 3}),
    )
    for kind, words, given, optimizer, level, options in cases:
        with pytest.raises(kind, match=words):
            group_sharded_parallel(given, optimizer, level, **options)
    assert summed(1) == 4  # nobody has waited for anybody in vain


@on_ranks(4)
def test_a_second_call_and_a_late_group_are_named(rank: int, scratch: Path) -> None:
    """A model is sharded once, with all its groups."""
    model, optimizer, _ = sharded("os")
    with pytest.raises(ValueError, match="called for it before"):
        group_sharded_parallel(model, optimizer, "os")
    with pytest.raises(ValueError, match="expected all groups before"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    assert summed(1) == 4  # nobody has waited for anybody in vain


@on_ranks(4)
def test_ranks_that_differ_are_named(rank: int, scratch: Path) -> None:
    """Another model, or another level, on one rank: all learn from whom, and how it differs."""
    wide = net(width=30 if rank == 2 else 24)
    with pytest.raises(
        FingerprintMismatch,
        match=r"on trainer 2: 0.bias: float32\[30\] \(trainer 0 has float32\[24\]\)",
    ):
        sharded("os", model=wide)
    with pytest.raises(
        FingerprintMismatch, match=r"on trainer 3: level: os \(trainer 0 has os_g\)"
    ):
        sharded("os" if rank == 3 else "os_g")


def test_trainers_that_have_not_met_are_told_what_to_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the two calls that bring up a process group."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name, value in (
        ("RANK", "0"),
        ("LOCAL_RANK", "0"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "1"),
    ):
        monkeypatch.setenv(name, value)
    model = net()
    with pytest.raises(
        RuntimeError, match=r"init_parallel_env\(\) or fleet.init\(is_collective=True\)"
    ):
        group_sharded_parallel(model, torch.optim.Adam(model.parameters()), "os")


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


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: a world of one on NCCL has not run"
)
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_a_world_of_one_on_a_gpu(level: str, offload: bool, tmp_path: Path) -> None:
    """Streams, AMP and offloading to the host; communication between devices is not proven by
    one.
    """
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        alone = net(256).cuda()
        model = copy.deepcopy(alone)
        data = [(x.cuda(), y.cuda()) for x, y in batches(4)]
        train(alone, torch.optim.Adam(alone.parameters(), lr=1e-3), data)
        model, optimizer, scaler = group_sharded_parallel(
            *(
                model,
                torch.optim.Adam(model.parameters(), lr=1e-3),
                level,
                torch.amp.GradScaler("cuda"),
            ),
            **({"segment_size": 1} if level == "p_g_os" else {}),
            offload=offload,
        )
        assert scaler is not None
        for x, y in data:
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        states = {
            v.device.type
            for state in optimizer.state.values()
            for key, v in state.items()
            if key != "step"
        }
        assert states == {"cpu" if offload else "cuda"}
        for mine, theirs in zip(values(model), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.cuda(), theirs.detach(), rtol=1e-5, atol=1e-6)
        save_group_sharded_model(model, tmp_path / "out", optimizer)
        assert isinstance(optimizer.shards, Units if level == "p_g_os" else FlatShards)
    finally:
        dist.destroy_process_group()
