"""Checkpoints of programs that came from a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.registered_rules import Lion
from trainer import Executor
from transpiler import capture
from transpiler.program import Program

RULES = {
    "adam": lambda model: torch.optim.Adam(
        [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.2}], lr=0.1
    ),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.1),
    "registered": lambda model: Lion(model.parameters()),
}


def captured(rule: str) -> tuple[nn.Module, Program]:
    torch.manual_seed(4)
    model = nn.Linear(5, 3)

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.softplus(model(x)).sum()

    program, _ = capture(model, step, RULES[rule](model), (torch.ones(2, 5),))
    return model, program


def fed(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 5, generator=generator) for _ in range(count)]


def values(program: Program) -> list[torch.Tensor]:
    assert program.storage is not None
    return [program.storage.tensors[name].detach().clone() for name in ("weight", "bias")]


@pytest.mark.parametrize("rule", RULES)
def test_a_loaded_program_saves_and_goes_on(tmp_path: Path, rule: str) -> None:
    """To the bit: in a loaded program that has run, in a fresh one, and in a captured one."""
    model, program = captured(rule)
    program.save(tmp_path / "program")
    data = fed(6)
    with Executor() as executor:
        for x in data:
            executor.run(program, (x,))
    expected = values(program)

    loaded = Program.load(tmp_path / "program")
    with Executor() as executor:
        for x in data[:3]:
            executor.run(loaded, (x,))
        executor.save(str(tmp_path / "at"), loaded)
        executor.run(loaded, (data[0],))
        assert executor.load(str(tmp_path / "at"), loaded) == 3
        for x in data[3:]:
            executor.run(loaded, (x,))
    for again in (Program.load(tmp_path / "program"), captured(rule)[1]):
        with Executor() as executor:
            assert executor.load(str(tmp_path / "at"), again) == 3
            for x in data[3:]:
                executor.run(again, (x,))
        for one, other, value in zip(values(again), values(loaded), expected, strict=True):
            assert torch.equal(one, value) and torch.equal(other, value)


def test_what_a_loaded_program_cannot_take_up(tmp_path: Path) -> None:
    """Another rate, and a scheduler; nothing is changed."""
    model, program = captured("adagrad")
    program.save(tmp_path / "program")
    loaded = Program.load(tmp_path / "program")
    assert program.storage is not None and program.storage.optimizer is not None
    optimizer = program.storage.optimizer
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    before = values(loaded)
    with Executor() as executor:
        executor.run(program, (fed(1)[0],))
        executor.save(str(tmp_path / "same"), program, schedule)
        schedule.step()
        executor.save(str(tmp_path / "halved"), program, schedule)
        with pytest.raises(ValueError, match="group 0, lr: the checkpoint has 0.005, and the ops"):
            executor.load(str(tmp_path / "halved"), loaded)
        with pytest.raises(ValueError, match="scheduler: expected none for a loaded program"):
            executor.load(str(tmp_path / "same"), loaded, schedule)

    assert all(map(torch.equal, before, values(loaded)))
