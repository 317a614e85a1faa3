"""Checkpoints of programs: a job goes on to the bit, in programs or in fleet, on other servers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support import eager_jobs
from tests.support.eager_jobs import Servers
from tests.support.eager_modes import strategy_of
from trainer import DistributedEmbedding, Executor, Uniform, fleet, load_program_state
from trainer.executor import program_training
from transpiler import DistributeTranspiler, capture
from transpiler.program import Program

Batch = tuple[torch.Tensor, torch.Tensor]
Train = Callable[[str, nn.Module, list[Batch], "Path | None", "Path | None", dict[str, Any]], Any]
MODES: dict[str, dict[str, Any]] = {
    "sync": {"modes": {"*": "sync"}},
    "async, a queue": {"send_queue_size": 8},
    "geo": {"modes": {"emb": "async", "*": "geo"}, "k_steps": 2},
    "mixed": {"modes": {"emb": "async", "1.*": "geo", "*": "sync"}, "k_steps": 2},
    "collective": {"modes": {"emb": "sync", "*": "collective"}},
}


class Net(nn.Sequential):
    """A table, batch norm and two layers."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        emb = DistributedEmbedding(4, num_embeddings=30, name="emb", init=Uniform(-1, 1))
        super().__init__(emb, nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(4)
    return [
        (
            torch.randint(0, 30, (8,), generator=generator),
            torch.randint(0, 3, (8,), generator=generator),
        )
        for _ in range(count)
    ]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05)


