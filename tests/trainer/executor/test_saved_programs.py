"""A program that is saved in the middle of its training goes on to the bit, or saving raises."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.eager_jobs import Servers
from tests.support.eager_modes import strategy_of
from tests.support.optimizers import OPTIMIZERS
from trainer import DistributedEmbedding, Executor
from transpiler import DistributeTranspiler, Program, capture


def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y)


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [
        (torch.randn(4, 3, generator=generator), torch.randn(4, 2, generator=generator))
        for _ in range(count)
    ]


def captured(optimizer: str) -> tuple[Program, Program]:
    torch.manual_seed(3)
    model = nn.Linear(3, 2)
    make, arguments = OPTIMIZERS[optimizer]
    return capture(model, step, make(model.parameters(), **arguments), batches(1)[0])


def train(program: Program, data: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with Executor() as executor:
        for batch in data:
            executor.run(program, feed=list(batch))


def values(program: Program) -> dict[str, torch.Tensor]:
    assert program.storage is not None
    return {name: value.detach().clone() for name, value in program.storage.tensors.items()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_program_that_is_saved_and_loaded_goes_on_to_the_bit(
    tmp_path: Path, optimizer: str
) -> None:
    """With its optimizer's states; saved by the process that captured it, and by one that loaded it
    and went on.
    """
    whole, _ = captured(optimizer)
    train(whole, batches(6))
    first, _ = captured(optimizer)
    train(first, batches(6)[:2])
    first.save(tmp_path / "first")
    second = Program.load(tmp_path / "first")
    train(second, batches(6)[2:4])
    second.save(tmp_path / "second")
    third = Program.load(tmp_path / "second")
    train(third, batches(6)[4:])

    for name, value in values(whole).items():
        assert torch.equal(values(third)[name], value), name


def test_a_program_that_was_saved_before_it_trained_begins_anew(tmp_path: Path) -> None:
    """There are no states before the first step."""
    program, _ = captured("adam")
    program.save(tmp_path / "program")
    loaded = Program.load(tmp_path / "program")
    assert loaded.storage is not None and not loaded.storage.states
    train(program, batches(2))
    train(loaded, batches(2))

    assert all(torch.equal(values(loaded)[name], value) for name, value in values(program).items())


def transpiled(main: Program, startup: Program | None, endpoints: str) -> DistributeTranspiler:
    transpiler = DistributeTranspiler()
    transpiler.transpile(0, main, pservers=endpoints, trainers=1, startup_program=startup)
    return transpiler


def test_states_that_are_on_servers_are_not_left_out_in_silence(
    servers: Servers, tmp_path: Path
) -> None:
    """Saving the single-node program raises; the trainer's program has no states, and is saved."""
    main, startup = captured("adam")
    transpiler = transpiled(main, startup, servers(1))
    with Executor() as executor:
        executor.run(transpiler.get_startup_program())
        executor.run(transpiler.get_trainer_program(), feed=list(batches(1)[0]))
    with pytest.raises(ValueError, match="'weight': its optimizer state is on the servers"):
        main.save(tmp_path / "main")
    assert not list(tmp_path.iterdir())
    transpiler.get_trainer_program().save(tmp_path / "trainer")

    assert Program.load(tmp_path / "trainer").storage is not None


def test_loaded_states_are_not_lost_on_the_way_to_servers(servers: Servers, tmp_path: Path) -> None:
    """A loaded program that has trained is refused by a job with servers."""
    main, _ = captured("adam")
    train(main, batches(1))
    main.save(tmp_path / "main")
    transpiler = transpiled(Program.load(tmp_path / "main"), None, servers(1))

    with Executor() as executor, pytest.raises(ValueError, match="was loaded with optimizer state"):
        executor.run(transpiler.get_startup_program())


class Table(nn.Module):
    """A table of our own, or torch's."""

    def __init__(self, ours: bool) -> None:
        super().__init__()
        self.emb: nn.Module = nn.Embedding(9, 2, sparse=True)
        if ours:
            self.emb = DistributedEmbedding(2, num_embeddings=9, name="emb")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.emb(ids)
        return out


def table_step(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(ids).square().mean()


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "torch's"])
def test_states_of_rows_are_not_left_out_in_silence(tmp_path: Path, ours: bool) -> None:
    """Rows without states are saved; a loaded table that has trained on is not saved as it was."""
    ids = torch.arange(4)
    for rule, arguments in ((torch.optim.Adagrad, {"lr": 0.1}), (torch.optim.SGD, {"lr": 0.1})):
        model = Table(ours)
        program, _ = capture(model, table_step, rule(model.parameters(), **arguments), (ids,))
        with Executor() as executor:
            executor.run(program, feed=[ids])
        if rule is torch.optim.Adagrad:
            with pytest.raises(ValueError, match="its rows have optimizer state"):
                program.save(tmp_path / "program")
    program.save(tmp_path / "program")
    loaded = Program.load(tmp_path / "program")
    with Executor() as executor:
        executor.run(loaded, feed=[ids])

    with pytest.raises(ValueError, match="its rows have been trained since it was loaded"):
        loaded.save(tmp_path / "again")


def test_programs_of_one_trainer_share_their_values_when_they_are_loaded(
    servers: Servers, tmp_path: Path
) -> None:
    """Their files are two: what the main program changes in a k-step mode reaches the servers."""
    main, startup = captured("sgd")
    transpiler, strategy = DistributeTranspiler(), strategy_of(k_steps=1)
    transpiler.transpile(0, main, servers(1), 1, startup_program=startup, strategy=strategy)
    programs = []
    for program in (transpiler.get_startup_program(), transpiler.get_trainer_program()):
        program.save(tmp_path / "saved")
        programs.append(Program.load(tmp_path / "saved"))
    before = values(programs[1])
    with Executor() as executor:
        executor.run(programs[0])
        for batch in batches(3):
            executor.run(programs[1], feed=list(batch))
        executor.flush()
        served = executor._runtimes[0].communicator.served()

        assert executor.steps(programs[1]) == 3
    after = values(programs[1])
    assert served.keys() == before.keys() == after.keys()
    for name, value in after.items():
        assert torch.equal(served[name], value) and not torch.equal(before[name], value), name
