"""Large steps: slices side by side, and answers that begin before the update has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pserver.client.client import Client, Identity
from pserver.client.replies import Reply
from pserver.config import ServerConfig
from pserver.dense import update as slice_update
from pserver.job import program
from pserver.lane.tasks import Batch, UpdateTask, Workers
from pserver.membership.waits import Waits
from pserver.service.server import Server
from transpiler.distribute import plan_parameters, pserver_program
from transpiler.ir.rules import Rule
from transpiler.plan.plan import Deployment, Plan

SECONDS = 10.0
NUMBERS = {"lr": 0.5, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}
NAMES, ELEMENTS = ("a", "b"), 400_000  # 1.6 MB each: a large step, and frames of their own


def plan() -> Plan:
    """Two slices on one server, sync."""
    return plan_parameters(
        [(name, (ELEMENTS,), "float32", 0) for name in NAMES],
        [Rule("sgd", NUMBERS, {})],
        trainers=1,
        servers=1,
    )


class Trainer:
    """The only trainer of a job; ``arrived(name)`` is called when a part of a value comes."""

    def __init__(self, endpoint: str, arrived: Callable[[str], object]) -> None:
        self.values = {name: torch.ones(ELEMENTS) for name in NAMES}
        self._arrived: Callable[[str], object] = lambda name: None
        identity = Identity(0, "first", plan().fingerprint(), plan().manifest(), ("tcp",))
        self.client = Client(endpoint, 0, identity, SECONDS, SECONDS, 1)
        self.client.join()
        self.client.install(pserver_program(Deployment(plan(), (endpoint,), server_index=0)))
        self.client.channels[0].load(self.values.items()).result(timeout=SECONDS)
        self._arrived = arrived

    def _destination(self, name: str, blank: object) -> torch.Tensor:
        self._arrived(name)
        return self.values[name]

    def step(self) -> Reply:
        """A step whose gradients are 1."""
        channel = self.client.channels[0]
        reply = channel.begin(self._destination)
        channel.push(1, [(name, torch.ones(ELEMENTS)) for name in NAMES])
        channel.commit(1, {0: NUMBERS})
        return reply.result(timeout=SECONDS)


def updates(monkeypatch: pytest.MonkeyPatch, before: Callable[[str], object]) -> None:
    """``before(name)`` is called before each slice's update."""
    right = slice_update.SliceUpdate.update

    def update(self: slice_update.SliceUpdate, *arguments: Any, **named: Any) -> None:
        before(self.slice)
        right(self, *arguments, **named)

    monkeypatch.setattr(slice_update, "JOINT_BYTES", 1)
    monkeypatch.setattr(slice_update.SliceUpdate, "update", update)


@pytest.fixture
def server() -> Iterator[Server]:
    """Over TCP."""
    with Server(ServerConfig(transport="tcp")) as running:
        yield running


def test_a_slice_leaves_while_another_is_updated(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second slice's update waits until the trainer has received the first one's new value."""
    monkeypatch.setattr(program, "Workers", lambda threads: Workers(2))
    came, seen = threading.Event(), list[bool]()
    updates(monkeypatch, lambda name: name == "b" and seen.append(came.wait(SECONDS)))

    trainer = Trainer(server.endpoint, lambda name: name == "a" and came.set())
    done = trainer.step()
    trainer.client.leave()

    assert seen == [True] and done.version == 1
    assert all(
        torch.equal(value, torch.full((ELEMENTS,), 0.5)) for value in trainer.values.values()
    )


def test_slices_are_updated_side_by_side(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two threads each of two updates waits until the other one runs too."""
    monkeypatch.setattr(program, "Workers", lambda threads: Workers(2))
    both = threading.Barrier(2)
    updates(monkeypatch, lambda name: both.wait(SECONDS))

    trainer = Trainer(server.endpoint, lambda name: None)
    done = trainer.step()
    trainer.client.leave()

    assert done.version == 1
    assert all(
        torch.equal(value, torch.full((ELEMENTS,), 0.5)) for value in trainer.values.values()
    )


def test_an_update_that_fails_ends_for_everybody() -> None:
    """What is left of it is not done, it is never over, and its end is told once, when nothing of
    it runs any more.
    """
    both, ends = threading.Barrier(2), list[BaseException | None]()

    def work(batch: Batch) -> None:
        both.wait(SECONDS)
        if batch == ("1",):
            raise ValueError("no update")

    progress = UpdateTask(Waits(), [("0",), ("1",), ("2",)], work, ends.append)
    failed: list[bool] = []

    def advance() -> None:
        try:
            progress.advance(2)
        except ValueError:
            failed.append(True)

    threads = [threading.Thread(target=advance) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)

    assert failed == [True] and not progress.finished and isinstance(progress.failure, ValueError)
    assert ends == [progress.failure] and not progress.advance(2)


def test_only_the_updating_threads_divide_nothing() -> None:
    """Threads that go side by side compute alone, and torch's number stays what it is for everybody
    else.
    """
    before, hparams, ended = torch.get_num_threads(), list[int](), threading.Semaphore(0)
    both = threading.Barrier(2)
    torch.set_num_threads(2)
    try:

        def task(number: int) -> None:
            both.wait(SECONDS)  # so that both threads have begun
            hparams.append(torch.get_num_threads())
            ended.release()

        workers = Workers(2)
        workers.start(task, [1, 1])
        assert ended.acquire(timeout=SECONDS) and ended.acquire(timeout=SECONDS)
        later = threading.Thread(target=lambda: hparams.append(torch.get_num_threads()))
        later.start()
        later.join(SECONDS)
        assert hparams == [1, 1, 2] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
