"""``lars``, ``lamb`` and ``adam_d2sum``: the rule that steps is the one written out, wherever."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.eager_jobs import Servers, joined
from tests.support.replaced_rules import (
    SWITCHES,
    assert_close,
    batches,
    net,
    optimizer_of,
    reference,
    schedule_of,
    step,
    strategy_of,
)
from tests.support.table_trainers import Trainer
from tests.support.threads import at_once
from trainer import fleet
from trainer.collective.world import leave_parallel_env
from transpiler import LAMB, LARS, DistributedStrategy


def train(model: nn.Module, optimizer: Any, schedule: Any, data: Any) -> None:
    for x, y in data:
        optimizer.zero_grad()
        step(model, x, y).backward()
        optimizer.step()
        optimizer.flush()
        schedule.step()


def of(switch: str) -> nn.Module:
    return reference(switch, [[batch] for batch in batches()])


@pytest.mark.observes(
    "lars",
    "lamb",
    "adam_d2sum",
    "lars_configs.lars_coeff",
    "lars_configs.lars_weight_decay",
    "lars_configs.epsilon",
    "lars_configs.exclude_from_weight_decay",
    "lamb_configs.lamb_weight_decay",
    "lamb_configs.exclude_from_weight_decay",
)
@pytest.mark.parametrize("switch", SWITCHES)
def test_alone_it_is_the_rule_written_out(switch: str, caplog: pytest.LogCaptureFixture) -> None:
    """20 steps in one process, with a scheduler that was made for the script's own optimizer; what
    is excluded is said.
    """
    model = net()
    given = optimizer_of(switch, model)
    schedule = schedule_of(given)
    fleet.init(strategy=strategy_of(switch))
    fleet.distributed_model(model)
    with caplog.at_level(logging.INFO, "transpiler"):
        optimizer = fleet.distributed_optimizer(given)
    train(model, optimizer, schedule, batches())

    assert_close(model, of(switch))
    said = "2.weight, 2.bias" if SWITCHES[switch] else "nothing"
    assert f"strategy.{switch}: " in caplog.text and said in caplog.text


def test_a_pattern_that_excludes_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Its name, and not that of the one beside it."""
    strategy = DistributedStrategy()
    strategy.lamb = True
    strategy.lamb_configs = {"exclude_from_weight_decay": ["nrom", "2.weight"]}
    model = net()
    fleet.init(strategy=strategy)
    fleet.distributed_model(model)
    fleet.distributed_optimizer(optimizer_of("lamb", model))
    (said,) = [each.getMessage() for each in caplog.records if "weight_decay'" in each.getMessage()]
    assert "lamb_configs['exclude_from_weight_decay']: 'nrom': no name of this" in said


MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"send_queue_size": 1},
    "half-async": {"half_async": True},
    "geo": {"k_steps": 1},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("switch", SWITCHES)
def test_on_servers_it_is_the_same(servers: Servers, switch: str, mode: str) -> None:
    """Two servers; a tensor whose norm counts is whole on one of them.  The scheduler was made for
    what fleet returned.
    """
    model = net()
    optimizer = joined(
        servers(2), model, optimizer_of(switch, model), strategy=strategy_of(switch, **MODES[mode])
    )
    slices = optimizer.communicator.plan.placement("0.weight").slices
    train(model, optimizer, schedule_of(optimizer), batches())
    fleet.finish()

    assert_close(model, of(switch))
    whole = switch != "adam_d2sum" and mode != "geo"
    assert len(slices) == (1 if whole else 2)


