"""The eager path's state: read, loaded, saved and resumed, one trainer against real servers in this
process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.eager_jobs import Servers, assert_same, batches, joined, net, train
from trainer import fleet


def test_the_models_state_and_the_optimizers_are_whole_and_current(servers: Servers) -> None:
    """``state_dict()`` equals that of plain torch, states that live on servers included."""
    mine, reference = net(), net()
    optimizer = joined(servers(2), mine, torch.optim.Adam(mine.parameters(), lr=0.01, amsgrad=True))
    plain = torch.optim.Adam(reference.parameters(), lr=0.01, amsgrad=True)
    train(mine, optimizer, batches(6))
    train(reference, plain, batches(6))

    assert_same(mine.state_dict(), reference.state_dict())
    assert_same(optimizer.state_dict(), plain.state_dict())


def test_loading_a_state_dict_goes_on_from_it(servers: Servers) -> None:
    """``load_state_dict`` of another run's optimizer: the servers have its states and the next
    steps equal plain torch.
    """
    mine, reference = net(), net()
    plain = torch.optim.Adam(reference.parameters(), lr=0.01)
    train(reference, plain, batches(4))
    optimizer = joined(servers(2), mine, torch.optim.Adam(mine.parameters(), lr=0.5))
    train(mine, optimizer, batches(2))

    mine.load_state_dict(reference.state_dict())
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    train(mine, optimizer, batches(4, seed=2))
    train(reference, plain, batches(4, seed=2))

    assert_same(mine.state_dict(), reference.state_dict())


def test_an_optimizer_that_has_stepped_before_keeps_its_state(servers: Servers) -> None:
    """A job may start from an optimizer with state."""
    mine, reference = net(), net()
    before, plain = (
        torch.optim.Adam(mine.parameters(), lr=0.01),
        torch.optim.Adam(reference.parameters(), lr=0.01),
    )
    train(mine, before, batches(3))
    train(reference, plain, batches(3))

    train(mine, joined(servers(2), mine, before), batches(3, seed=2))
    train(reference, plain, batches(3, seed=2))

    assert_same(mine.state_dict(), reference.state_dict())


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_saved_job_resumes_to_the_bit_on_any_number_of_servers(
    servers: Servers, tmp_path: Path, count: int
) -> None:
    """Parameters, buffers, optimizer state, hyper-parameters and step come back."""
    reference = net()
    plain = torch.optim.Adam(reference.parameters(), lr=0.01)
    train(reference, plain, batches(6))
    first = net()
    optimizer = joined(servers(2), first, torch.optim.Adam(first.parameters(), lr=0.01))
    train(first, optimizer, batches(6)[:3])
    fleet.save(str(tmp_path / "saved"))
    fleet.finish()

    second = net(seed=99)
    optimizer = joined(servers(count), second, torch.optim.Adam(second.parameters(), lr=0.7))
    assert fleet.load(str(tmp_path / "saved")) == 3
    train(second, optimizer, batches(6)[3:])

    assert_same(second.state_dict(), reference.state_dict())


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "multi-step": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], 0.1),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.05, total_steps=9
    ),
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 1 / (1 + step)
    ),
    "sequential": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        ],
        [2],
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_resumes_where_it_was(servers: Servers, tmp_path: Path, name: str) -> None:
    """The scheduler's own counters are part of the checkpoint, where it is given."""

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any, data: Any) -> None:
        for batch in data:
            train(model, optimizer, [batch])
            schedule.step()

    make, reference = SCHEDULES[name], net()
    plain = torch.optim.Adam(reference.parameters(), lr=0.01)
    run(reference, plain, make(plain), batches(6))
    first = net()
    optimizer = joined(servers(2), first, torch.optim.Adam(first.parameters(), lr=0.01))
    schedule = make(optimizer)
    run(first, optimizer, schedule, batches(6)[:3])
    fleet.save(str(tmp_path / "saved"), scheduler=schedule)
    fleet.finish()

    second = net(seed=99)
    optimizer = joined(servers(1), second, torch.optim.Adam(second.parameters(), lr=0.01))
    schedule = make(optimizer)
    fleet.load(str(tmp_path / "saved"), scheduler=schedule)
    run(second, optimizer, schedule, batches(6)[3:])

    assert_same(second.state_dict(), reference.state_dict())


def test_a_checkpoint_of_another_model_is_refused_and_nothing_changes(
    servers: Servers, tmp_path: Path
) -> None:
    """Bad input: a clear error, nothing half-done."""
    model = net()
    optimizer = joined(servers(1), model, torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, optimizer, batches(1))
    fleet.save(str(tmp_path / "saved"))
    fleet.finish()
    other = nn.Linear(6, 2)
    before = copy.deepcopy(other.state_dict())
    joined(servers(1), other, torch.optim.SGD(other.parameters(), lr=0.1))

    with pytest.raises(ValueError, match="variables"):
        fleet.load(str(tmp_path / "saved"))
    with pytest.raises(FileNotFoundError):
        fleet.load(str(tmp_path / "nothing"))
    assert_same(other.state_dict(), before)
