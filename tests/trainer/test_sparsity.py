"""``asp``: two of four weights are 0, and stay 0 after every update."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pserver.launcher.cluster import free_port
from tests.support.collective_trainers import GRAD, fine, ports, together
from tests.support.eager_jobs import Servers, joined
from tests.support.optimizers import OPTIMIZERS
from tests.support.seeded import seeded
from tests.support.table_trainers import Trainer
from tests.support.threads import at_once
from trainer import Executor, asp, fleet, group_sharded_parallel
from trainer.collective.world import leave_parallel_env
from trainer.modules.prepare import prepared
from transpiler import (
    LAMB,
    LARS,
    DistributedStrategy,
    DistributeTranspiler,
    DistributeTranspilerConfig,
    capture,
)
from transpiler.ir.two_of_four import mask_of
from transpiler.optim.optim import AdamD2Sum
from transpiler.program import Program
from transpiler.rewrites.pipeline import rewritten
from transpiler.rewrites.rewrites import Programs

ALL: dict[str, tuple[Any, dict[str, Any]]] = {
    **OPTIMIZERS,
    "lars": (LARS, {"lr": 1.0}),
    "lamb": (LAMB, {"lr": 0.01}),
    "adam_d2sum": (AdamD2Sum, {"lr": 0.01}),
}


def net(seed: int = 4) -> nn.Module:
    """The first weight is cut over two servers, within a group of four."""
    with seeded(seed):
        return nn.Sequential(
            nn.Linear(304, 90),
            nn.Tanh(),
            nn.BatchNorm1d(90),
            nn.Linear(90, 4, bias=False),
            nn.Linear(4, 3),
        )


def pruned(model: nn.Module) -> list[Tensor]:
    """The weights with a number of inputs that is divisible by 4."""
    return [model.get_parameter("0.weight"), model.get_parameter("4.weight")]


def batches(count: int = 6, seed: int = 3) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(8, 304, generator=generator), torch.randint(0, 3, (8,), generator=generator))
        for _ in range(count)
    ]


def step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def strategy_of(**a_sync_configs: Any) -> DistributedStrategy:
    strategy = DistributedStrategy()
    strategy.asp, strategy.a_sync = True, bool(a_sync_configs)
    strategy.a_sync_configs = a_sync_configs
    return strategy


def assert_sparse(weights: list[Tensor]) -> None:
    """At least two of every four are 0."""
    for weight in weights:
        assert int((weight.reshape(-1, 4) != 0).sum(1).max()) == 2


def train(model: nn.Module, optimizer: Any, data: Any) -> None:
    """Steps, after each of which the masks are those of the start."""
    masks = [weight != 0 for weight in pruned(model)]
    for x, y in data:
        optimizer.zero_grad()
        step(model, x, y).backward()
        optimizer.step()
        if hasattr(optimizer, "flush"):
            optimizer.flush()
        for weight, mask in zip(pruned(model), masks, strict=True):
            assert not weight[~mask].any()
    assert_sparse(pruned(model))


def test_the_two_largest_of_four_stay() -> None:
    """Along the inputs, also those of a convolution; the first ones among equals."""
    weight = torch.tensor([[1.0, -3.0, 2.0, 0.5], [0.0, 0.0, 0.0, 0.0]])
    assert mask_of(weight).tolist() == [[False, True, True, False], [True, True, False, False]]
    kernel = torch.randn(3, 8, 2, 5)
    kept = mask_of(kernel).movedim(1, -1).reshape(-1, 4).sum(1)
    assert bool((kept == 2).all())


@pytest.mark.parametrize("name", ALL)
def test_zeros_stay_under_every_rule(name: str) -> None:
    """With momentum and weight decay, and in the rules that divide; the others train."""
    cls, options = ALL[name]
    model = prepared(net(), strategy_of())
    before = [weight.detach().clone() for weight in pruned(model)]
    train(model, cls(model.parameters(), **options), batches())

    assert all(
        bool((now[now != 0] != then[now != 0]).any())
        for now, then in zip(pruned(model), before, strict=True)
    )


MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"send_queue_size": 1},
    "delay compensation": {"dc_asgd": 0.5},
    "geo": {"k_steps": 2},
    "diloco": {"k_steps": 2, "outer_optimizer": {"type": "nesterov", "lr": 0.7, "momentum": 0.9}},
}


@pytest.mark.observes("asp")
@pytest.mark.parametrize("mode", MODES)
def test_masks_hold_on_servers(servers: Servers, mode: str) -> None:
    """With slices that end within a row of four, momentum and decay; what servers hold is the
    same.
    """
    model, strategy = net(), strategy_of(**MODES[mode])
    role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=servers(2).split(","))
    fleet.init(role, strategy=strategy)
    fleet.distributed_model(model)
    given = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    optimizer = fleet.distributed_optimizer(given)
    assert len(optimizer.communicator.plan.placement("0.weight").slices) == 2
    train(model, optimizer, batches())

    held = optimizer.communicator.served()
    assert_sparse([held[name] for name in ("0.weight", "4.weight") if name in held])
    fleet.finish()


def test_masks_are_trainer_0s(servers: Servers) -> None:
    """Another trainer, which begins with other values, masks as trainer 0 does."""
    endpoints = servers(2)
    models = [prepared(net(seed=number), strategy_of()) for number in range(2)]

    def play(number: int) -> nn.Module:
        model = models[number]
        made = Trainer(
            endpoints,
            number,
            2,
            model,
            lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
            modes={"*": "sync"},
        )
        train(model, made.optimizer, batches(seed=number))
        made.job.finish()
        return model

    first, second = at_once(lambda: play(0), lambda: play(1))
    for one, other in zip(pruned(first), pruned(second), strict=True):
        assert torch.equal(one, other)


def test_masks_hold_without_servers() -> None:
    """A collective job; a layer that is left out stays dense."""
    model = net()
    asp.set_excluded_layers(model, ["4"])
    fleet.init(is_collective=True, strategy=strategy_of())
    fleet.distributed_model(model)
    asp.reset_excluded_layers(model)
    optimizer = fleet.distributed_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    for x, y in batches():
        optimizer.zero_grad()
        step(model, x, y).backward()
        optimizer.step()
    fleet.finish()
    leave_parallel_env("the test has ended")

    assert_sparse(pruned(model)[:1])
    assert bool((pruned(model)[1] != 0).all())


@pytest.mark.parametrize("where", ["alone", "sync", "async"])
def test_masks_hold_in_programs(servers: Servers, where: str) -> None:
    """The gradient is masked by an op; the mask is a buffer, which every trainer has."""
    model = net()
    given = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    pair = Programs(*capture(model, step, given, batches(1)[0]))
    if where == "alone":
        main, startup = rewritten(pair, strategy_of())
    else:
        transpiler = DistributeTranspiler(DistributeTranspilerConfig(min_block_size=8))
        strategy = strategy_of(**({} if where == "sync" else {"send_queue_size": 1}))
        transpiler.transpile(
            0, pair.main, servers(2), 1, startup_program=pair.startup, strategy=strategy
        )
        main, startup = transpiler.get_trainer_program(), transpiler.get_startup_program()
    assert "0.weight@GRAD" in str(main) and "(0.weight@DENSE, 0.weight@MASK)" in str(main)
    with Executor() as exe:
        exe.run(startup)
        losses = [
            float(exe.run(main, feed=batches(1)[0], fetch_list=["loss"])[0]) for _ in range(8)
        ]

    assert losses[-1] < losses[0]
    assert_sparse(pruned(model))


def test_two_trainers_of_a_collective_program_share_masks() -> None:
    """Those of trainer 0, whose values are not the other's at first; with LAMB in Adam's place."""
    endpoints, prepared_ones = ports(2), []
    for rank in range(2):  # torch's tracer is not for several threads
        model, strategy = net(seed=rank), strategy_of()
        strategy.lamb = True
        given = torch.optim.Adam(model.parameters(), lr=0.01)
        pair = capture(model, step, given, batches(1)[0])
        transpiler = DistributeTranspiler(DistributeTranspilerConfig(**GRAD))
        transpiler.transpile(
            rank,
            pair[0],
            trainers=",".join(endpoints),
            startup_program=pair[1],
            current_endpoint=endpoints[rank],
            strategy=strategy,
        )
        programs = transpiler.get_startup_program(), transpiler.get_trainer_program()
        prepared_ones.append((model, programs))

    def play(rank: int) -> None:
        startup, main = prepared_ones[rank][1]
        with Executor() as exe:
            exe.run(startup)
            for batch in batches(seed=rank):
                exe.run(main, feed=batch)

    fine(together(2, play))
    (first, _), (second, (_, main)) = prepared_ones
    assert "lamb(0.weight@GRAD" in str(main)
    assert_sparse(pruned(first))
    for one, other in zip(pruned(first), pruned(second), strict=True):
        assert torch.equal(one, other)


def test_a_scaled_gradient_is_masked_before_it_is_checked() -> None:
    """And so before trainers sum it, in one bucket with the others: all skip the same steps."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    given = torch.optim.SGD(model.parameters(), lr=0.1)
    pair = capture(model, lambda model, x: model(x).square().mean(), given, (torch.ones(4, 8),))
    strategy = strategy_of()
    strategy.amp = True
    transpiler = DistributeTranspiler(DistributeTranspilerConfig(**GRAD))
    transpiler.transpile(
        0,
        pair[0],
        trainers=f"127.0.0.1:{free_port()}",
        startup_program=pair[1],
        strategy=strategy,
    )
    main = transpiler.get_trainer_program()
    assert isinstance(main, Program)
    types = [op.type for op in main.main.ops]
    masks = [index for index, op in enumerate(main.main.ops) if "0.weight@MASK" in op.inputs]
    assert masks[0] < types.index("check_finite_and_unscale")
    assert main.main.ops[masks[0] + 1].type == "c_allreduce_sum"
    with Executor() as exe:
        exe.run(transpiler.get_startup_program())
        for _ in range(3):
            exe.run(main, feed=(torch.ones(4, 8),))
    assert_sparse([model[0].weight, model[1].weight])


