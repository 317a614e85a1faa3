"""The k-step modes, geo and diloco: what files have in the middle of a window, and what becomes of
the steps after the last exchange.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pserver.config import ServerConfig
from pserver.errors import JobFailed
from pserver.service.server import Server
from pserver.wire_pb2 import StatusRequest
from tests.support.eager_jobs import batches, train
from tests.support.seeded import seeded
from tests.support.table_trainers import Net, Servers, Trainer
from tests.support.threads import at_once
from tests.support.waiting import eventually
from trainer import Executor
from trainer.job import save_load
from transpiler import DistributeTranspiler, DistributeTranspilerConfig, capture

RATE = 0.5
MODES: dict[str, dict[str, Any]] = {
    "geo": {"k_steps": 4},
    "diloco": {"k_steps": 4, "outer_optimizer": {"type": "sgd", "lr": RATE}},
}
Values = dict[str, torch.Tensor]


def net(seed: int = 3) -> nn.Module:
    with seeded(seed):
        return nn.Sequential(nn.Linear(6, 400), nn.Tanh(), nn.Linear(400, 2))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def values(model: nn.Module) -> Values:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def trained(start: Values, data: Any) -> Values:
    """Plain torch, from these values on."""
    model = net()
    model.load_state_dict(start)
    train(model, sgd(model), data)
    return values(model)


def outer_step(start: Values, ends: Sequence[Values]) -> Values:
    """What an outer SGD makes of the trainers' parameters."""
    mean = {name: torch.stack([end[name] for end in ends]).sum(0) / len(ends) for name in start}
    return {name: start[name] - RATE * (start[name] - mean[name]) for name in start}


def assert_close(mine: Values, theirs: Values) -> None:
    for name, value in theirs.items():
        assert torch.allclose(mine[name], value, atol=1e-6), name


class Pair:
    """Two trainers of one job, and what each has of the data."""

    def __init__(self, endpoints: str, mode: str, seed: int = 3) -> None:
        models = [net(seed), net(seed)]
        self.start = values(models[0])
        self.data = [batches(12, seed=number) for number in (1, 2)]
        self.trainers: list[Trainer] = at_once(
            *(lambda n=n: Trainer(endpoints, n, 2, models[n], sgd, **MODES[mode]) for n in (0, 1))
        )

    def train(self, number: int, begin: int, end: int) -> None:
        trainer = self.trainers[number]
        train(trainer.model, trainer.optimizer, self.data[number][begin:end])

    def both(self, play: Any) -> list[Any]:
        return at_once(lambda: play(0), lambda: play(1))

    def finish(self) -> None:
        self.both(lambda number: self.trainers[number].optimizer.close())


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> threading.local:
    """The present job is one of each thread's, as if each were a process."""
    present = threading.local()
    monkeypatch.setattr(save_load, "present", lambda: present.job)
    return present


@pytest.fixture
def held() -> Iterator[tuple[str, list[Server]]]:
    with Server(ServerConfig()) as one, Server(ServerConfig()) as other:
        yield f"{one.endpoint},{other.endpoint}", [one, other]


def on_servers(servers: Sequence[Server], name: str) -> torch.Tensor:
    """A variable as the servers have it in memory."""
    parts: dict[int, torch.Tensor] = {}
    for server in servers:
        installed = server.job.installed()
        for each in installed.plan.placement(name).slices:
            if each.name in installed.slices.values:
                parts[each.begin] = installed.slices.values[each.name].reshape(-1)
    return torch.cat([parts[begin] for begin in sorted(parts)])


@pytest.mark.parametrize("mode", MODES)
def test_save_and_export_give_what_the_servers_hold(
    held: tuple[str, list[Server]], jobs: threading.local, tmp_path: Path, mode: str
) -> None:
    """In the middle of a window, on two trainers: not trainer 0's own copy, which stays as it is;
    a job that resumes from the file begins with those values.
    """
    endpoints, servers = held
    pair = Pair(endpoints, mode)
    pair.both(lambda number: pair.train(number, 0, 6))
    own = values(pair.trainers[0].model)

    def write(number: int) -> None:
        jobs.job = pair.trainers[number].job
        save_load.export(str(tmp_path / "model.pt"))
        save_load.save(str(tmp_path / "saved"))

    pair.both(write)
    exported = torch.load(tmp_path / "model.pt")
    others = pair.trainers[1].job.served()
    assert exported.keys() == others.keys() == own.keys()
    for name, value in exported.items():
        assert torch.equal(value, others[name])
        assert torch.equal(value.reshape(-1), on_servers(servers, name))
        if mode == "diloco":
            assert torch.equal(pair.trainers[0].model.get_parameter(name), own[name])
    assert any(not torch.equal(exported[name], own[name]) for name in own)
    pair.finish()

    later = Pair(endpoints, mode, seed=8)

    def read(number: int) -> int:
        jobs.job = later.trainers[number].job
        return save_load.load(str(tmp_path / "saved"))

    assert later.both(read) == [6, 6]
    for trainer in later.trainers:
        for name, value in values(trainer.model).items():
            assert torch.equal(value, exported[name])
    later.finish()


