"""Calls of all trainers that one of them does not make, in jobs with servers in this process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from pserver.errors import JobFailed, TrainerLost
from tests.support.table_trainers import Servers, Trainer, at_once
from trainer.job.shared_values import values_of


def test_a_trainer_that_waits_for_what_never_comes_is_told(servers: Servers) -> None:
    """One is in a step of sync mode, which waits for the other's: the job fails and says so."""
    one, other = at_once(*(partial(Trainer, servers(2), i, 2, nn.Linear(1, 1)) for i in range(2)))

    def step() -> None:
        other.model(torch.ones(1, 1)).sum().backward()
        other.optimizer.step()

    def fails(act: Callable[[], Any], job: Any) -> str:
        with pytest.raises(JobFailed) as raised:
            act()
        job.communicator.leave(str(raised.value))
        return str(raised.value)

    total = partial(values_of(one.job).all_reduce, torch.ones(1))
    for said in at_once(partial(fails, total, one.job), partial(fails, step, other.job)):
        assert "the trainers wait for one another" in said and "values of all trainers" in said


def test_a_trainer_that_has_finished_is_missed(servers: Servers) -> None:
    """A sum over the others would be another number."""
    one, other = at_once(*(partial(Trainer, servers(2), i, 2, nn.Linear(1, 1)) for i in range(2)))

    def late() -> None:
        with pytest.raises(TrainerLost, match="trainer 1 has left the job, and trainer 0 is in"):
            while True:  # the other has said that it finishes, or says so soon
                values_of(one.job).broadcast_object(0)
        one.job.communicator.finish()

    def early() -> None:
        values_of(other.job).broadcast_object(0)
        other.job.communicator.finish()

    at_once(late, early)
