"""``group_sharded_parallel``: training is that of one process, and goes on from saved files."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.many_ranks import on_ranks
from tests.support.sharded_nets import (
    LEVELS,
    assert_close,
    batches,
    net,
    pair,
    part,
    sharded,
    train,
)
from trainer.sharding import group_sharded_parallel, save_group_sharded_model
from trainer.sharding.units import whole_of
from transpiler import LAMB, LARS, ClipGradByGlobalNorm, ClipGradByNorm, ClipGradByValue

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
    functools.partial(LARS, lars_coeff=0.1, weight_decay=0.1),
    LAMB,
)


@on_ranks(4)
def test_every_level_takes_element_wise_rules(rank: int, scratch: Path) -> None:
    """SGD with momentum, AdamW, RMSprop, Adagrad, fused and foreach forms; LARS and LAMB, whose
    norms are those of whole tensors: as one process, within 1e-6.
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
        with pytest.raises(RuntimeError, match="'frozen.weight' was frozen when"):
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
