"""Values and states that are loaded in the middle of a k-step window, beside DiLoCo in plain torch.

Real servers in this process, a thread a trainer.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.diloco_rows import INNER, OUTER
from tests.support.eager_jobs import batches, train
from tests.support.seeded import seeded
from tests.support.table_trainers import Servers, Trainer, sgd
from tests.support.threads import at_once
from trainer.job import save_load

K = 4


def net(seed: int = 3) -> nn.Module:
    with seeded(seed):
        return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 2))


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return INNER["momentum"](model.parameters())


class Alone:
    """DiLoCo in plain torch: what trainers and servers do, in one process.  The mean and the
    servers' values are in the parameters' dtype, and the outer step in double precision.
    """

    def __init__(self, trainers: int, outer: str) -> None:
        self.models = [net() for _ in range(trainers)]
        self.optimizers = [momentum(model) for model in self.models]
        self.data = [batches(20, seed=number + 1) for number in range(trainers)]
        self.served = [nn.Parameter(each.detach().double()) for each in self.models[0].parameters()]
        self._outer, self._window, self._step = outer, 0, 0
        self.begin_outer()

    def begin_outer(self) -> None:
        """The outer optimizer has no states."""
        self._optimizer = OUTER[self._outer][1](self.served)

    def steps(self, count: int) -> None:
        """Steps of all trainers."""
        for _ in range(count):
            for model, optimizer, data in zip(self.models, self.optimizers, self.data, strict=True):
                train(model, optimizer, data[self._step : self._step + 1])
            self._step, self._window = self._step + 1, self._window + 1
            if self._window == K:
                self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        own = zip(*(model.parameters() for model in self.models), strict=True)
        for served, values in zip(self.served, own, strict=True):
            served.grad = served - sum(values[1:], values[0]).div(len(values)).double()
        self._optimizer.step()
        for served in self.served:
            served.copy_(served.float())
        self.begin_window()

    @torch.no_grad()
    def begin_window(self) -> None:
        """All trainers have the servers' values."""
        for model in self.models:
            for each, served in zip(model.parameters(), self.served, strict=True):
                each.copy_(served)
        self._window = 0


class Job:
    """The same as a job with servers."""

    def __init__(self, endpoints: str, trainers: int, outer: str) -> None:
        fields: dict[str, Any] = {"k_steps": K, "outer_optimizer": OUTER[outer][0]}
        models = [net() for _ in range(trainers)]
        self.data = [batches(20, seed=number + 1) for number in range(trainers)]
        self.trainers: list[Trainer] = at_once(
            *(
                lambda n=n: Trainer(endpoints, n, trainers, models[n], momentum, **fields)
                for n in range(trainers)
            )
        )
        self._step = 0

    def all(self, play: Callable[[int, Trainer], Any]) -> None:
        """All trainers at once."""
        at_once(*(lambda n=n: play(n, self.trainers[n]) for n in range(len(self.trainers))))

    def steps(self, count: int) -> None:
        """Steps of all trainers."""
        end = self._step + count
        self.all(lambda n, each: train(each.model, each.optimizer, self.data[n][self._step : end]))
        self._step = end


def assert_alike(job: Job, alone: Alone) -> None:
    """To the bit."""
    for trainer, model in zip(job.trainers, alone.models, strict=True):
        for mine, other in zip(trainer.model.parameters(), model.parameters(), strict=True):
            assert torch.equal(mine, other)


Join = Callable[[int, str], Job]


@pytest.fixture
def join(servers: Servers) -> Iterator[Join]:
    """``join(trainers, outer)``: a job, which has ended after the test."""
    joined: list[Job] = []

    def made(trainers: int, outer: str) -> Job:
        joined.append(Job(servers(2), trainers, outer))
        return joined[-1]

    yield made
    for job in joined:
        job.all(lambda _, each: each.optimizer.close())


ALL = [(trainers, outer) for trainers in (1, 2) for outer in OUTER]


