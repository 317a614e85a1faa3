"""Rules that users register, on servers: as in one process, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.eager_jobs import Servers, assert_same, joined
from tests.support.eager_modes import strategy_of
from tests.support.registered_rules import Lars, Lion
from trainer import Executor, fleet
from transpiler import DistributedStrategy, DistributeTranspiler, capture
from transpiler.plan.plan import Plan

Batch = tuple[torch.Tensor, torch.Tensor]
Rule = Callable[..., torch.optim.Optimizer]
RULES: dict[str, Rule] = {"Lion": Lion, "Lars": Lars}


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    """The first weight is cut into slices that end within a vector."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(301, 90), nn.Tanh(), nn.Linear(90, 3)).to(dtype)


def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def batches(count: int, dtype: torch.dtype = torch.float32) -> list[Batch]:
    generator = torch.Generator().manual_seed(7)
    return [
        (
            torch.randn(8, 301, generator=generator).to(dtype),
            torch.randint(0, 3, (8,), generator=generator),
        )
        for _ in range(count)
    ]


def eagerly(model: nn.Module, optimizer: Any, data: list[Batch], flush: bool = False) -> None:
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for x, y in data:
        optimizer.zero_grad()
        step(model, x, y).backward()
        optimizer.step()
        if flush:
            optimizer.flush()
        schedule.step()


def alone(rule: Rule, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    """Four steps in this process."""
    model = net(dtype)
    optimizer = rule(model.parameters())
    eagerly(model, optimizer, batches(4, dtype))
    return model, optimizer


def slices(plan: Plan) -> int:
    return len(plan.placement("0.weight").slices)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("name", RULES)
def test_servers_take_the_steps_of_one_process(servers: Servers, name: str, count: int) -> None:
    """Values and states, to the bit; a rule with norms keeps each parameter whole."""
    plain, reference = alone(RULES[name])
    model = net()
    optimizer = joined(servers(count), model, RULES[name](model.parameters()))

    eagerly(model, optimizer, batches(4))
    states = optimizer.state_dict()
    assert slices(optimizer.communicator.plan) == (1 if name == "Lars" else count)
    fleet.finish()

    assert_same(dict(model.state_dict()), dict(plain.state_dict()))
    assert_same(states["state"], reference.state_dict()["state"])


@pytest.mark.parametrize("name", RULES)
def test_a_program_takes_the_same_steps(servers: Servers, name: str) -> None:
    """The op has the rule's block; a saved and loaded program has it, too."""
    plain, _ = alone(RULES[name])
    model = net()
    optimizer = RULES[name](model.parameters())
    main, startup = capture(model, step, optimizer, batches(1)[0])
    assert f"registered.{name}(0.weight@GRAD, " in str(main)
    transpiler = DistributeTranspiler()
    transpiler.transpile(0, main, servers(2), 1, startup_program=startup)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    with Executor() as exe:
        exe.run(transpiler.get_startup_program())
        for batch in batches(4):
            exe.run(transpiler.get_trainer_program(), feed=batch)
            schedule.step()

    assert_same(dict(model.state_dict()), dict(plain.state_dict()))


def test_a_captured_program_runs_alone_and_from_a_file(tmp_path: Path) -> None:
    """The file holds the rule: a process that never registered it goes on."""
    plain, model = net(), net()
    optimizer = Lion(plain.parameters())
    for x, y in batches(3):
        optimizer.zero_grad()
        step(plain, x, y).backward()
        optimizer.step()
    main, startup = capture(model, step, Lion(model.parameters()), batches(1)[0])
    with Executor() as exe:
        exe.run(startup)
        exe.run(main, feed=batches(3)[0])
        main.save(str(tmp_path / "program"))
    loaded = type(main).load(str(tmp_path / "program"))
    assert loaded == main and loaded.storage is not None
    with Executor() as exe:
        for batch in batches(3)[1:]:
            exe.run(loaded, feed=batch)

    for name, value in plain.named_parameters():
        assert torch.equal(loaded.storage.tensors[name], value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(servers: Servers, dtype: torch.dtype) -> None:
    """A rule has no dtype of its own."""
    plain, _ = alone(Lion, dtype)
    model = net(dtype)
    eagerly(model, joined(servers(3), model, Lion(model.parameters())), batches(4, dtype))
    fleet.finish()

    assert_same(dict(model.state_dict()), dict(plain.state_dict()))


MODES: dict[str, dict[str, Any]] = {
    "async": {"send_queue_size": 4},
    "geo": {"k_steps": 1},
    "delay compensation": {"dc_asgd": 0.5},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", RULES)
def test_in_other_modes(servers: Servers, name: str, mode: str) -> None:
    """Servers that update by themselves, and trainers that do."""
    plain, _ = alone(RULES[name])
    model = net()
    strategy: DistributedStrategy = strategy_of(**MODES[mode])
    optimizer = joined(servers(2), model, RULES[name](model.parameters()), strategy=strategy)

    eagerly(model, optimizer, batches(4), flush=True)
    fleet.finish()

    assert_same(dict(model.state_dict()), dict(plain.state_dict()))


def test_states_come_back(servers: Servers, tmp_path: Path) -> None:
    """Saved on 2 servers, resumed on 3."""
    plain, _ = alone(Lion)
    model = net()
    optimizer = joined(servers(2), model, Lion(model.parameters()))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    data = batches(4)

    def trained(model: nn.Module, optimizer: Any, schedule: Any, data: list[Batch]) -> None:
        for x, y in data:
            optimizer.zero_grad()
            step(model, x, y).backward()
            optimizer.step()
            schedule.step()

    trained(model, optimizer, schedule, data[:2])
    fleet.save(str(tmp_path / "saved"), schedule)
    fleet.finish()

    other = net()
    optimizer = joined(servers(3), other, Lion(other.parameters()))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    assert fleet.load(str(tmp_path / "saved"), schedule) == 2
    trained(other, optimizer, schedule, data[2:])
    fleet.finish()

    assert_same(dict(other.state_dict()), dict(plain.state_dict()))
