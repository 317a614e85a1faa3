"""Every mode of DistributeTranspilerConfig on the program path: captured, transpiled, run against
real servers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.script_writes import WRITES
from trainer import Executor
from transpiler import DistributeTranspiler, DistributeTranspilerConfig, capture
from transpiler.program import Program

Servers = Callable[[int], str]

CONFIGS: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"sync_mode": False},
    "half-async": {"sync_mode": False, "half_async": True},
    "geo": {"sync_mode": False, "geo_sgd_mode": True, "geo_sgd_need_push_nums": 3},
    "geo, split at run time": {
        "geo_sgd_mode": True,
        "geo_sgd_need_push_nums": 3,
        "runtime_split_send_recv": True,
    },
    "delay-compensated": {"sync_mode": False, "enable_dc_asgd": True},
    "sync through the communicator": {"sync_mode": False, "completely_not_async": True},
    "split at run time": {"sync_mode": False, "runtime_split_send_recv": True},
    "split at run time, half-async": {
        "sync_mode": False,
        "runtime_split_send_recv": True,
        "half_async": True,
    },
}


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 4))


def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y)


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 8, generator=generator), torch.randn(4, 4, generator=generator))
        for _ in range(count)
    ]


def transpiled(
    model: nn.Module, optimizer: torch.optim.Optimizer, endpoints: str, fields: dict[str, Any]
) -> DistributeTranspiler:
    main, startup = capture(model, step, optimizer, batches(1)[0])
    config = DistributeTranspilerConfig()
    config.min_block_size = 16
    for name, value in fields.items():
        setattr(config, name, value)
    transpiler = DistributeTranspiler(config)
    transpiler.transpile(0, main, pservers=endpoints, trainers=1, startup_program=startup)
    return transpiler


def types(program: Program) -> list[str]:
    return [op.type for op in program.main.ops]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_mode_of_the_configuration_trains_as_plain_torch_with_one_trainer(
    servers: Servers, name: str
) -> None:
    """Slices on two servers, a schedule, 10 steps: equal to the bit."""
    mine, reference = net(), net()
    optimizer, plain = (
        torch.optim.Adam(model.parameters(), lr=0.01) for model in (mine, reference)
    )
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (optimizer, plain)]
    transpiler = transpiled(mine, optimizer, servers(2), CONFIGS[name])
    with Executor() as exe:
        exe.run(transpiler.get_startup_program())
        for x, y in batches(10):
            exe.run(transpiler.get_trainer_program(), feed=(x, y))
            plain.zero_grad()
            step(reference, x, y).backward()
            plain.step()
            for schedule in schedules:
                schedule.step()

    for one, other in zip(mine.parameters(), reference.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("write", ["load_state_dict", "clamp", "data_multiply", "rebind"])
@pytest.mark.parametrize("name", CONFIGS)
def test_what_a_script_writes_between_two_runs_takes_effect(
    servers: Servers, name: str, write: str
) -> None:
    """The next run computes with it, and the servers go on from there."""
    mine, reference = net(), net()
    optimizer, plain = (
        torch.optim.Adam(model.parameters(), lr=0.01) for model in (mine, reference)
    )
    transpiler = transpiled(mine, optimizer, servers(2), CONFIGS[name])
    with Executor() as exe:
        exe.run(transpiler.get_startup_program())
        for number, (x, y) in enumerate(batches(8)):
            if number in (3, 6):
                WRITES[write](mine, number)
                WRITES[write](reference, number)
            exe.run(transpiler.get_trainer_program(), feed=(x, y))
            plain.zero_grad()
            step(reference, x, y).backward()
            plain.step()

    for one, other in zip(mine.parameters(), reference.parameters(), strict=True):
        assert torch.equal(one, other)


def test_runtime_split_send_recv_has_no_split_or_concat_op(servers: Servers) -> None:
    """The communicator splits; the program does not."""
    model = net()
    endpoints = servers(2)
    for name in ("split at run time", "geo, split at run time"):
        made = transpiled(
            model, torch.optim.SGD(model.parameters(), lr=0.1), endpoints, CONFIGS[name]
        )
        found = {*types(made.get_trainer_program()), *types(made.get_startup_program())}

        assert not {"split", "concat"} & found
        assert {"send", "recv"} <= found
