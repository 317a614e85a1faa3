"""A cluster computes what a single node computes: to the bit with one trainer, within rounding with
several.

Real servers in this process, over their real transports.  The reference runs in the same test, on
the same threads.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.matrix import crossed
from tests.support.optimizers import OPTIMIZERS, O
from trainer import Executor, fleet
from transpiler import (
    ClipGradByGlobalNorm,
    ClipGradByNorm,
    ClipGradByValue,
    DistributedStrategy,
    DistributeTranspiler,
    DistributeTranspilerConfig,
    SizeBalanced,
    capture,
)

STEPS = 20
Servers = Callable[[int], str]


class Net(nn.Module):
    """A matrix large enough to be cut, one that is not, a vector, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(96, 257)
        self.narrow = nn.Linear(257, 3)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(torch.tanh(self.wide(x))) * self.scale


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def net() -> Net:
    torch.manual_seed(7)
    return Net()


def batches(
    count: int = STEPS, size: int = 8, seed: int = 11
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, 96, generator=generator),
            torch.randint(0, 3, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def alone(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Any,
    clip: Any = None,
    schedule: Any = None,
) -> nn.Module:
    """The reference: plain torch."""
    scheduler = schedule(optimizer) if schedule else None
    for x, y in data:
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        if clip is not None:
            clip(list(model.parameters()))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return model


def assert_equal(model: nn.Module, reference: nn.Module) -> None:
    for (name, mine), (_, theirs) in zip(
        model.state_dict().items(), reference.state_dict().items(), strict=True
    ):
        assert torch.equal(mine, theirs), (
            f"{name}: largest difference {(mine - theirs).abs().max()}"
        )


def eager(
    endpoints: str,
    make: Any,
    data: Any,
    *,
    strategy: Any = None,
    grad_clip: Any = None,
    schedule: Any = None,
) -> Net:
    """One trainer of an eager job."""
    fleet.init(fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=endpoints.split(",")))
    model = fleet.distributed_model(net())
    optimizer = fleet.distributed_optimizer(make(model.parameters()), strategy, grad_clip=grad_clip)
    scheduler = schedule(optimizer) if schedule else None
    for x, y in data:
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    fleet.finish()
    return model


class Prepared:
    """One trainer of a job of programs, captured and transpiled.

    Tracing is for one thread at a time; training is not.
    """

    def __init__(
        self,
        endpoints: str,
        make: Any,
        example: Any,
        trainer: int = 0,
        trainers: int = 1,
        **kinds: Any,
    ) -> None:
        self.model = net()
        optimizer = make(self.model.parameters())
        self.scheduler = kinds["schedule"](optimizer) if kinds.get("schedule") else None
        clip = kinds.get("grad_clip")
        main, startup = capture(
            self.model, loss_of, optimizer, example, grad_clip=clip, scheduler=self.scheduler
        )
        self.transpiler = DistributeTranspiler(kinds.get("config"))
        self.transpiler.transpile(
            trainer, main, pservers=endpoints, trainers=trainers, startup_program=startup
        )

    def train(self, data: Any) -> nn.Module:
        with Executor() as exe:
            exe.run(self.transpiler.get_startup_program())
            for x, y in data:
                exe.run(self.transpiler.get_trainer_program(), feed=(x, y), fetch_list=["loss"])
                if self.scheduler is not None:
                    self.scheduler.step()
        return self.model


def program(endpoints: str, make: Any, data: Any, **kinds: Any) -> nn.Module:
    """The only trainer of a job of programs."""
    return Prepared(endpoints, make, data[0], **kinds).train(data)


@crossed("equalities", name=OPTIMIZERS, count=[1, 2, 3])
def test_every_optimizer_equals_plain_torch_on_the_eager_path(
    servers: Servers, name: str, count: int
) -> None:
    """Sync, one trainer: parameters after 20 steps are equal to the bit, however many servers share
    them.
    """
    cls, options = OPTIMIZERS[name]
    reference = net()

    model = eager(servers(count), lambda parameters: cls(parameters, **options), batches())

    assert_equal(model, alone(reference, cls(reference.parameters(), **options), batches()))


@crossed(
    "equalities",
    rows=[("adam", 2), ("sgd_nesterov", 3), ("rmsprop_centered", 1)],
    name=OPTIMIZERS,
    count=[1, 2, 3],
)
def test_every_optimizer_equals_plain_torch_on_the_program_path(
    servers: Servers, name: str, count: int
) -> None:
    """The same through capture, transpiler and Executor."""
    cls, options = OPTIMIZERS[name]
    reference = net()

    model = program(servers(count), lambda parameters: cls(parameters, **options), batches())

    assert_equal(model, alone(reference, cls(reference.parameters(), **options), batches()))


@crossed("equalities", name=["adam", "adamw", "sgd_momentum", "adagrad"], path=[eager, program])
def test_fused_rules_on_slices_are_within_an_ulp(servers: Servers, name: str, path: Any) -> None:
    """``fused=True`` runs torch's fused kernel on each slice: rounding may differ at a slice's
    tail.
    """
    cls, options = OPTIMIZERS[name]
    options = {**options, "fused": True}
    reference = net()

    model = path(servers(3), lambda parameters: cls(parameters, **options), batches(1))

    alone(reference, cls(reference.parameters(), **options), batches(1))
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        ulp = torch.nextafter(theirs.abs(), torch.tensor(float("inf"))) - theirs.abs()
        assert ((mine - theirs).abs() <= ulp).all()


def global_norm(parameters: Any) -> None:
    nn.utils.clip_grad_norm_(parameters, 0.05)


