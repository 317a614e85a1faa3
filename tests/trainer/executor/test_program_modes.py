"""Every mode of DistributeTranspilerConfig on the program path: captured, transpiled, run against
real servers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

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
