"""Optimizer states that are loaded into servers: what is loaded without states begins anew.

Real servers in this process.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from pathlib import Path

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