@pytest.mark.parametrize("steps", [(6, 6), (6, 5), (7, 4), (2, 9), (4, 4)], ids=str)
def test_steps_after_the_last_exchange_are_exchanged_at_finish_in_diloco(
    servers: Servers, steps: tuple[int, int]
) -> None:
    """The divisor is the number of trainers that had steps left; who had none is not awaited."""
    pair = Pair(servers(2), "diloco")

    def play(number: int) -> Values:
        pair.train(number, 0, steps[number])
        pair.trainers[number].optimizer.close()
        return values(pair.trainers[number].model)

    mine = pair.both(play)
    held, ends = pair.start, [pair.start, pair.start]
    for begin in range(0, max(steps), 4):
        taking = [number for number in (0, 1) if steps[number] > begin]
        rounds = [
            trained(held, pair.data[number][begin : min(begin + 4, steps[number])])
            for number in taking
        ]
        held = outer_step(held, rounds)
        for number in taking:
            ends[number] = held
    assert_close(mine[0], ends[0])
    assert_close(mine[1], ends[1])


@pytest.mark.parametrize("steps", [(3, 3), (3, 1), (0, 2)], ids=str)
def test_steps_after_the_last_exchange_are_exchanged_at_finish_in_geo(
    servers: Servers, steps: tuple[int, int]
) -> None:
    """Both trainers' changes are added, and each trainer's model is then what the servers held as
    it left.
    """
    pair = Pair(servers(2), "geo")
    for number in (0, 1):
        pair.train(number, 0, steps[number])
        pair.trainers[number].optimizer.close()

    expected = pair.start
    for number in (0, 1):
        moved = trained(pair.start, pair.data[number][: steps[number]])
        expected = {
            name: expected[name] + (moved[name] - pair.start[name]) / 2 for name in expected
        }
        assert_close(values(pair.trainers[number].model), expected)


@pytest.mark.parametrize("count", [1, 2])
def test_one_geo_trainers_file_is_plain_torchs_to_the_bit(
    servers: Servers, jobs: threading.local, tmp_path: Path, count: int
) -> None:
    """A sum of floats rounds; what rounding has left of a difference is sent, too."""
    trainer = Trainer(servers(count), 0, 1, net(), sgd, **MODES["geo"])
    jobs.job, data = trainer.job, batches(10)
    train(trainer.model, trainer.optimizer, data)
    save_load.export(str(tmp_path / "model.pt"))
    trainer.optimizer.close()

    expected = trained(values(net()), data)
    for name, value in torch.load(tmp_path / "model.pt").items():
        assert torch.equal(value, expected[name])
        assert torch.equal(value, trainer.model.get_parameter(name))


def test_rows_of_a_geo_tables_last_window_arrive_at_finish(servers: Servers) -> None:
    """Of two trainers, with unequal numbers of steps."""
    first, second = at_once(
        lambda: Trainer(servers(2), 0, 2, Net(), k_steps=10),
        lambda: Trainer(servers(2), 1, 2, Net(), k_steps=10),
    )
    for _ in range(3):
        first.add([7, 8], 1.0, dense=1.0)
    second.add([7], 2.0, dense=4.0)
    first.optimizer.close()
    assert second.job.communicator is not None and second.job.communicator.lookups is not None
    second.optimizer.flush()
    rows = second.job.communicator.lookups.pull("emb", torch.tensor([7, 8]))
    second.optimizer.close()

    assert rows[:, 0].tolist() == [(3 + 2) / 2, 3 / 2]
    assert second.model.w.tolist() == [(3 + 4) / 2] * 4


