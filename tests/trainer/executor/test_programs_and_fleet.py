"""A program and an eager script of the same settings: one plan, the same frames and values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.eager_jobs import Servers, batches, joined
from tests.support.eager_modes import OUTER_SGD, adam, assert_equal, net, strategy_of
from tests.support.recorded_frames import recording
from trainer import Executor, fleet
from transpiler import (
    DistributedStrategy,
    DistributeTranspiler,
    DistributeTranspilerConfig,
    capture,
)
from transpiler.distribute_config import LANE_FIELDS
from transpiler.plan.plan import Plan

OUTER = {"type": "nesterov", "lr": 0.7, "momentum": 0.9}
QUEUE = {"send_queue_size": 8, "max_merge_var_num": 2}
# the keys of a strategy, and whether a trainer that flushes after each step equals plain torch
MODES: dict[str, tuple[dict[str, Any], bool]] = {
    "sync": ({"a_sync": False}, True),
    "async, one slot": ({"send_queue_size": 1}, True),
    "async, a queue": ({**QUEUE, "soft_wait_ms": 7}, True),
    "async, the mean of merged steps": ({**QUEUE, "merge": "mean", "send_wait_times": 0}, True),
    "async, a receiving thread": ({**QUEUE, "independent_recv_thread": True}, True),
    "async, two servers at a time": ({"thread_pool_size": 2, "nonfinite": "stop"}, True),
    "async, split at run time": ({**QUEUE, "runtime_split_send_recv": True}, True),
    "half-async": ({"half_async": True, "max_merge_var_num": 2}, False),
    "bounded staleness": ({"staleness": 3}, True),
    "delay compensation": ({"dc_asgd": 0.5}, True),
    "geo": ({"k_steps": 3}, True),
    "diloco": ({"k_steps": 3, "outer_optimizer": OUTER}, False),
    "diloco of plain steps": ({"k_steps": 3, "outer_optimizer": OUTER_SGD}, True),
    "three modes": (
        {"modes": {"0.weight": "geo", "0.*": "async", "*": "sync"}, "k_steps": 2, **QUEUE},
        True,
    ),
    "collective beside sync": ({"modes": {"2.*": "collective", "*": "sync"}}, True),
    "collective beside async": (
        {"modes": {"0.*": "async", "*": "collective"}, "send_queue_size": 4},
        True,
    ),
    "collective beside geo": ({"modes": {"0.*": "geo", "*": "collective"}, "k_steps": 2}, True),
    "two modes": (
        {
            "modes": {"0.*": "half_async", "*": "diloco"},
            "k_steps": 2,
            "outer_optimizer": OUTER_SGD,
            "overlap": True,
        },
        True,
    ),
}


def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def strategy_in(mode: str) -> DistributedStrategy:
    configs = dict(MODES[mode][0])
    a_sync = configs.pop("a_sync", True)
    strategy = strategy_of(**configs)
    strategy.a_sync = a_sync
    return strategy


def by_program(
    endpoints: str, model: nn.Module, optimizer: torch.optim.Optimizer, mode: str, count: int
) -> Plan:
    """Trains a captured program; its plan."""
    main, startup = capture(model, step, optimizer, batches(1)[0])
    transpiler = DistributeTranspiler()
    transpiler.transpile(
        0, main, pservers=endpoints, startup_program=startup, strategy=strategy_in(mode)
    )
    program = transpiler.get_trainer_program()
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with Executor() as exe:
        exe.run(transpiler.get_startup_program())
        for x, y in batches(count):
            exe.run(program, feed=(x, y))
            exe.flush()
            schedule.step()
    assert program.deployment is not None
    return program.deployment.plan


def by_script(
    endpoints: str, model: nn.Module, optimizer: torch.optim.Optimizer, mode: str, count: int
) -> Plan:
    """Trains eagerly; its plan."""
    distributed = joined(endpoints, model, optimizer, strategy=strategy_in(mode))
    schedule = torch.optim.lr_scheduler.ExponentialLR(distributed, 0.9)
    for x, y in batches(count):
        distributed.zero_grad()
        step(model, x, y).backward()
        distributed.step()
        distributed.flush()
        schedule.step()
    plan: Plan = distributed.communicator.plan
    fleet.finish()
    return plan


def facts(plan: Plan) -> dict[str, str]:
    """The plan's facts but for the graph, which an eager script has not."""
    return {key: value for key, value in plan.manifest().items() if key != "graph"}


@pytest.mark.parametrize("mode", MODES)
def test_a_program_and_a_script_have_one_plan_and_say_the_same(servers: Servers, mode: str) -> None:
    """Their plans' facts are equal, every byte of every step, and what is trained; with one trainer
    it equals plain torch to the bit where it waits for its results.
    """
    models, said, plans = [net(), net()], [], []
    for train, model in zip((by_program, by_script), models, strict=True):
        with recording() as recorded:
            plans.append(facts(train(servers(2), model, adam(model), mode, 6)))
        said.append(recorded.of_steps())

    assert plans[0] == plans[1]
    assert said[0] and said[0] == said[1]
    assert_equal(*models)
    if MODES[mode][1]:
        plain = net()
        optimizer = adam(plain)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for x, y in batches(6):
            optimizer.zero_grad()
            step(plain, x, y).backward()
            optimizer.step()
            schedule.step()
        assert_equal(models[0], plain)


@pytest.mark.parametrize("mode", MODES)
def test_the_keys_on_the_configuration_lead_to_the_plan_of_the_strategy(mode: str) -> None:
    """Every key of a strategy is a field of the configuration, with the same meaning."""
    configs = dict(MODES[mode][0])
    sync = not configs.pop("a_sync", True)
    model = net()
    main, startup = capture(model, step, adam(model), batches(1)[0])
    by_strategy = DistributeTranspiler()
    by_strategy.transpile(0, main, startup_program=startup, strategy=strategy_in(mode))
    deployment = by_strategy.get_trainer_program().deployment
    assert deployment is not None
    read = any(lane.mode in ("async", "geo") for lane in deployment.plan.lanes)
    fields = {**({"send_queue_size": 16} if read else {}), **configs}  # without a strategy it is 1
    config = DistributeTranspilerConfig(**fields, sync_mode=sync)
    by_fields = DistributeTranspiler(config)
    by_fields.transpile(0, main, startup_program=startup)

    assert set(configs) <= set(LANE_FIELDS)
    assert by_fields.get_trainer_program() == by_strategy.get_trainer_program()
    assert by_fields.get_startup_program() == by_strategy.get_startup_program()
