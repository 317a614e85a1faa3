"""A server that was lost comes back from what it has saved, while its job goes on: the jobs of two
servers in this process, whose second one is made anew.  Transcripts in
``tests/testdata/interaction`` show what its trainers and server 0 do meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pserver.errors import FingerprintMismatch, UnknownSession
from pserver.membership.members import MemberState
from pserver.service.server_metrics import ServerMetrics
from pserver.wire_pb2 import (
    Frame,
    HeartbeatRequest,
    Kind,
    LeaveRequest,
    StatusRequest,
)
from tests.support.job_frames import DEADLINE
from tests.support.reloading_jobs import HELD, ONES, Part, World, plan_of, until


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


@pytest.mark.parametrize("preempted", [False, True])
def test_who_leaves_before_it_has_joined_again_is_not_awaited(
    world: World, tmp_path: Path, preempted: bool
) -> None:
    """The log tells the server that has come back: its job ends with those that it knows."""
    path = world.save(tmp_path)
    world.step(1, 1)
    world.lose()
    back = world.again(path).job
    world.rejoin(0)
    gone, stays = world.trainers[1][0], world.trainers[0]
    leaves = LeaveRequest(session=gone.session, success=True, preempted=preempted, step=1)
    gone.job.leave(leaves)
    until(lambda: not back._members.away)
    assert back._members.preempted == ({1: 1} if preempted else {})
    world.step(0, 1)
    for part in reversed(stays):
        part.job.leave(LeaveRequest(session=part.session, success=True))

    assert back.ended.is_set() and back.failure is None


@pytest.mark.parametrize("preempted", [False, True])
def test_who_has_left_server_0_is_not_lost_on_another_one(world: World, preempted: bool) -> None:
    """Its call to that one was lost, and so it falls silent there."""
    world.step(0, 1)
    (zero, _), (_, one) = world.trainers[0], world.trainers[1]
    zero.job.leave(LeaveRequest(session=zero.session, success=True, preempted=preempted, step=1))
    there = world.one.job._members
    until(lambda: 0 not in there.unfinished())
    world.clock.time += DEADLINE + 1
    one.job.heartbeat(HeartbeatRequest(session=one.session))
    world.one.job.tick()

    assert there.by_trainer[0].state is MemberState.LEFT
    assert there.preempted == ({0: 1} if preempted else {})
    assert not there.fenced and [each.job.failure for each in world.servers] == [None, None]
    world.trainers[1][0].job.heartbeat(HeartbeatRequest(session=world.trainers[1][0].session))
    assert world.step(1, 1)


@pytest.mark.parametrize("saved_again", [False, True])
def test_a_server_does_not_come_back_without_what_was_loaded(
    world: World, tmp_path: Path, saved_again: bool
) -> None:
    """Its values would be from before the load, beside the others' from after it; all go back to a
    checkpoint.  It comes back from a save of later.
    """
    path = world.save(tmp_path)
    world.step(0, 1)
    for part, name in zip(world.trainers[0], HELD, strict=True):
        part.post(Kind.VALUE, 0, **{name: 100 * ONES[name]})
        part.ask(Frame(kind=Kind.COMMIT, step=0))
    world.step(0, 2)
    if saved_again:
        path = world.save(tmp_path / "later")
    world.lose()
    back = world.again(path)
    if saved_again:
        for number in (0, 1):
            world.rejoin(number)
        assert [each.min() for each in world.step(0, 3)] == [99.0, 99.0]
        return
    first = Part(back, world.plan, 0)
    back.job.install(first.program(back.job.join(first.request()).session))

    assert back.job.ended.wait(DEADLINE)
    assert "saved before the job loaded other values" in str(back.job.failure)