@pytest.mark.parametrize("switch", SWITCHES)
def test_two_trainers_of_a_sync_job_step_by_the_mean(servers: Servers, switch: str) -> None:
    """The norms are those of the merged gradient."""
    endpoints, data = servers(2), [batches(seed=7), batches(seed=8)]
    models = [net(), net()]  # they draw from the generator that all threads share

    def play(number: int) -> nn.Module:
        model = models[number]
        given = optimizer_of(switch, model)
        made = Trainer(endpoints, number, 2, model, lambda _: given, modes={"*": "sync"})
        train(model, made.optimizer, schedule_of(made.optimizer), data[number])
        made.job.finish()
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "tests.support.table_trainers.DistributedStrategy", lambda: strategy_of(switch)
        )
        first, second = at_once(*(lambda n=n: play(n) for n in range(2)))

    expected = reference(switch, [list(row) for row in zip(*data, strict=True)])
    assert_close(first, expected)
    assert_close(second, expected)


@pytest.mark.parametrize("switch", SWITCHES)
def test_without_servers_it_is_the_same(switch: str) -> None:
    """A collective job of one trainer."""
    model = net()
    fleet.init(is_collective=True)
    fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(
        optimizer_of(switch, model), strategy=strategy_of(switch)
    )
    train(model, optimizer, schedule_of(optimizer), batches())
    fleet.finish()
    leave_parallel_env("the test has ended")

    assert_close(model, of(switch))


def test_groups_of_a_script_stay_its_own() -> None:
    """Two groups with rates of their own; what is excluded from one of them follows its rate."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    given = torch.optim.SGD(
        [
            {"params": model[0].parameters()},
            {"params": model[1].parameters(), "lr": 0.5},
        ],
        lr=0.1,
        momentum=0.9,
    )
    fleet.init(strategy=strategy_of("lars"))
    fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(given)
    for group in given.param_groups[:2]:
        group["lr"] *= 2

    assert isinstance(optimizer.inner, LARS)
    assert optimizer.param_groups is given.param_groups
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.inner.param_groups] == [
        (0.2, 0.003),
        (1.0, 0.003),
        (0.2, 0.0),
        (1.0, 0.0),
    ]


REFUSED: dict[str, tuple[str, Any, str]] = {
    "lars for Adam": ("lars", torch.optim.Adam, "SGD with momentum, which LARS replaces, got Adam"),
    "lars for SGD": ("lars", torch.optim.SGD, "got SGD without momentum"),
    "lamb for AdamW": ("lamb", torch.optim.AdamW, "torch.optim.Adam, which LAMB replaces"),
    "adam_d2sum for SGD": ("adam_d2sum", torch.optim.SGD, "AdamD2Sum replaces, got SGD"),
    "decay": (
        "lars",
        lambda p: torch.optim.SGD(p, momentum=0.9, weight_decay=0.1),
        "lars_configs\\['lars_weight_decay'\\]",
    ),
    "betas": (
        "adam_d2sum",
        lambda p: torch.optim.Adam(p, betas=(0.8, 0.99)),
        "betas: expected \\(0.9, 0.999\\), because AdamD2Sum does not read it",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_another_optimizer_is_refused(case: str) -> None:
    """Nothing that the script said is dropped in silence."""
    switch, made, words = REFUSED[case]
    model = net()
    fleet.init(strategy=strategy_of(switch))
    fleet.distributed_model(model)

    with pytest.raises(ValueError, match=words):
        fleet.distributed_optimizer(made(model.parameters()))


def test_two_of_them_exclude_each_other() -> None:
    """Both are named, and a configuration whose switch is off."""
    strategy = DistributedStrategy()
    strategy.lars = strategy.lamb = True
    with pytest.raises(ValueError, match="strategy.lars and strategy.lamb: each replaces"):
        fleet.init(strategy=strategy)
    strategy.lars, strategy.adam_d2sum = False, True
    strategy.lars_configs = {"epsilon": 1.0}
    with pytest.raises(ValueError, match="strategy.lamb and strategy.adam_d2sum") as raised:
        fleet.init(strategy=strategy)
    assert "lars_configs.epsilon: has no effect without lars=True" in str(raised.value)


@pytest.mark.parametrize("cls", [LARS, LAMB])
def test_as_a_class_it_is_an_optimizer_of_torch(cls: Any) -> None:
    """Groups, a closure and state_dict; a copy goes on alike."""
    model, other = nn.Linear(4, 2), nn.Linear(4, 2)
    x = torch.randn(16, 4)
    optimizer = cls([{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.0}])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    other.load_state_dict(model.state_dict())
    again = cls([{"params": [other.weight]}, {"params": [other.bias]}])
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert again.param_groups[1]["weight_decay"] == 0.0
    optimizer.step(closure)
    (other(x) - 1).square().mean().backward()
    again.step()

    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("switch", ["lars", "lamb"])
def test_a_checkpoint_goes_on(servers: Servers, tmp_path: Path, switch: str) -> None:
    """Saved on two servers, read on one, with a scheduler of the script's own optimizer."""

    def begun(count: int) -> tuple[nn.Module, Any, Any]:
        model = net()
        given = optimizer_of(switch, model)
        schedule = schedule_of(given)
        return model, joined(servers(count), model, given, strategy=strategy_of(switch)), schedule

    model, optimizer, schedule = begun(2)
    train(model, optimizer, schedule, batches()[:9])
    fleet.save(str(tmp_path / "saved"), schedule)
    fleet.finish()
    model, optimizer, schedule = begun(1)
    fleet.load(str(tmp_path / "saved"), schedule)
    train(model, optimizer, schedule, batches()[9:])
    fleet.finish()

    assert_close(model, of(switch))