@pytest.mark.parametrize(("trainers", "outer"), ALL)
@pytest.mark.parametrize("before", [4, 6])
def test_values_that_a_script_loads_leave_with_the_next_exchange(
    join: Join, trainers: int, outer: str, before: int
) -> None:
    """The window's change is then the difference from the loaded values to those that it began
    with, and of the steps since.
    """
    job, alone = join(trainers, outer), Alone(trainers, outer)
    other = net(9).state_dict()
    job.steps(before)
    job.all(lambda _, each: each.model.load_state_dict(other))
    job.steps(6)

    alone.steps(before)
    for model in alone.models:
        model.load_state_dict(other)
    alone.steps(6)
    assert_alike(job, alone)


@pytest.mark.parametrize(("trainers", "outer"), ALL)
@pytest.mark.parametrize("fresh", [False, True])
def test_states_that_a_script_loads_leave_parameters_and_the_window(
    join: Join, trainers: int, outer: str, fresh: bool
) -> None:
    """Each trainer's own ones, or those of an optimizer that has taken no step."""
    job, alone = join(trainers, outer), Alone(trainers, outer)

    def state(optimizer: Any) -> dict[str, Any]:
        return copy.deepcopy((momentum(net()) if fresh else optimizer).state_dict())

    job.steps(6)
    job.all(lambda _, each: each.optimizer.load_state_dict(state(each.optimizer)))
    job.steps(7)

    alone.steps(6)
    for optimizer in alone.optimizers:
        optimizer.load_state_dict(state(optimizer))
    alone.steps(7)
    assert_alike(job, alone)


@pytest.mark.parametrize(("trainers", "outer"), ALL)
def test_a_script_may_begin_with_the_values_and_states_of_a_file(
    join: Join, trainers: int, outer: str
) -> None:
    """The outer optimizer does not take them for a change."""
    job, alone = join(trainers, outer), Alone(trainers, outer)
    other = net(9)
    train(other, optimizer := momentum(other), batches(3, seed=7))

    def load(model: nn.Module, own: torch.optim.Optimizer) -> None:
        model.load_state_dict(other.state_dict())
        own.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    job.all(lambda _, each: load(each.model, each.optimizer))
    job.steps(6)

    for model, own in zip(alone.models, alone.optimizers, strict=True):
        load(model, own)
    with torch.no_grad():
        for served, value in zip(alone.served, other.parameters(), strict=True):
            served.copy_(value)
    alone.steps(6)
    assert_alike(job, alone)


def test_states_that_a_script_loads_leave_changes_of_geo(servers: Servers) -> None:
    """No trainer's values replace the other's changes."""
    endpoints, data = servers(2), [batches(6, seed=number) for number in (1, 2)]
    trainers: list[Trainer] = at_once(
        *(lambda n=n: Trainer(endpoints, n, 2, net(), momentum, k_steps=10) for n in (0, 1))
    )

    def play(number: int) -> None:
        trainer = trainers[number]
        train(trainer.model, trainer.optimizer, data[number][:3])
        trainer.optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.inner.state_dict()))
        train(trainer.model, trainer.optimizer, data[number][3:])

    at_once(lambda: play(0), lambda: play(1))
    for trainer in trainers:
        trainer.optimizer.close()

    expected = [each.detach() for each in net().parameters()]
    for of_trainer in data:
        model = net()
        train(model, momentum(model), of_trainer)
        expected = [
            each + (moved.detach() - start.detach()) / 2
            for each, moved, start in zip(
                expected, model.parameters(), net().parameters(), strict=True
            )
        ]
    for mine, each in zip(trainers[1].model.parameters(), expected, strict=True):
        assert torch.allclose(mine, each, atol=1e-6)