def test_what_cannot_keep_zeros_is_refused() -> None:
    """Muon, by two steps on a small weight; LBFGS, which has no such steps; a model without a
    weight that fits; a wrong name.
    """
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    fleet.init(is_collective=True, strategy=strategy_of())
    fleet.distributed_model(model)
    with pytest.raises(ValueError, match="strategy.asp: .*got Muon, which moves it"):
        fleet.distributed_optimizer(torch.optim.Muon(model.parameters()))
    with pytest.raises(ValueError, match="strategy.asp: .*without a closure, got LBFGS: "):
        fleet.distributed_optimizer(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match="strategy.asp: expected a linear or convolution layer"):
        prepared(nn.Linear(3, 4), strategy_of())
    with pytest.raises(ValueError, match="strategy.asp: its masks .* use level 'os' or 'os_g'"):
        group_sharded_parallel(model, torch.optim.Adam(model.parameters()), "p_g_os")
    with pytest.raises(ValueError, match="expected names of the model's layers"):
        asp.set_excluded_layers(nn.Linear(8, 8), ["head"])
    for model_, names, said in (
        (None, ["0"], "expected a torch.nn.Module, got NoneType"),
        (nn.Linear(8, 8), [0], r"expected a list of names .+, got \[0\]"),
        (nn.Linear(8, 8), "head", "expected a list of names .+, got 'head'"),
    ):
        with pytest.raises(TypeError, match=said):
            asp.set_excluded_layers(model_, names)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="masked already: call it before fleet.distributed_model"):
        asp.set_excluded_layers(model, ["0"])
    fleet.finish()
    leave_parallel_env("the test has ended")


