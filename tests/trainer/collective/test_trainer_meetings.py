"""How the trainers of a job with servers come to make values together, and what a trainer hears
that waits for one that does not come; in this process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from pserver.errors import JobFailed, TrainerLost
from tests.support.table_trainers import Net, Servers, Trainer
from tests.support.threads import at_once
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


def test_a_mixed_job_has_met_already(servers: Servers) -> None:
    """Its trainers sum values in between the means of gradients, among the same peers."""
    modes = {"w": "collective", "*": "sync"}
    pair = at_once(*(partial(Trainer, servers(2), i, 2, Net(), modes=modes) for i in range(2)))

    def play(trainer: Trainer) -> list[float]:
        allreduce, found = trainer.job.communicator.dense_allreduce, []
        for _ in range(2):
            own = torch.tensor(1.0 + trainer.job.role.trainer_id)
            found.append(float(values_of(trainer.job).all_reduce(own)))
            trainer.add([5], 1.0, dense=2.0)
        assert allreduce is not None and trainer.job.communicator.dense_allreduce is allreduce
        trainer.job.communicator.finish()
        return [*found, trainer.model.w[0].item()]

    assert at_once(*(partial(play, each) for each in pair)) == [[3.0, 3.0, 4.0]] * 2


def test_trainers_meet_again_in_another_plan(servers: Servers) -> None:
    """A second optimizer lets them leave and join anew; the sums go on."""

    def sgd(layer: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(layer.parameters(), lr=1.0)

    def play(number: int) -> list[float]:
        layers = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        job = Trainer(servers(2), number, 2, layers, lambda model: sgd(model[0])).job
        own = torch.tensor(1.0 + number)
        found = [float(values_of(job).all_reduce(own))]
        job.join(sgd(layers[1]))
        found.append(float(values_of(job).all_reduce(own, "max")))
        job.communicator.finish()
        return found

    assert at_once(partial(play, 0), partial(play, 1)) == [[3.0, 2.0]] * 2
