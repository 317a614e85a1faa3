"""recompute in programs: backward computes again what lies between checkpoints."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trainer import Executor
from transpiler import (
    DistributedStrategy,
    DistributeTranspiler,
    DistributeTranspilerConfig,
    capture,
    name,
    program_guard,
)
from transpiler.ir.effects import Aliases
from transpiler.ir.graph import PERSISTENT
from transpiler.ir.schema import DTYPES
from transpiler.program import Program
from transpiler.rewrites.pipeline import rewritten
from transpiler.rewrites.rewrites import Programs

ROWS = 256


class Net(nn.Module):
    """Four blocks with dropout and batch norm; each one's output has a name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)
            )
            for _ in range(4)
        )
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.25)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = name(x + self.drop(block(x)), f"block{number}")
            if number == 1:
                x = self.norm(x)
        return self.last(x)


def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(ROWS, 8, generator=generator),
        torch.randint(0, 3, (ROWS,), generator=generator),
    )


def captured() -> tuple[nn.Module, Programs]:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with program_guard(Program(()), Program(())):
        return model, Programs(*capture(model, step, optimizer, batch(0)))


@cache
def shared() -> Programs:
    """For what looks at programs, and does not compare values."""
    return captured()[1]


def asked(*checkpoints: str) -> DistributedStrategy:
    strategy = DistributedStrategy()
    strategy.recompute = True
    strategy.recompute_configs = {"checkpoints": list(checkpoints)}
    return strategy


EVERY = tuple(f"block{number}" for number in range(4))


def peak(program: Program) -> int:
    """The most bytes that the program's temporaries hold at a time: a variable lives from the op
    that makes it to its last use, and views share memory.
    """
    block = program.main
    memory, size = Aliases(block.ops), dict[str, int]()
    held = {memory.of(v.name) for v in block.variables.values() if v.role in PERSISTENT}
    last: dict[str, int] = {}
    for index, op in enumerate(block.ops):
        last |= {memory.of(each): index for each in (*op.inputs, *op.outputs) if each}
    live, most, now = set[str](), 0, 0
    for index, op in enumerate(block.ops):
        for each in filter(None, op.outputs):
            root = memory.of(each)
            if root not in live and root not in held and each in block.variables:
                live.add(root)
                size[root] = _bytes(block.variables[each])
                now += size[root]
        most = max(most, now)
        for root in [root for root in live if last[root] == index]:
            live.discard(root)
            now -= size[root]
    return most


def _bytes(variable: Any) -> int:
    if variable.dtype not in DTYPES:
        return 0
    sizes = [each if isinstance(each, int) else ROWS for each in variable.shape]
    return int(torch.Size(sizes).numel()) * DTYPES[variable.dtype].itemsize


def trained(program: Programs, model: nn.Module) -> tuple[Mapping[str, torch.Tensor], list[float]]:
    torch.manual_seed(11)
    with Executor() as executor:
        executor.run(program.startup)
        losses = [
            executor.run(program.main, feed=batch(number), fetch_list=["loss"])[0].item()
            for number in range(3)
        ]
    return model.state_dict(), losses


@pytest.mark.observes("recompute", "recompute_configs.checkpoints")
def test_results_are_equal_to_the_bit_and_memory_falls() -> None:
    """Dropout, batch norm's statistics and losses are the same; temporaries take half the bytes or
    less.
    """
    model, plain = captured()
    other, again = captured()
    made = rewritten(again, asked(*EVERY))

    state, losses = trained(made, other)
    expected, same = trained(plain, model)
    assert losses == same
    assert all(torch.equal(state[key], value) for key, value in expected.items())
    assert peak(made.main) <= peak(plain.main) / 2


@pytest.mark.observes("recompute")
def test_memory_falls_at_run() -> None:
    """What the allocator has at most, as torch's profiler counts it."""

    def most(programs: Programs) -> int:
        with Executor() as executor:
            executor.run(programs.startup)
            executor.run(programs.main, feed=batch(1))  # makes the optimizer's states
            with torch.profiler.profile(profile_memory=True) as profile:
                executor.run(programs.main, feed=batch(2))
        held = most = 0
        for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
            if event.name() == "[memory]":
                held += event.nbytes()
                most = max(most, held)
        return most

    assert most(rewritten(shared(), asked(*EVERY))) < 0.7 * most(shared())


def test_random_and_changing_ops_run_once() -> None:
    """Of every other op between the checkpoints that backward reads there is a copy."""
    plain = shared()
    made = rewritten(plain, asked(*EVERY)).main.main
    kinds = [op.type for op in made.ops]
    before = [op.type for op in plain.main.main.ops]
    for kind in ("aten.bernoulli_.float", "aten._native_batch_norm_legit"):
        assert kinds.count(kind) == before.count(kind) > 0
    copies = [op for op in made.ops if any(each.endswith("@RECOMPUTE") for each in op.outputs)]

    assert {op.type for op in copies} >= {"aten.tanh", "aten.addmm"}
    assert len(made.ops) == len(plain.main.main.ops) + len(copies)


def test_what_is_made_prints_saves_and_is_cut(tmp_path: Path) -> None:
    """It is an ordinary program: text, picture, file, message, and both kinds of clusters."""
    plain = shared()
    made = rewritten(plain, asked("block1", "block3"))
    assert "@RECOMPUTE" in str(made.main)
    made.main.draw(tmp_path / "x.svg")
    made.main.save(tmp_path / "x.program")
    assert Program.load(tmp_path / "x.program").fingerprint() == made.main.fingerprint()
    trainers = "127.0.0.1:6174,127.0.0.1:6175"
    for settings, given in (
        ({}, {"trainers": 2}),
        ({"mode": "collective", "collective_mode": "grad_allreduce"}, {"trainers": trainers}),
    ):
        transpiler = DistributeTranspiler(DistributeTranspilerConfig(**settings))
        transpiler.transpile(
            0, plain.main, startup_program=plain.startup, strategy=asked("block1"), **given
        )
        assert "@RECOMPUTE" in str(transpiler.get_trainer_program())
    assert "@RECOMPUTE" not in str(made.main.clone(for_test=True))


@pytest.mark.processes
def test_every_process_makes_the_same_program() -> None:
    """Whatever its hash seed: a server and its trainers compare fingerprints."""
    found = rewritten(shared(), asked("block1", "block2")).main.fingerprint()
    code = (
        "from tests.transpiler.rewrites import test_recompute_programs as t; "
        "print(t.rewritten(t.shared(), t.asked('block1', 'block2')).main.fingerprint())"
    )
    other = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert other.stdout.splitlines()[-1] == found


def test_a_name_of_nothing_is_refused() -> None:
    """The message has close names."""
    with pytest.raises(ValueError, match=r"got 'blok1'; close names: block1"):
        rewritten(shared(), asked("blok1"))


def test_a_program_does_not_offload() -> None:
    """It acts in scripts; the refusal says where."""
    strategy = asked("block1")
    strategy.recompute_configs = {"checkpoints": ["block1"], "enable_offload": True}
    with pytest.raises(ValueError, match="enable_offload: acts only in a job with parameter serv"):
        DistributeTranspiler().transpile(0, shared().main, strategy=strategy)
