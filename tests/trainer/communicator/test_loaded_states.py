"""Optimizer states that are loaded into servers: what is loaded without states begins anew.

Real servers in this process.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.jobs import (
    HOW,
    MODES,
    Eager,
    How,
    Script,
    Servers,
    alone,
    assert_equal,
    end_all,
    join,
    loss_of,
)
from tests.support.table_trainers import Trainer, sgd
from tests.support.threads import at_once

# those in which servers have states
IN_MODES = [name for name, mode in MODES.items() if mode.exact]


@pytest.fixture(autouse=True)
def no_trainer_stays() -> Iterator[None]:
    """After a failed test, too."""
    yield
    end_all()


def damped(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer whose first step differs from one with a momentum of zeros."""
    return torch.optim.SGD(parameters, lr=0.125, momentum=0.5, dampening=0.25)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("mode", IN_MODES)
def test_a_checkpoint_of_before_the_first_step_has_no_states(
    servers: Servers, tmp_path: Path, mode: str, how: How
) -> None:
    """A job that goes back to it steps as a job that begins, not with the states of later."""
    script = Script("dense", damped, steps=4)
    trainer = join(script, mode, servers(2), how=how)
    trainer.save(str(tmp_path / "begun"))
    trainer.train(script.data(), flushes=True)
    trainer.load(str(tmp_path / "begun"))
    trainer.train(script.data(), flushes=True)
    assert_equal(trainer.leave(), alone(script))


def test_a_state_dict_without_states_begins_anew(servers: Servers) -> None:
    """``load_state_dict`` of an optimizer that has taken no step, on parameters that stay."""
    script = Script("dense", damped, steps=3)
    trainer = join(script, "async, one slot", servers(2))
    assert isinstance(trainer, Eager)
    begun = copy.deepcopy(trainer.optimizer.state_dict())
    trainer.train(script.data())
    trainer.optimizer.load_state_dict(begun)
    after = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train(script.data())

    plain = copy.deepcopy(trainer.model)
    plain.load_state_dict(after)
    optimizer = damped(plain.parameters())
    for batch in script.data():
        optimizer.zero_grad()
        loss_of(plain, *batch).backward()
        optimizer.step()
    found = trainer.leave()
    assert_equal(found, {name: value.detach() for name, value in plain.state_dict().items()})


def test_values_that_are_spread_leave_the_states(servers: Servers) -> None:
    """``Job.spread`` of a model's values alone: the momentum of the steps before goes on."""
    script = Script("dense", damped, steps=6)
    trainer = join(script, "sync", servers(2))
    assert isinstance(trainer, Eager)
    trainer.train(script.data()[:3])
    trainer.job.spread()
    trainer.train(script.data()[3:])
    assert_equal(trainer.leave(), alone(script))


class Line(nn.Module):
    """One parameter, of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"send_queue_size": 1},
        {"send_queue_size": 1, "staleness": 8},
        {"min_send_grad_num_before_recv": 2},
        {"independent_recv_thread": True},
    ],
    ids=str,
)
def test_states_that_are_loaded_beside_steps_undo_none(
    servers: Servers, fields: dict[str, Any]
) -> None:
    """Trainer 0 does not know the other's last steps when its values go to the servers.  What its
    script has written goes there, too, where it knows which elements that are: not in lanes that
    receive values in place.
    """
    endpoints, written = servers(2), "send_queue_size" not in fields
    trainers: list[Trainer] = at_once(
        *(lambda n=n: Trainer(endpoints, n, 2, Line(), sgd, k_steps=0, **fields) for n in (0, 1))
    )

    def add(trainer: Trainer, times: int) -> None:
        for _ in range(times):
            trainer.model.w.grad = -torch.ones(4)
            trainer.optimizer.step()
        trainer.job.communicator.flush()

    try:
        add(trainers[0], 3)
        add(trainers[1], 4)
        if written:
            with torch.no_grad():
                trainers[0].model.w[0] += 50.0
        at_once(
            *(
                lambda each=each: each.optimizer.load_state_dict(each.optimizer.inner.state_dict())
                for each in trainers
            )
        )
        first = 53.0 if written else 7.0
        assert [each.model.w.tolist() for each in trainers] == [[first, 7.0, 7.0, 7.0]] * 2
        add(trainers[1], 1)
        assert trainers[1].model.w.tolist() == [first + 1.0, 8.0, 8.0, 8.0]
    finally:
        at_once(*(each.job.finish for each in trainers))