def by_program(
    endpoints: str,
    model: nn.Module,
    data: list[Batch],
    begins: Path | None,
    ends: Path | None,
    configs: dict[str, Any],
) -> dict[str, torch.Tensor]:
    """Trains a program, from a checkpoint and to one; what the model then is."""
    optimizer = adam(model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
    main, startup = capture(model, step, optimizer, batches(1)[0])
    if endpoints:
        transpiler = DistributeTranspiler()
        strategy = strategy_of(**configs)
        transpiler.transpile(0, main, endpoints, 1, startup_program=startup, strategy=strategy)
        main, startup = transpiler.get_trainer_program(), transpiler.get_startup_program()
    with Executor() as executor:
        executor.run(startup)
        if begins is not None:
            assert executor.load(str(begins), main, schedule) == 4
        for batch in data:
            executor.run(main, feed=batch)
            executor.flush()
            schedule.step()
        if ends is not None:
            executor.save(str(ends), main, schedule)
        return values(model)


def by_script(
    endpoints: str,
    model: nn.Module,
    data: list[Batch],
    begins: Path | None,
    ends: Path | None,
    configs: dict[str, Any],
) -> dict[str, torch.Tensor]:
    """The same eagerly."""
    optimizer = eager_jobs.joined(endpoints, model, adam(model), strategy=strategy_of(**configs))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
    if begins is not None:
        assert fleet.load(str(begins), schedule) == 4
    for batch in data:
        optimizer.zero_grad()
        step(model, *batch).backward()
        optimizer.step()
        optimizer.flush()
        schedule.step()
    if ends is not None:
        fleet.save(str(ends), schedule)
    found = values(model)
    fleet.finish()
    return found


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, buffers and rows."""
    model.eval()
    with torch.no_grad():
        rows = model[0](torch.arange(30)).clone()
    model.train()
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        name: value.detach().clone() for name, value in held.items() if not name.startswith("0.")
    } | {"rows": rows}


def assert_same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), name


@pytest.mark.parametrize("mode", ["mixed", "collective"])
def test_a_job_goes_on_to_the_bit_on_other_servers(
    servers: Servers, tmp_path: Path, mode: str
) -> None:
    """Saved on 2 servers after 4 steps, in the middle of a one-cycle schedule, and loaded on 3:
    with parameters, rows, buffers and states as in one run.
    """
    whole = by_program(servers(1), Net(), batches(8), None, None, MODES[mode])
    by_program(servers(2), Net(), batches(4), None, tmp_path / "at", MODES[mode])
    later = by_program(servers(3), Net(), batches(8)[4:], tmp_path / "at", None, MODES[mode])

    assert_same(later, whole)


@pytest.mark.parametrize(("before", "after"), [(by_program, by_script), (by_script, by_program)])
@pytest.mark.parametrize("mode", ["mixed"])
def test_fleet_and_programs_read_one_anothers_checkpoints(
    servers: Servers, tmp_path: Path, mode: str, before: Train, after: Train
) -> None:
    """What one has saved the other goes on from, to the bit."""
    whole = by_script(servers(1), Net(), batches(8), None, None, MODES[mode])
    before(servers(2), Net(), batches(4), None, tmp_path / "at", MODES[mode])
    later = after(servers(1), Net(), batches(8)[4:], tmp_path / "at", None, MODES[mode])

    assert_same(later, whole)


def test_a_single_node_program_goes_on_on_servers_and_back(
    servers: Servers, tmp_path: Path
) -> None:
    """A checkpoint does not say how the job was divided."""
    whole = by_program("", Net(), batches(8), None, None, {})
    by_program("", Net(), batches(4), None, tmp_path / "alone", {})
    later = by_program(servers(2), Net(), batches(8)[4:], tmp_path / "alone", None, MODES["sync"])
    assert_same(later, whole)
    by_program(servers(1), Net(), batches(4), None, tmp_path / "at", MODES["sync"])
    assert_same(by_program("", Net(), batches(8)[4:], tmp_path / "at", None, {}), whole)


def test_a_job_is_saved_by_its_single_node_program_too(servers: Servers, tmp_path: Path) -> None:
    """The default main program's states are the servers'; when the job is over they are gone, and
    saving raises.
    """
    model = Net()
    optimizer = adam(model)
    main, startup = capture(model, step, optimizer, batches(1)[0])
    transpiler = DistributeTranspiler()
    transpiler.transpile(0, main, servers(1), 1, startup_program=startup)
    with Executor() as executor:
        executor.run(transpiler.get_startup_program())
        for batch in batches(2):
            executor.run(transpiler.get_trainer_program(), feed=batch)
        executor.save(str(tmp_path / "by default"))
        executor.save(str(tmp_path / "by trainer"), transpiler.get_trainer_program())
    one, other = (load_program_state(tmp_path / name) for name in ("by default", "by trainer"))
    assert_same(one, other)
    assert "1.weight@exp_avg" in one
    with Executor() as executor, pytest.raises(ValueError, match="on the servers, and this Exec"):
        executor.save(str(tmp_path / "late"), main)


def test_a_checkpoint_that_does_not_fit_changes_nothing(servers: Servers, tmp_path: Path) -> None:
    """Another model's, a missing one, a program without an optimizer, and a server's program
    without values raise.
    """
    by_program(servers(1), Net(), batches(4), None, tmp_path / "at", MODES["sync"])
    model = nn.Linear(3, 2)
    main, startup = capture(
        model, lambda model, x: model(x).sum(), adam(model), (torch.ones(2, 3),)
    )
    before = model.weight.detach().clone()
    with Executor() as executor:
        executor.run(startup)
        with pytest.raises(ValueError, match="expected the model's variables"):
            executor.load(str(tmp_path / "at"), main)
        with pytest.raises(FileNotFoundError):
            executor.load(str(tmp_path / "nowhere"), main)
        transpiler = DistributeTranspiler()
        transpiler.transpile(0, main, "a:1", 1, startup_program=startup)
        transpiler.get_trainer_program().save(tmp_path / "program")
        with pytest.raises(ValueError, match=r"captured in this process.*Program\.save"):
            program_training.ProgramTraining(Program.load(tmp_path / "program"), None)
        with pytest.raises(ValueError, match="the server holds no value for 'weight'"):
            Executor().save(str(tmp_path / "other"), transpiler.get_pserver_program("a:1"))

    assert torch.equal(model.weight, before) and not (tmp_path / "other").exists()
