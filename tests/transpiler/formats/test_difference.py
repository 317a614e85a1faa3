"""How two programs differ is told in words; what a program holds is found by name."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from torch import nn

from transpiler import (
    DistributeTranspiler,
    DistributeTranspilerConfig,
    Program,
    capture,
    memory_optimize,
    release_memory,
)


def made(activation: nn.Module, width: int = 4, rate: float = 0.1) -> Program:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, width), activation, nn.Linear(width, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    program, _ = capture(model, lambda m, x: m(x).mean(), optimizer, (torch.ones(2, 3),))
    return program


def transpiled(program: Program, trainers: int) -> Program:
    transpiler = DistributeTranspiler(DistributeTranspilerConfig(min_block_size=4))
    transpiler.transpile(0, program, "a:6174,b:6174", trainers)
    return transpiler.get_trainer_program()


def test_a_difference_names_the_op_and_the_variable():
    """An op in another's place, a size, a hyper-parameter; nothing where programs mean the same."""
    program = made(nn.Tanh())

    assert program.diff(program) == program.diff(made(nn.Tanh())) == ""
    lines = program.diff(made(nn.Sigmoid())).splitlines()
    assert lines[0] == (
        "block 0, op 2: sigmoid = aten.sigmoid(addmm) instead of tanh = aten.tanh(addmm)"
    )
    lines = program.diff(made(nn.Tanh(), width=5)).splitlines()
    assert "block 0, 0.bias is parameter float32[5] instead of parameter float32[4]" in lines
    lines = program.diff(made(nn.Tanh(), rate=0.5)).splitlines()
    assert len(lines) == 4 and all("lr=0.5) instead of" in line for line in lines)


def test_a_difference_tells_what_is_gone_and_what_is_new():
    """Of a clone for tests, and of two plans."""
    program = made(nn.Tanh())
    lines = program.diff(program.clone(for_test=True)).splitlines()
    assert any(line.startswith("block 0, op") and "is gone: " in line for line in lines)
    assert not any("is new" in line for line in lines)
    two, three = transpiled(program, 2), transpiled(program, 3)
    assert program.diff(two).startswith("it is a transpiled program instead of a single-node one")
    assert "plan, trainers: 3 instead of 2" in two.diff(three).splitlines()
    with pytest.raises(TypeError, match="diff: expected a Program, got str"):
        program.diff("program")


def test_variables_are_found_by_name():
    """``var``, ``parameters``, and ``list_vars`` over all blocks."""
    program = made(nn.Tanh())

    assert [each.name for each in program.parameters] == [
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    ]
    assert program.var("loss").shape == ()
    assert {each.name for each in program.list_vars()} == set(program.main.variables)
    with pytest.raises(ValueError, match="the program has no variable 'x1'; close names: "):
        program.var("x1")


def test_memory_is_nobodys_to_optimize(caplog: pytest.LogCaptureFixture):
    """Two names of the original do nothing, and say why."""
    program = made(nn.Tanh())
    before = replace(program)
    with caplog.at_level(logging.INFO, logger="transpiler"):
        memory_optimize(program, level=1)
        release_memory(program)

    assert program == before
    said = [r.message for r in caplog.records if r.name == "transpiler"]
    assert [line.partition(":")[0] for line in said] == [
        "memory_optimize does nothing",
        "release_memory does nothing",
    ]
    with pytest.raises(TypeError, match="release_memory: expected a Program"):
        release_memory(None)