def test_a_failing_trainer_exchanges_nothing(held: tuple[str, list[Server]]) -> None:
    """The other, which waits at its end, is told; the servers keep the last exchange's values."""
    endpoints, servers = held
    pair = Pair(endpoints, "diloco")
    pair.both(lambda number: pair.train(number, 0, 6))
    before = {name: on_servers(servers, name).clone() for name in pair.start}
    installed = [server.job.installed() for server in servers]

    def play(number: int) -> None:
        if number == 0:
            with pytest.raises(JobFailed, match="trainer 1 ended the job: a mistake"):
                pair.trainers[0].optimizer.close()
        else:
            pair.trainers[1].optimizer.close("a mistake")

    pair.both(play)
    assert all(each.version == 1 for each in installed)
    after = {each.name: value for held in installed for each, value in _slices(held, pair.start)}
    assert after and all(
        torch.equal(value.reshape(-1), _part(before, installed[0], name))
        for name, value in after.items()
    )


def _slices(installed: Any, names: Any) -> Iterator[tuple[Any, torch.Tensor]]:
    for name in names:
        for each in installed.plan.placement(name).slices:
            if each.name in installed.slices.values:
                yield each, installed.slices.values[each.name]


def _part(whole: Values, installed: Any, name: str) -> torch.Tensor:
    for placement in installed.plan.placements:
        for each in placement.slices:
            if each.name == name:
                return whole[placement.name][each.begin : each.end]
    raise KeyError(name)


def test_nobody_waits_for_a_trainer_whose_last_step_has_come(servers: Servers) -> None:
    """One trainer finishes with steps left while the other is at a barrier, and then trains on: the
    next exchange is of both.
    """
    pair = Pair(servers(2), "diloco")

    def play(number: int) -> None:
        pair.train(number, 0, 2)
        if number == 1:
            pair.trainers[1].optimizer.barrier("a barrier")
            pair.train(1, 2, 4)
        pair.trainers[number].optimizer.close()

    pair.both(play)
    ends = [trained(pair.start, pair.data[0][:2]), trained(pair.start, pair.data[1][:4])]
    assert_close(values(pair.trainers[1].model), outer_step(pair.start, ends))
    assert_close(values(pair.trainers[0].model), outer_step(pair.start, ends))


def test_a_window_begins_anew_when_values_are_loaded(servers: Servers) -> None:
    """Steps that were never exchanged do not count towards the next exchange."""
    trainer = Trainer(servers(1), 0, 1, net(), sgd, **MODES["diloco"])
    train(trainer.model, trainer.optimizer, batches(3))
    trainer.job.loaded()
    for count, expected in ((3, 0), (1, 1)):
        train(trainer.model, trainer.optimizer, batches(count))
        assert trainer.job.communicator is not None
        assert trainer.job.communicator.metrics()["messages"] == expected
    trainer.optimizer.close()


def test_a_program_exchanges_its_last_steps_when_the_executor_closes() -> None:
    """Geo, the steps of two trainers, fewer than a window."""
    models = [net(), net()]
    start = expected = values(models[0])
    data = [batches(3 - number, seed=number + 1) for number in (0, 1)]
    config = DistributeTranspilerConfig(geo_sgd_mode=True, geo_sgd_need_push_nums=10)
    joined = threading.Barrier(2, timeout=20)
    running = [Server(ServerConfig()) for _ in range(2)]

    def first_has_finished() -> bool:
        return all(
            trainer.state == "finished"
            for server in running
            for trainer in server.job.status(StatusRequest()).trainers
            if trainer.trainer_id == 0
        )

    def play(number: int) -> None:
        startup, main = programs[number]
        with Executor() as executor:
            executor.run(startup)
            joined.wait()
            for batch in data[number]:
                executor.run(main, feed=batch)
            if number == 1:  # its last exchange comes second
                eventually(first_has_finished)

    with ExitStack() as stack:
        endpoints = ",".join(stack.enter_context(server).endpoint for server in running)
        programs = []
        for number, model in enumerate(models):
            main, startup = capture(model, _loss, sgd(model), data[0][0])
            transpiler = DistributeTranspiler(config)
            transpiler.transpile(number, main, endpoints, 2, startup_program=startup)
            programs.append((transpiler.get_startup_program(), transpiler.get_trainer_program()))
        at_once(lambda: play(0), lambda: play(1))
    for number, model in enumerate(models):
        moved = trained(start, data[number])
        expected = {name: expected[name] + (moved[name] - start[name]) / 2 for name in expected}
        assert_close(values(model), expected)


def _loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)
