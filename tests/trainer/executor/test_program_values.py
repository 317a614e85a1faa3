"""The values of programs by name: out of files and checkpoints, and into programs."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.eager_jobs import Servers
from trainer import (
    Executor,
    deserialize_persistables,
    load_program_state,
    serialize_persistables,
    set_program_state,
)
from transpiler import DistributeTranspiler, capture, data
from transpiler.program import Program

Batch = tuple[torch.Tensor, torch.Tensor]


def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    out = model(x)
    return {"loss": F.mse_loss(out, y), "hidden": model[0](x)}


def batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(4)
    return [
        (torch.randn(4, 3, generator=generator), torch.randn(4, 2, generator=generator))
        for _ in range(count)
    ]


def captured(seed: int = 3) -> tuple[Program, Program]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    adam = torch.optim.Adam(model.parameters(), lr=0.05)
    return capture(model, step, adam, batches(1)[0])


def train(program: Program, data: list[Batch]) -> None:
    with Executor() as executor:
        for batch in data:
            executor.run(program, feed=batch)


def values(program: Program) -> dict[str, torch.Tensor]:
    assert program.storage is not None
    return {name: value.detach().clone() for name, value in program.storage.tensors.items()}


@pytest.mark.parametrize("form", ["file", "checkpoint", "bytes"])
@pytest.mark.parametrize("into", ["captured", "loaded"])
def test_a_program_goes_on_from_the_state_of_another(tmp_path: Path, form: str, into: str) -> None:
    """Parameters and Adam's states: 3 steps, then 3 in another program, as 6 in one."""
    whole, first, second = captured()[0], captured()[0], captured(seed=7)[0]
    train(whole, batches(6))
    train(first, batches(3))
    if into == "loaded":
        second.save(tmp_path / "untrained")
        second = Program.load(tmp_path / "untrained")
    with Executor() as executor:
        if form == "file":
            first.save(tmp_path / "saved")
        elif form == "checkpoint":
            executor.save(str(tmp_path / "saved"), first)
        if form == "bytes":
            data = serialize_persistables(None, None, executor, first)
            assert deserialize_persistables(second, data, executor) is second
        else:
            set_program_state(second, load_program_state(tmp_path / "saved"))
    train(second, batches(6)[3:])

    for name, value in values(whole).items():
        assert torch.equal(values(second)[name], value), name


def test_a_choice_of_variables_is_loaded_and_serialized(tmp_path: Path) -> None:
    """By name or as variables; of a fetched variable only what it is computed from."""
    program, _ = captured()
    train(program, batches(1))
    program.save(tmp_path / "saved")
    assert set(load_program_state(tmp_path / "saved", "0.bias")) == {"0.bias"}
    chosen = [program.main.variables["0.bias"], "1.weight@exp_avg"]
    assert list(load_program_state(tmp_path / "saved", chosen)) == ["0.bias", "1.weight@exp_avg"]
    with pytest.raises(ValueError, match="expected a value of 'fc', got none"):
        load_program_state(tmp_path / "saved", ["fc"])
    with pytest.raises(FileNotFoundError):
        load_program_state(tmp_path / "nowhere")
    with Executor() as executor:
        data = serialize_persistables(["x"], ["hidden"], executor, program)
        other, _ = captured(seed=7)
        before = values(other)
        deserialize_persistables(other, data, executor)
        with pytest.raises(ValueError, match="expected variables of the program, got 'fc'"):
            serialize_persistables(["x"], ["fc"], executor, program)
        with pytest.raises(ValueError, match="expected bytes of serialize_persistables"):
            deserialize_persistables(other, b"something", executor)
    changed = {
        name for name, value in values(other).items() if not torch.equal(before[name], value)
    }
    assert changed == {"0.weight", "0.bias"}


def test_values_that_do_not_fit_change_nothing(
    servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    """Another shape or dtype raises, unknown names are warned of, and states on servers are
    refused.
    """
    program, startup = captured()
    before = values(program)
    good = {"0.bias": torch.ones(4)}
    for bad in (torch.ones(5), torch.ones(4, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"'1\.bias': expected torch\.float32 \[2\], got"):
            set_program_state(program, {**good, "1.bias": bad})
    assert all(torch.equal(value, before[name]) for name, value in values(program).items())
    with caplog.at_level(logging.WARNING):
        set_program_state(program, {**good, "fc": torch.ones(1)})
    assert "the program has no fc" in caplog.text
    assert torch.equal(values(program)["0.bias"], torch.ones(4))
    with pytest.raises(ValueError, match="expected a program that holds values"):
        set_program_state(Program.from_proto(program.to_proto()), good)

    transpiler = DistributeTranspiler()
    transpiler.transpile(0, program, servers(1), 1, startup_program=startup)
    with Executor() as executor:
        executor.run(transpiler.get_startup_program())
        with pytest.raises(ValueError, match="its optimizer state is on the servers"):
            set_program_state(program, {"0.bias@exp_avg": torch.ones(4)})
        set_program_state(transpiler.get_trainer_program(), {"0.bias": torch.full((4,), 2.0)})
        feed = batches(1)[0]
        (hidden,) = executor.run(transpiler.get_trainer_program(), feed=feed, fetch_list=["hidden"])
    assert torch.equal(hidden, feed[0] @ before["0.weight"].T + 2.0) or torch.allclose(
        hidden, feed[0] @ before["0.weight"].T + 2.0
    )


def test_the_values_of_a_recurrent_layer_are_needed_too() -> None:
    """A layer over a free time is one op, whose weights its results are computed from."""

    class Net(nn.Module):
        """A GRU, and a layer on its last step."""

        def __init__(self) -> None:
            super().__init__()
            self.gru, self.out = nn.GRU(4, 3, batch_first=True), nn.Linear(3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.out(self.gru(x)[0][:, -1])
            return found

    model = Net()
    program, _ = capture(model, lambda model, x: model(x), example=(data("x", [None, "time", 4]),))
    with Executor() as executor:
        found = serialize_persistables(["x"], ["output"], executor, program)

    assert set(safetensors.torch.load(found)) == set(dict(model.named_parameters()))
