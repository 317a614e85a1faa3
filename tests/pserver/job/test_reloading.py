"""A server that was lost comes back from what it has saved, while its job goes on: the jobs of two
servers in this process, whose second one is made anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pserver.errors import FingerprintMismatch, ServerLost, UnknownSession
from pserver.membership.decisions import process_of
from pserver.service.server_metrics import ServerMetrics
from pserver.wire_pb2 import (
    HeartbeatRequest,
    LeaveRequest,
    StatusRequest,
)
from tests.support.job_frames import DEADLINE
from tests.support.reloading_jobs import Part, World, plan_of, until


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.end()


def test_a_server_goes_on_from_its_save_and_the_next_steps_count(
    world: World, tmp_path: Path
) -> None:
    """What was decided since the save is lost there, and nowhere else; it is counted and said."""
    world.step(0, 1)
    path = world.save(tmp_path)
    for number, step in ((0, 2), (1, 1), (1, 2)):
        world.step(number, step)
    world.lose()
    world.again(path)
    replies = [world.rejoin(number) for number in (0, 1)]

    assert [list(each.steps) for each in replies] == [[2], [2]]
    status = world.one.job.status(StatusRequest())
    assert (status.reload.file, status.reload.steps) == (path, 3)
    assert dict(status.reload.steps_by_trainer) == {0: 1, 1: 2}
    (said,) = [each.text for each in status.events if each.kind == "reloaded"]
    assert "3 decided steps since then are lost here (trainer 0: 1, trainer 1: 2)" in said
    metrics = {each.name: each for each in ServerMetrics(world.one.job, "", None).collect()}
    samples = metrics["pserver_lost_steps"].samples
    assert {each.labels["trainer"]: each.value for each in samples} == {"0": 1.0, "1": 2.0}
    w, b = world.step(0, 3)
    assert torch.equal(w, torch.full((2, 3), 1 - 5 * 0.5))
    assert torch.equal(b, torch.full((3,), 1 - 2 * 0.5))
    assert [each.job.failure for each in (world.zero, world.one)] == [None, None]


def test_a_step_waits_for_the_server_and_counts_once(world: World, tmp_path: Path) -> None:
    """Server 0 holds it undecided; the trainer sends it to the other one again."""
    world.step(0, 1)
    path = world.save(tmp_path)
    world.lose()
    until(lambda: list(world.zero.job.status(StatusRequest()).away) == [1])
    held = world.pool.submit(world.trainers[0][0].take, 2)
    until(lambda: world.zero.job.installed().lanes[0].undecided == 1)
    world.again(path)
    world.rejoin(0)
    b = world.trainers[0][1].take(2)

    assert torch.equal(held.result(DEADLINE), torch.zeros(2, 3))
    assert torch.equal(b, torch.zeros(3))
    assert world.one.job.status(StatusRequest()).reload.steps == 0
    assert not world.zero.job.status(StatusRequest()).away


def test_a_step_that_was_decided_is_answered_and_not_taken_again(
    world: World, tmp_path: Path
) -> None:
    """The trainer has not heard of it, as the server died; it is among those that are lost."""
    path = world.save(tmp_path)
    world.step(0, 1)
    world.lose()
    world.again(path)
    world.rejoin(0)

    assert torch.equal(world.trainers[0][1].take(1), torch.ones(3))
    assert torch.equal(world.step(0, 2)[1], torch.full((3,), 0.5))


def test_it_comes_back_twice_and_counts_all_that_was_lost(world: World, tmp_path: Path) -> None:
    """From a save that was made before its first loss, and from a later one."""
    first = world.save(tmp_path / "first")
    world.step(0, 1)
    world.lose()
    world.again(first)
    world.rejoin(0)
    world.step(0, 2)
    second = world.save(tmp_path / "second")
    world.step(0, 3)
    world.lose()
    world.again(second)
    world.rejoin(0)
    assert world.one.job.status(StatusRequest()).reload.steps == 2  # 1 and 3
    world.lose()
    world.again(first)
    world.rejoin(0)

    assert world.one.job.status(StatusRequest()).reload.steps == 3


@pytest.mark.parametrize("lost", [False, True])
def test_what_it_saves_has_trainers_that_are_not_back(
    world: World, tmp_path: Path, lost: bool
) -> None:
    """And those that were lost before it came back: their steps are not counted once more."""
    for number in (0, 1):
        world.step(number, 1)
    first = world.save(tmp_path / "first")
    world.step(1, 2)
    if lost:
        part = world.trainers[1][0]
        with part.job.condition:
            part.job._silent(process_of(part.job.member(part.session)), "trainer 1 is gone")
    world.lose()
    world.again(first)
    world.rejoin(0)
    second = world.save(tmp_path / "second")
    world.step(0, 2)
    world.lose()
    world.again(second)
    world.rejoin(0)

    status = world.one.job.status(StatusRequest())
    assert dict(status.reload.steps_by_trainer) == {0: 1, 1: 1}


def test_it_knows_who_has_left(world: World, tmp_path: Path) -> None:
    """Nobody waits for a trainer that was preempted."""
    path = world.save(tmp_path)
    for part in world.trainers[1]:
        part.job.leave(LeaveRequest(session=part.session, success=True, preempted=True, step=4))
    world.lose()
    world.again(path)
    world.rejoin(0)
    states = {
        each.trainer_id: each.state for each in world.one.job.status(StatusRequest()).trainers
    }
    assert states == {0: "joined", 1: "preempted"}
    assert torch.equal(world.step(0, 1)[1], torch.full((3,), 0.5))


def test_a_trainer_that_joins_meanwhile_waits_for_it(world: World, tmp_path: Path) -> None:
    """Its first step is that of the slowest, on both servers."""
    path = world.save(tmp_path)
    world.step(0, 1)
    part = world.trainers[1][0]
    with part.job.condition:
        part.job._silent(process_of(part.job.member(part.session)), "trainer 1 is gone")
    world.lose()
    world.again(path)
    world.trainers[1] = world.trainer(1, "another")
    world.rejoin(0)

    assert torch.equal(world.step(1, 2)[0], torch.zeros(2, 3))
    assert torch.equal(world.step(0, 2)[1], torch.zeros(3))


def test_a_server_that_does_not_come_back_ends_the_job(world: World) -> None:
    """After the start timeout, with the reason."""
    world.lose()
    until(lambda: list(world.zero.job.status(StatusRequest()).away) == [1])
    held = world.pool.submit(world.trainers[0][0].take, 1)
    until(lambda: world.zero.job.installed().lanes[0].undecided == 1)
    for later in (0.0, 301.0):
        world.clock.time += later
        for parts in world.trainers:
            world.zero.job.heartbeat(HeartbeatRequest(session=parts[0].session))
        world.zero.job.tick()

    with pytest.raises(ServerLost, match="server 1 has not come back within 300 s"):
        held.result(DEADLINE)


@pytest.mark.parametrize(("mode", "settings"), [("async", {"await_servers": False}), ("sync", {})])
def test_other_jobs_end_with_a_server(mode: str, settings: dict[str, object]) -> None:
    """Those that do not await servers, and those whose steps need all trainers."""
    world = World(mode, **settings)
    try:
        assert not world.zero.job.status(StatusRequest()).awaits_servers
        held = world.pool.submit(world.trainers[0][0].take, 1)
        other = world.pool.submit(world.trainers[1][0].take, 1)
        until(lambda: world.zero.job.installed().lanes[0].undecided == 2)
        world.lose()

        for each in (held, other):
            with pytest.raises(ServerLost, match="server 1 is gone"):
                each.result(DEADLINE)
    finally:
        world.end()


def test_a_save_of_another_plan_ends_the_server(world: World, tmp_path: Path) -> None:
    """Who has started it is to do something else."""
    path = world.save(tmp_path)
    other = World()
    try:
        other.plan = plan_of(trainers=3)
        back = other.again(path)
        part = Part(back, other.plan, 0)
        session = back.job.join(part.request()).session

        with pytest.raises(FingerprintMismatch, match="another plan"):
            back.job.install(part.program(session))
        assert back.job.ended.is_set() and back.job.failure is not None
    finally:
        other.end()


def test_one_trainer_brings_the_program(world: World, tmp_path: Path) -> None:
    """Others wait; they are asked when that one does not."""
    path = world.save(tmp_path)
    world.lose()
    back = world.again(path)
    first, second = (Part(back, world.plan, number) for number in (0, 1))
    asked = back.job.join(first.request())
    assert asked.wants_program and not back.job.join(second.request()).wants_program
    with pytest.raises(UnknownSession):
        back.job.heartbeat(HeartbeatRequest(session=world.trainers[0][0].session))
    with pytest.raises(UnknownSession, match="from another trainer"):
        back.job.install(second.program("x"))
    world.clock.time += DEADLINE + 1

    assert back.job.join(second.request()).wants_program
    back.job.install(first.program(asked.session))  # late, and the same program
    assert not back.job.join(second.request()).wants_program
    until(lambda: back.job.join(second.request()).ready)
    back.job.install(first.program(asked.session))  # once more, though it serves
    with pytest.raises(UnknownSession):
        back.job.install(second.program("x"))
