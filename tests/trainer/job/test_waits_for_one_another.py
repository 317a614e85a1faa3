"""Trainers that wait for one another, one of them for samples: saves of the job's own give way,
what scripts have asked for fails the job, and each one says for whom it waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pserver.client.replies import PutOff
from pserver.config import ServerConfig
from pserver.errors import JobFailed
from pserver.service.server import Server
from pserver.wire_pb2 import StatusRequest
from tests.support.threaded_scripts import SAMPLES, Script, kill
from tests.support.threads import at_once
from tests.support.tiers import RARE
from tests.support.waiting import eventually
from trainer.communicator.joint_calls import Apart
from trainer.job import save_load
from trainer.job.shared_values import values_of

pytestmark = pytest.mark.timeout(60)

TIMEOUT = 6.0


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(ServerConfig(heartbeat_timeout_seconds=TIMEOUT)) as one:
        yield one


def pair(server: Server, **settings: Any) -> list[Script]:
    return at_once(*(lambda n=n: Script([server], n, **settings) for n in (0, 1)))  # type: ignore[misc]  # of lambdas


def calls() -> dict[str, Callable[[Script], object]]:
    """Calls that all trainers make, as one of them makes them alone."""
    return {
        "barrier": lambda script: script.meet("here"),
        "save": lambda script: save_load._save(script.job, "unused", None, False),
        "all_reduce": lambda script: values_of(script.job).all_reduce(torch.ones(1)),
    }


@pytest.mark.parametrize("call", ["barrier", RARE("save"), "all_reduce"])
def test_a_call_in_the_middle_of_a_pass_fails_the_job(
    server: Server, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The other trainer waits for the samples that this one has: both hear who waits for whom,
    within the heartbeat timeout.
    """
    caplog.set_level(logging.WARNING)
    one, other = pair(server)
    began = time.monotonic()

    def waits_for_samples() -> str:
        with pytest.raises(JobFailed) as raised:
            for _ in one.shard():
                one.step()
        one.job.communicator.leave(str(raised.value))
        return str(raised.value)

    def stops_in_the_middle() -> str:
        batches = iter(other.shard())
        next(batches)
        with pytest.raises(JobFailed) as raised:
            calls()[call](other)
        other.job.communicator.leave(str(raised.value))
        return str(raised.value)

    for said in at_once(waits_for_samples, stops_in_the_middle):
        assert "trainer 0 waits at samples of pass 0 for trainer 1" in said
        assert "trainer 1 waits at barrier" in said and "for trainer 0" in said
    assert time.monotonic() - began < 2 * TIMEOUT
    for each in (one, other):
        each.job.restore()


def test_one_who_finishes_in_the_middle_of_a_pass_is_not_awaited(server: Server) -> None:
    """The other one gets its samples."""
    one, other = pair(server)
    begun = threading.Event()

    def trains() -> int:
        assert begun.wait(10)
        count = 0
        for batch in one.shard():
            one.step()
            count += len(batch)
        one.finish()
        return count

    def finishes() -> int:
        batches = iter(other.shard())
        next(batches)
        begun.set()
        other.finish()
        return 0

    assert at_once(trains, finishes)[0] == SAMPLES


def test_a_save_gives_way_to_a_step(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """One who comes to it while the other waits for its step: the save is put off, for both, with
    one line, and they step on.
    """
    caplog.set_level(logging.WARNING)
    one, other = pair(server, a_sync=False)
    meetings = [Apart(each.job.communicator.joint) for each in (one, other)]

    def saves() -> str:
        with pytest.raises(PutOff) as raised:
            meetings[0].barrier("automatic save 1.1")
        one.step()
        return str(raised.value)

    def steps() -> str:
        other.step()
        with pytest.raises(PutOff) as raised:  # it comes late, and hears the same
            meetings[1].barrier("automatic save 1.1")
        return str(raised.value)

    said = at_once(saves, steps)
    assert said[0] == said[1]
    assert "trainer 0 waits at automatic save 1.1 for trainer 1" in said[0]
    assert "trainer 1 waits at step 1 for trainer 0" in said[0]
    lines = [each for each in caplog.messages if "automatic save 1.1 is put off" in each]
    assert len(lines) == 1
    at_once(one.step, other.step)
    at_once(one.finish, other.finish)


def test_a_trainer_says_for_whom_it_waits(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """For samples too: once for each wait that lasts; and the status has all of them."""
    caplog.set_level(logging.WARNING)
    one, other = pair(server)
    told, begun = threading.Event(), threading.Event()

    def trains() -> None:
        assert begun.wait(10)
        for _ in one.shard():
            one.step()
        one.finish()

    def computes_for_long() -> None:
        batches = iter(other.shard())
        next(batches)
        begun.set()
        assert told.wait(20)
        other.step()
        for _ in batches:
            other.step()
        other.finish()

    def watches() -> list[str]:
        wanted = "this trainer waits at samples of pass 0 for trainer 1"
        eventually(lambda: any(wanted in each for each in caplog.messages))
        waits = server.job.status(StatusRequest()).waits
        told.set()
        assert sum(wanted in each for each in caplog.messages) == 1
        return [f"{w.trainer_id} {w.kind} {w.what} {list(w.for_whom)}" for w in waits]

    found = at_once(trains, computes_for_long, watches)[2]
    assert found == ["0 samples samples of pass 0 [1]"]


def test_one_who_comes_between_two_exchanges_counts_the_steps_of_the_others(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """So it saves after the same ones, and no save is put off; and what it has left of a pass is
    its own again, although the process before had broken off.
    """
    caplog.set_level(logging.WARNING)
    folder = str(tmp_path / "saved")
    settings = {"k_steps": 2, "outer_optimizer": {"type": "sgd", "lr": 1.0}}
    make = partial(Script, [server], checkpoint=folder, a_sync_configs=settings)
    one, other = at_once(partial(make, 0), partial(make, 1))
    died, back = threading.Event(), threading.Event()

    def stays() -> None:
        for _ in range(2):
            for number, _ in enumerate(one.shard(), 1):
                if number == 4:
                    assert died.wait(20)
                if number == 6:
                    assert back.wait(20)
                one.step()
        one.finish()

    def comes_back() -> None:
        for number, _ in enumerate(other.shard(), 1):
            other.step()
            if number == 3:
                break
        other.optimizer.flush()
        kill([server], other)
        died.set()
        again = make(1)
        back.set()
        for _ in range(2):
            for _ in again.shard():
                again.step()
        again.finish()

    at_once(stays, comes_back)
    assert not [each for each in caplog.messages if "put off" in each]
