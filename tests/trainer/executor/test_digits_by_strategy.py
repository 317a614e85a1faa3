"""The pages' strategies for running and building programs, as jobs of two trainers on digits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from tests.support.collective_trainers import GRAD, fine, ports, together
from tests.support.eager_jobs import Servers
from tests.support.tiers import RARE
from trainer import Executor
from transpiler import (
    BuildStrategy,
    DistributedStrategy,
    DistributeTranspiler,
    DistributeTranspilerConfig,
    ExecutionStrategy,
    Program,
    capture,
    program_guard,
)

STEPS, BATCH = 10, 32  # of one run; samples of a trainer's step


def digits() -> tuple[Tensor, Tensor]:
    data = load_digits()
    return torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)


def made() -> tuple[nn.Module, Program, Program]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    x, y = digits()
    with program_guard(Program(()), Program(())):
        main, startup = capture(
            model, lambda model, x, y: F.cross_entropy(model(x), y), adam, (x[:BATCH], y[:BATCH])
        )
    return model, main, startup


def asked(path: Path, servers: bool) -> DistributedStrategy:
    """As on the page, without what asks for a C++ compiler."""
    run, build = ExecutionStrategy(), BuildStrategy()
    run.num_threads = 1
    run.num_iteration_per_drop_scope = 2
    run.num_iteration_per_run = STEPS
    build.fuse_all_optimizer_ops = build.enable_inplace = True
    build.fuse_broadcast_ops = build.enable_sequential_execution = not servers
    strategy = DistributedStrategy()
    strategy.a_sync = False
    strategy.execution_strategy, strategy.build_strategy = run, build
    strategy.trainer_desc_configs = {"dump_fields_path": str(path), "stat_var_names": ["loss"]}
    return strategy


@pytest.mark.parametrize(
    "with_servers",  # tests/cluster/test_examples.py stands for programs with servers
    [pytest.param(False, id="collective"), RARE(True, id="2 servers")],
)
def test_two_trainers_learn_digits(tmp_path: Path, servers: Servers, with_servers: bool) -> None:
    """Runs of ten steps each, to 85% of all digits; both trainers have dumped each step's loss."""
    x, y = digits()
    endpoints = servers(2) if with_servers else ",".join(ports(2))
    trainers = [made(), made()]  # one after the other, for they draw from one generator

    def train(rank: int) -> float:
        model, main, startup = trainers[rank]
        strategy = asked(tmp_path, with_servers)
        if with_servers:
            transpiler = DistributeTranspiler()
            transpiler.transpile(
                rank, main, endpoints, 2, startup_program=startup, strategy=strategy
            )
        else:
            transpiler = DistributeTranspiler(DistributeTranspilerConfig(**GRAD))
            own = endpoints.split(",")[rank]
            transpiler.transpile(
                rank, main, trainers=endpoints, startup_program=startup, current_endpoint=own,
                strategy=strategy,
            )  # fmt: skip
        program: Any = transpiler.get_trainer_program()
        with Executor() as executor:
            executor.run(transpiler.get_startup_program())
            for first in range(8):
                order = [(first * STEPS + step) * 2 + rank for step in range(STEPS)]
                places = [torch.arange(BATCH).add(each * BATCH) % len(x) for each in order]
                executor.run(program, [(x[place], y[place]) for place in places])
        return float((model(x).argmax(1) == y).float().mean())

    assert min(fine(together(2, train))) > 0.85
    for rank in range(2):
        files = sorted((tmp_path / f"trainer-{rank}").iterdir())
        losses = [json.loads(file.read_text())["mean"] for file in files]
        assert len(losses) == 8 * STEPS and losses[-1] < losses[0] / 2