def test_asp_of_the_optimizers_strategy_comes_too_late(servers: Servers) -> None:
    """The model is registered already."""
    model = net()
    with pytest.raises(ValueError, match="strategy.asp: fleet.distributed_model reads it"):
        joined(servers(1), model, torch.optim.Adam(model.parameters()), strategy=strategy_of())


@pytest.mark.parametrize("again", [True, False])
def test_a_strategy_that_changes_after_init_comes_too_late(again: bool) -> None:
    """Given a second time, or not: it is the same object."""
    strategy = DistributedStrategy()
    fleet.init(strategy=strategy)
    model = fleet.distributed_model(net())
    strategy.asp = True
    with pytest.raises(ValueError, match="strategy.asp: fleet.distributed_model reads it"):
        fleet.distributed_optimizer(
            torch.optim.Adam(model.parameters()), strategy=strategy if again else None
        )


class Pair(nn.Module):
    """Two parts, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(1):
            self.one, self.other = nn.Linear(304, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.other(torch.tanh(self.one(x)))
        return out


def test_programs_of_two_optimizers_are_rewritten_together(servers: Servers) -> None:
    """With LAMB in the place of both; each has the other's mask, which is one tensor."""
    model, strategy = Pair(), strategy_of()
    strategy.lamb = True
    given = [
        capture(model, step, torch.optim.Adam(part.parameters(), lr=0.01), batches(1)[0])
        for part in (model.one, model.other)
    ]
    transpiler = DistributeTranspiler()
    mains, startups = zip(*given, strict=True)
    transpiler.transpile(
        0, list(mains), servers(2), 1, startup_program=list(startups), strategy=strategy
    )
    with Executor() as exe:
        for startup in transpiler.get_startup_program():
            exe.run(startup)
        for batch in batches():
            for main in transpiler.get_trainer_program():
                exe.run(main, feed=batch)

    assert_sparse([model.one.weight, model.other.weight])
    first, second = (main.storage for main in transpiler.get_trainer_program())
    assert first.tensors["one.weight@MASK"] is second.tensors["one.weight@MASK"]
