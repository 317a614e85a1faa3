"""Programs of mixed jobs whose trainers come and go: two of them in threads, over a real server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pserver.config import ServerConfig
from pserver.service.server import Server
from pserver.wire_pb2 import AnnounceRequest
from tests.support.eager_modes import strategy_of
from trainer import DistributedEmbedding, Executor, Uniform
from transpiler import ClipGradByGlobalNorm, DistributeTranspiler, capture
from transpiler.program import Program

STEPS, AT = 6, 3
IDS = torch.arange(8)
MODES = {"emb": "sync", "out.bias": "sync", "*": "collective"}


class Net(nn.Module):
    """A table, and two dense layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.emb = DistributedEmbedding(4, num_embeddings=8, init=Uniform(-1, 1))
        self.hidden = nn.Linear(4, 5)
        self.out = nn.Linear(5, 3)

    def forward(self, ids: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.hidden(self.emb(ids)).tanh()).square().mean() * factor
        return out


class Killed(Exception):
    """What ends the thread of a trainer that dies."""


class Player:
    """One trainer of two.

    Args:
        folder: through which its programs go, so that they have no live optimizer; None: they do
            not.
    """

    def __init__(
        self,
        endpoint: str,
        number: int,
        modes: dict[str, str],
        folder: Path | None = None,
        **arguments: Any,
    ) -> None:
        model = Net()
        adam = torch.optim.Adam(model.parameters(), lr=0.05)
        self.factor = torch.tensor(number + 1.0)
        main, startup = capture(model, Net.__call__, adam, (IDS, self.factor), **arguments)
        job = DistributeTranspiler()
        steps = {"k_steps": 2} if "geo" in modes.values() else {}
        strategy = strategy_of(modes=modes, **steps)
        job.transpile(number, main, endpoint, 2, startup_program=startup, strategy=strategy)
        self.main, self.startup = job.get_trainer_program(), job.get_startup_program()
        if folder is not None:
            self.startup, self.main = (
                _through(each, folder / "program") for each in (self.startup, self.main)
            )
        self.executor, self.joined = Executor(), False

    def join(self) -> None:
        """Comes to the others."""
        self.joined = True
        self.executor.run(self.startup)
        storage = self.main.storage
        assert storage is not None
        self.storage, self.communicator = storage, self.executor._runtimes[0].communicator

    @property
    def steps(self) -> int:
        """That it knows of."""
        return self.executor.steps(self.main)

    def step(self) -> None:
        """One of the job's."""
        self.executor.run(self.main, feed=(IDS, self.factor))

    def ends(self) -> dict[str, torch.Tensor]:
        """Values, and optimizer states, at the job's end."""
        self.executor.close()
        values = {name: value.detach() for name, value in self.storage.tensors.items()}
        for name in values.keys() & {"hidden.weight", "hidden.bias", "out.weight"}:
            states = self.storage.states_of(name)
            values |= {f"{name}@{key}": torch.as_tensor(state) for key, state in states.items()}
        return values


def _through(program: Program, path: Path) -> Program:
    program.save(path)
    return Program.load(path)


@pytest.fixture
def server() -> Iterator[Callable[..., Server]]:
    running = list[Server]()

    def begin(**settings: Any) -> Server:
        running.append(Server(ServerConfig(heartbeat_timeout_seconds=20.0, **settings)))
        running[-1].__enter__()
        return running[-1]

    yield begin
    for each in running:
        each.__exit__(None, None, None)


def played(player: Player, until: int = STEPS) -> dict[str, torch.Tensor]:
    if not player.joined:
        player.join()
    while player.steps < until:
        player.step()
    return player.ends()


def undisturbed(server: Server, *arguments: Any, **named: Any) -> dict[str, torch.Tensor]:
    """What both trainers have at the end of a job that nobody leaves."""
    players = [Player(server.endpoint, number, *arguments, **named) for number in range(2)]
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(played, players)
    assert_equal(one, other)
    return one


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys() and any("exp_avg_sq" in name for name in one)
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def die(player: Player) -> None:
    """It takes its steps up to one, and is killed when it closes that."""

    def killed(*arguments: Any) -> None:
        raise Killed

    if not player.joined:
        player.join()
    while player.steps < AT:
        player.step()
    player.communicator.close_step = killed  # type: ignore[method-assign]
    with pytest.raises(Killed):
        player.step()


@pytest.mark.parametrize("loaded", [False, True])
def test_a_process_that_takes_the_place_has_values_and_states(
    server: Callable[..., Server], tmp_path: Path, loaded: bool
) -> None:
    """Those of the averaged parameters, from the other trainer: all ends as without a loss, to the
    bit, also where programs come from files and keep states without a live optimizer.
    """
    place = server()
    folder = tmp_path if loaded else None
    one, two, another = (Player(place.endpoint, each, MODES, folder) for each in (0, 1, 1))

    def replaced() -> dict[str, torch.Tensor]:
        die(two)
        place.job.announce(AnnounceRequest(trainer_id=1, failure="killed"))
        return played(another)

    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(played, one), pool.submit(replaced)]
        ends = [each.result(90.0) for each in found]

    assert_equal(*ends)
    assert_equal(ends[0], undisturbed(server(), MODES, folder))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_trainer_that_comes_later_begins_at_the_step_of_the_job(
    server: Callable[..., Server], mode: str
) -> None:
    """With ``--min-trainers``: from there on both have the same averaged parameters, and states."""
    place, going, met = server(min_trainers=1), threading.Event(), threading.Event()
    modes = {"emb": mode, "*": "collective"}
    one, two = (Player(place.endpoint, number, modes) for number in range(2))
    begun = 0

    def first() -> dict[str, torch.Tensor]:
        one.join()
        while not met.is_set() or one.steps < begun + STEPS:
            one.step()
            if one.steps >= AT:
                going.set()
        return one.ends()

    def second() -> dict[str, torch.Tensor]:
        nonlocal begun
        assert going.wait(30.0)
        two.join()
        begun = two.steps
        met.set()  # in each average there are both now
        return played(two, begun + STEPS)

    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(each) for each in (first, second)]
        ends = [each.result(60.0) for each in found]

    assert begun >= AT and one.steps == two.steps == begun + STEPS
    assert_equal(*ends)


def test_parameters_of_every_kind_stand_in_one_program(server: Callable[..., Server]) -> None:
    """Those of a sync lane, those that a trainer steps by itself, and averaged ones, whose trainer
    is lost: the other one goes on.
    """
    place = server()
    modes = {"emb": "async", "out.bias": "geo", "out.weight": "sync", "*": "collective"}
    clip = ClipGradByGlobalNorm(0.1)
    one, two = (Player(place.endpoint, each, modes, grad_clip=clip) for each in range(2))

    def lost() -> None:
        die(two)
        place.job.announce(AnnounceRequest(trainer_id=1, failure="killed", unreplaced=True))

    with ThreadPoolExecutor(2) as pool:
        gone, left = pool.submit(lost), pool.submit(played, one)
        gone.result(60.0)
        ends = left.result(60.0)

    assert one.steps == STEPS and ends["hidden.weight@step"] == STEPS
    assert all(value.isfinite().all() for value in ends.values())