def each_norm(parameters: Any) -> None:
    for parameter in parameters:
        nn.utils.clip_grad_norm_([parameter], 0.05)


def value(parameters: Any) -> None:
    nn.utils.clip_grad_value_(parameters, 0.001)


CLIPS = {
    "value": (ClipGradByValue(0.001), value),
    "norm": (ClipGradByNorm(0.05), each_norm),
    "global_norm": (ClipGradByGlobalNorm(0.05), global_norm),
}


@crossed("equalities", kind=CLIPS, path=[eager, program])
def test_gradient_clipping_equals_plain_torch_with_one_trainer(
    servers: Servers, kind: str, path: Any
) -> None:
    """Clipping and slicing together: on the trainer, to the bit."""
    ours, theirs = CLIPS[kind]
    reference = net()

    model = path(
        servers(3), lambda parameters: O.Adam(parameters, lr=0.01), batches(), grad_clip=ours
    )

    assert_equal(
        model, alone(reference, O.Adam(reference.parameters(), lr=0.01), batches(), clip=theirs)
    )


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda optimizer: O.lr_scheduler.StepLR(optimizer, 3, 0.5),
    "cosine": lambda optimizer: O.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5),
    "lambda": lambda optimizer: O.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    # moves betas too
    "one_cycle": lambda optimizer: O.lr_scheduler.OneCycleLR(
        optimizer, 0.05, total_steps=STEPS + 1
    ),
    "cyclic": lambda optimizer: O.lr_scheduler.CyclicLR(
        optimizer, 0.001, 0.01, step_size_up=4, cycle_momentum=False
    ),
    "sequential": lambda optimizer: O.lr_scheduler.SequentialLR(
        optimizer,
        [O.lr_scheduler.ConstantLR(optimizer), O.lr_scheduler.ExponentialLR(optimizer, 0.9)],
        [5],
    ),
}


@crossed("equalities", name=SCHEDULES, path=[eager, program])
def test_the_schedule_that_runs_is_the_users(servers: Servers, name: str, path: Any) -> None:
    """Every step carries the whole row of hyper-parameters."""
    reference = net()

    model = path(
        servers(2),
        lambda parameters: O.Adam(parameters, lr=0.01),
        batches(),
        schedule=SCHEDULES[name],
    )

    assert_equal(
        model,
        alone(
            reference, O.Adam(reference.parameters(), lr=0.01), batches(), schedule=SCHEDULES[name]
        ),
    )


@pytest.mark.parametrize("count", [1, 3])
def test_async_with_one_trainer_equals_plain_torch(servers: Servers, count: int) -> None:
    """A step waits for its own result: the argument of transpile decides, and both sides agree."""
    reference = alone(net_ := net(), O.Adam(net_.parameters(), lr=0.01), batches())
    strategy, config = DistributedStrategy(), DistributeTranspilerConfig()
    strategy.a_sync, strategy.a_sync_configs, config.sync_mode = True, {"send_queue_size": 1}, False

    assert_equal(
        eager(servers(count), lambda p: O.Adam(p, lr=0.01), batches(), strategy=strategy), reference
    )
    assert_equal(
        program(servers(count), lambda p: O.Adam(p, lr=0.01), batches(), config=config), reference
    )


def cluster(endpoints: str, trainers: int, make: Any, data: Any, **kinds: Any) -> list[nn.Module]:
    """Every trainer of a sync job of programs, each with its part of every batch."""
    size = data[0][0].shape[0] // trainers
    parts = [
        [(x[i * size : (i + 1) * size], y[i * size : (i + 1) * size]) for x, y in data]
        for i in range(trainers)
    ]
    jobs = [Prepared(endpoints, make, parts[i][0], i, trainers, **kinds) for i in range(trainers)]

    def run(number: int) -> nn.Module:
        torch.set_num_threads(1)
        return jobs[number].train(parts[number])

    with ThreadPoolExecutor(trainers) as pool:
        return [
            future.result(timeout=100)
            for future in [pool.submit(run, number) for number in range(trainers)]
        ]


def distance(model: nn.Module, reference: nn.Module) -> float:
    """||difference|| / ||parameters||"""
    mine, theirs = (
        torch.cat([p.detach().reshape(-1).double() for p in m.parameters()])
        for m in (model, reference)
    )
    return float((mine - theirs).norm() / theirs.norm())


@crossed("equalities", kind=[None, *CLIPS], trainers=[2, 4], count=[1, 2, 3])
def test_several_trainers_equal_the_concatenated_batch(
    servers: Servers, trainers: int, count: int, kind: str | None
) -> None:
    """2 and 4 trainers in sync mode: within 1e-6 of single-node training, bit-equal to one another
    and from run to run.
    """
    ours, theirs = CLIPS[kind] if kind else (None, None)
    data = batches(size=16)
    reference = alone(
        net_ := net(), O.SGD(net_.parameters(), lr=0.1, momentum=0.9), data, clip=theirs
    )

    def run() -> list[nn.Module]:
        return cluster(
            servers(count), trainers, lambda p: O.SGD(p, lr=0.1, momentum=0.9), data, grad_clip=ours
        )

    models = run()
    for model in models:
        assert distance(model, reference) <= 1e-6
        assert_equal(model, models[0])
    assert_equal(run()[0], models[0])


def test_size_balanced_slices_train_the_same(servers: Servers) -> None:
    """Where a slice lives changes no number."""
    config = DistributeTranspilerConfig()
    config.split_method, config.min_block_size = SizeBalanced, 100
    reference = alone(net_ := net(), O.Adam(net_.parameters(), lr=0.01), batches())

    assert_equal(
        program(servers(3), lambda p: O.Adam(p, lr=0.01), batches(), config=config), reference
    )
