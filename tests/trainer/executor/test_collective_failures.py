"""Programs without servers that cannot go on: who is lost, late or different is said on every
trainer.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from pserver.errors import (
    FingerprintMismatch,
    JobFailed,
    Refused,
    TimedOut,
    TrainerLost,
    Unreachable,
)
from tests.support.collective_trainers import (
    DEADLINE,
    GRAD,
    Trainer,
    batches,
    fine,
    ports,
    together,
)
from trainer import Executor
from trainer.collective.rendezvous import connect_store, rendezvous
from trainer.environment.environment import Connection


def test_a_trainer_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever came says after the deadline who did not, with its endpoint; without trainer 0, that
    it does not answer.
    """
    monkeypatch.setenv("PSERVER_START_TIMEOUT", "0.5")
    endpoints = ports(3)
    team = [Trainer(endpoints, rank, GRAD) for rank in range(3)]
    errors = together(2, lambda rank: team[rank].train([]))
    for error in errors:
        assert isinstance(error, TimedOut | TrainerLost)
        assert f"trainer 2 ({endpoints[2]})" in str(error) and "after 0.5 s" in str(error)
    endpoints, began = ports(2), time.monotonic()
    with pytest.raises(
        Unreachable, match=f"trainer 1 waited 0.5 s for trainer 0 \\({endpoints[0]}\\)"
    ):
        Trainer(endpoints, 1, GRAD).train([])
    assert time.monotonic() - began < 5


def test_without_wait_port_the_others_are_expected_to_be_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """wait_port is recorded in the program; without it the wait is that for a sign of life, not
    that for a start.
    """
    monkeypatch.setenv("PSERVER_HEARTBEAT_TIMEOUT", "0.3")
    endpoints = ports(2)
    trainer = Trainer(endpoints, 1, GRAD)
    assert trainer.startup.deployment is not None
    startup = replace(
        trainer.startup, deployment=replace(trainer.startup.deployment, wait_port=False)
    )
    with pytest.raises(Unreachable, match="waited 0.3 s"), Executor() as executor:
        executor.run(startup)


def test_trainers_with_different_programs_are_told_apart() -> None:
    """All of them learn who runs something else than trainer 0, and what."""
    endpoints = ports(3)
    team = [Trainer(endpoints, rank, GRAD, lr=0.2 if rank == 2 else 0.1) for rank in range(3)]
    for error in together(3, lambda rank: team[rank].train([])):
        assert isinstance(error, FingerprintMismatch)
        assert f"trainer 2 ({endpoints[2]}) has" in str(
            error
        ) and "lr: 0.2 (trainer 0 has 0.1)" in str(error)
        assert "trainer 1" not in str(error)


def test_two_processes_with_one_number_are_refused() -> None:
    """The second one is told who the first is."""
    endpoints = ports(2)
    host, _, port = endpoints[0].rpartition(":")
    store = connect_store(host, int(port), 0, Connection())
    store.set("pserver/1/process/0", "elsewhere:17")
    with pytest.raises(
        Refused,
        match="trainer 0 .*expected one process, got two: elsewhere:17 and this one, "
        f".*:{os.getpid()}$",
    ):
        rendezvous(store, 0, endpoints, Connection(start_timeout_seconds=1.0))


def test_different_numbers_of_steps_end_in_words() -> None:
    """A trainer that has taken its last step and left is named to those that wait for it in a
    further one.
    """
    endpoints, data = ports(2), batches(2, 2)
    team = [Trainer(endpoints, rank, GRAD) for rank in range(2)]
    results = together(2, lambda rank: team[rank].train([row[rank] for row in data[: 2 - rank]]))
    assert not isinstance(results[1], BaseException)
    assert isinstance(results[0], TrainerLost)
    assert f"trainer 1 ({endpoints[1]}) has left the job" in str(results[0])
    assert "step 2" in str(results[0]) and "all trainers run the same number of steps" in str(
        results[0]
    )