def test_states_that_a_script_loads_reach_servers_beside_a_diloco_lane(servers: Servers) -> None:
    """Of the parameters that these step, which begin anew; the window of the others goes on."""
    modes = {"0.*": "diloco", "*": "async"}
    fields: dict[str, Any] = {
        "k_steps": K,
        "outer_optimizer": OUTER["nesterov"][0],
        "send_queue_size": 1,
    }
    trainer = Trainer(servers(2), 0, 1, net(), momentum, modes=modes, **fields)
    alone = Alone(1, "nesterov")
    data = alone.data[0]
    train(trainer.model, trainer.optimizer, data[:6])
    trainer.optimizer.load_state_dict(momentum(net()).state_dict())
    train(trainer.model, trainer.optimizer, data[6:8])

    (model,), layers = alone.models, [0, 1]
    optimizer, outer = momentum(model), OUTER["nesterov"][1](alone.served[:2])
    for number, batch in enumerate(data[:8]):
        if number == 6:
            optimizer.load_state_dict(momentum(net()).state_dict())
        train(model, optimizer, [batch])
        if number % K == K - 1:
            own = list(model.parameters())
            with torch.no_grad():
                for each in layers:
                    alone.served[each].grad = alone.served[each] - own[each]
                outer.step()
                for each in layers:
                    own[each].copy_(alone.served[each])
                    alone.served[each].copy_(own[each])
    for mine, other in zip(trainer.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, other)
    trainer.optimizer.close()


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> threading.local:
    """The present job is one of each thread's, as if each were a process."""
    present = threading.local()
    monkeypatch.setattr(save_load, "present", lambda: present.job)
    return present


@pytest.mark.parametrize(("trainers", "outer"), ALL)
@pytest.mark.parametrize("at", [(0, 6), (4, 6), (6, 11)])
def test_a_checkpoint_that_is_loaded_begins_a_window_and_the_outer_states(
    join: Join,
    jobs: threading.local,
    tmp_path: Path,
    trainers: int,
    outer: str,
    at: Sequence[int],
) -> None:
    """It has the servers' values, and the states of trainer 0's own optimizer."""
    job, alone = join(trainers, outer), Alone(trainers, outer)
    saved, loaded = at

    def call(name: str) -> Callable[[int, Trainer], None]:
        def play(number: int, trainer: Trainer) -> None:
            jobs.job = trainer.job
            getattr(save_load, name)(str(tmp_path / "saved"))

        return play

    job.steps(saved)
    job.all(call("save"))
    job.steps(loaded - saved)
    job.all(call("load"))
    job.steps(6)

    alone.steps(saved)
    values = [each.detach().clone() for each in alone.served]
    states = copy.deepcopy(alone.optimizers[0].state_dict())
    alone.steps(loaded - saved)
    for served, value in zip(alone.served, values, strict=True):
        served.data.copy_(value)
    alone.begin_window()
    alone.begin_outer()
    for optimizer in alone.optimizers:
        optimizer.load_state_dict(copy.deepcopy(states))
    alone.steps(6)
    assert_alike(job, alone)


def test_values_that_are_read_whole_are_no_changes_of_the_reader(servers: Servers) -> None:
    """Changes that others make meanwhile reach the servers once."""
    endpoints, data = servers(2), [batches(6, seed=number) for number in (1, 2)]
    reader, other = trainers = at_once(
        *(lambda n=n: Trainer(endpoints, n, 2, net(), sgd, k_steps=1) for n in (0, 1))
    )
    for trainer, own in zip(trainers, data, strict=True):
        train(trainer.model, trainer.optimizer, own)
        trainer.job.communicator.drain()

    reader.job.communicator.pull()
    read = copy.deepcopy(reader.model.state_dict())
    train(reader.model, reader.optimizer, [(torch.zeros(2, 6), torch.tensor([0, 0]))])
    reader.job.communicator.drain()
    moved = reader.job.communicator.served()
    at_once(*(each.job.finish for each in trainers))
    untouched = "0.weight"  # its gradient is 0, as the inputs are
    assert torch.equal(moved[untouched], read[untouched])