def test_a_state_dict_goes_on() -> None:
    """It is read into the groups that the scheduler moves."""
    states: list[Any] = []
    for data in (batches()[:9], batches()[9:]):
        model = net()
        given = optimizer_of("lars", model)
        schedule = schedule_of(given)
        fleet.init(strategy=strategy_of("lars"))
        fleet.distributed_model(model)
        optimizer = fleet.distributed_optimizer(given)
        for state, each in zip(states, (model, optimizer, schedule), strict=False):
            each.load_state_dict(state)
        train(model, optimizer, schedule, data)
        states = [copy.deepcopy(each.state_dict()) for each in (model, optimizer, schedule)]
        fleet.finish()

    assert_close(model, of("lars"))


PAGES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "000": (
        "lars",
        {
            "lars_coeff": 0.01,
            "lars_weight_decay": 0.0005,
            "epsilon": 0,
            "exclude_from_weight_decay": ["batch_norm", ".b_0"],
        },
        ["0.bias", "2.bias", "2.weight", "3.bias"],
    ),
    "001": (
        "lars",
        {
            "lars_coeff": 0.001,
            "lars_weight_decay": 0.0005,
            "epsilon": 0,
            "exclude_from_weight_decay": ["batch_norm", ".b"],
        },
        ["0.bias", "2.bias", "2.weight", "3.bias"],
    ),
    "lamb": ("lamb", {"lamb_weight_decay": 0.01, "exclude_from_weight_decay": []}, []),
    "by name": ("lamb", {"exclude_from_weight_decay": ["3.w", "linear"]}, ["0.bias", "0.weight"]),
}


@pytest.mark.parametrize("page", PAGES)
def test_examples_of_the_pages_run(page: str) -> None:
    """What they exclude, and a step."""
    switch, configs, excluded = PAGES[page]
    strategy, model = DistributedStrategy(), net()
    setattr(strategy, switch, True)
    setattr(strategy, f"{switch}_configs", configs)
    fleet.init(strategy=strategy)
    fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(optimizer_of(switch, model))
    train(model, optimizer, schedule_of(optimizer), batches(1))
    found = sorted(
        optimizer.names[parameter]
        for group in optimizer.inner.param_groups
        for parameter in group["params"]
        if group["weight_decay"] == 0
    )

    assert found == (excluded if page != "by name" else [*excluded, "3.bias", "3.weight"])