def test_everybody_learns_who_is_lost() -> None:
    """When one of three falls silent in the middle of a step both others, whose connections to it
    still stand, are told who.
    """
    endpoints, data, over = ports(3), batches(3, 1), threading.Event()
    team = [Trainer(endpoints, rank, GRAD) for rank in range(3)]

    def act(rank: int) -> Any:
        with Executor() as executor:
            executor.run(team[rank].startup)
            executor.run(team[rank].main, feed=data[0][rank])
            if rank < 2:
                return executor.run(team[rank].main, feed=data[0][rank])
            world = executor._collectives[0]._job.world
            assert world is not None and world.peers.membership is not None
            # as the kernel does for a process that dies
            world.peers.membership._peers[0].connection.shutdown(socket.SHUT_RDWR)
            assert over.wait(DEADLINE)

    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(act, rank) for rank in range(3)]
        errors = [each.exception(DEADLINE) for each in running[:2]]
        over.set()
    for rank, error in enumerate(errors):
        assert isinstance(error, TrainerLost) and f"trainer 2 ({endpoints[2]}) is lost" in str(
            error
        )
        assert f"trainer {rank} ({endpoints[rank]}) is in c_allreduce_sum" in str(
            error
        ) and "step 2" in str(error)


def test_a_long_wait_says_for_whom(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log of a trainer that waits names the one that is behind; nobody is lost by it, however
    long it takes.
    """
    monkeypatch.setattr("pserver.polling.NOTICE_SECONDS", 0.2)
    endpoints, data = ports(2), batches(2, 1)
    team = [Trainer(endpoints, rank, GRAD) for rank in range(2)]
    what = "c_allreduce_sum of 4.bias@GRAD to 0.weight@GRAD (bucket 0, step 1)"
    said = f"trainer 0 has waited long in {what}, for trainer 1 ({endpoints[1]})"

    def act(rank: int) -> None:
        with Executor() as executor:
            executor.run(team[rank].startup)
            end = time.monotonic() + DEADLINE
            while rank == 1 and said not in caplog.text:
                assert time.monotonic() < end, caplog.text
                threading.Event().wait(0.01)
            executor.run(team[rank].main, feed=data[0][rank])

    fine(together(2, act))


def test_an_error_of_one_trainer_reaches_the_others() -> None:
    """What one trainer raises inside its Executor ends the others' wait, in its words."""
    endpoints, data = ports(2), batches(2, 1)
    team = [Trainer(endpoints, rank, GRAD) for rank in range(2)]
    feeds = [data[0][0], (data[0][1][0], torch.full((4,), 99))]
    errors = together(2, lambda rank: team[rank].train([feeds[rank]]))
    assert isinstance(errors[1], IndexError)
    assert isinstance(
        errors[0], JobFailed
    ) and f"trainer 1 ({endpoints[1]}) failed (IndexError: Target 99" in str(errors[0])


def test_a_run_that_failed_in_the_middle_cannot_go_on() -> None:
    """After a step that broke off with sums on their way the next run says so, instead of adding up
    different steps.
    """
    endpoints, data = ports(2), batches(2, 1)
    team = [Trainer(endpoints, rank, GRAD) for rank in range(2)]

    def act(rank: int) -> None:
        with Executor() as executor:
            executor.run(team[rank].startup)
            executor.run(team[rank].main, feed=data[0][rank])
            if rank == 0:
                runtime = executor._collectives[0]
                # as a compute op's error leaves it
                runtime._filling[0] = [("4.weight@GRAD", torch.zeros(3, 8))]
                executor.run(team[rank].main, feed=data[0][rank])

    errors = together(2, act)
    assert (
        errors[1] is None
        and isinstance(errors[0], JobFailed)
        and "ended in the middle of step 1" in str(errors[0])
    )


def test_the_startup_program_comes_first() -> None:
    """A main program whose rings have not begun says what to run."""
    with (
        pytest.raises(
            ValueError, match="ring 0 has not begun; run the trainer's startup program first"
        ),
        Executor() as executor,
    ):
        executor.run(Trainer(ports(1), 0, GRAD).main, feed=batches(1)[0][0])


def test_close_takes_the_groups_down_and_trainers_can_meet_again() -> None:
    """After close the store's port is free, and a further run of the startup program meets the
    others anew, whoever is first.
    """
    endpoints, data = ports(2), batches(2, 1)
    team = [Trainer(endpoints, rank, GRAD) for rank in range(2)]
    for _ in range(3):
        fine(together(2, lambda rank: team[rank].train([row[rank] for row in data])))
    host, _, port = endpoints[0].rpartition(":")
    socket.create_server((host, int(port))).close()
    assert all(map(torch.equal, *(list(each.model.parameters()) for each in team)))
