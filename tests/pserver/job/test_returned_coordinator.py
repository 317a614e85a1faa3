"""Server 0, which has the job's log, is lost and comes back while its job goes on: with what it has
written before anybody heard of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pserver.errors import Refused, ServerLost, UnknownSession, Unprepared
from pserver.job_log import files
from pserver.membership.decisions import process_of
from pserver.wire_pb2 import (
    AnnounceRequest,
    BarrierRequest,
    HeartbeatRequest,
    LeaseEpoch,
    LeaseRequest,
    LeaveRequest,
    RendezvousRequest,
    ShrinkRequest,
    StatusRequest,
)
from tests.support.job_frames import DEADLINE
from tests.support.reloading_jobs import Part, World, until


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(write_ahead_log=str(tmp_path / "log"))
    yield made
    made.end()


def back(world: World, path: str) -> None:
    """Server 0 is there again, and both trainers have joined it."""
    world.again(path, 0)
    for number in (0, 1):
        world.rejoin(number, 0)


def test_it_goes_on_from_its_save_and_the_next_steps_count(world: World, tmp_path: Path) -> None:
    """What was decided since the save is lost there, and nowhere else; it is counted and said."""
    world.step(0, 1)
    path = world.save(tmp_path, 0)
    for number, step in ((0, 2), (1, 1), (1, 2)):
        world.step(number, step)
    world.lose(0)
    until(lambda: list(world.one.job.status(StatusRequest()).away) == [0])
    world.again(path, 0)
    replies = [world.rejoin(number, 0) for number in (0, 1)]

    assert [list(each.steps) for each in replies] == [[2], [2]]
    until(lambda: not world.one.job.status(StatusRequest()).away)
    status = world.zero.job.status(StatusRequest())
    assert (status.reload.file, status.reload.steps) == (path, 3)
    assert dict(status.reload.steps_by_trainer) == {0: 1, 1: 2}
    w, b = world.step(0, 3)
    assert torch.equal(w, torch.full((2, 3), 1 - 2 * 0.5))
    assert torch.equal(b, torch.full((3,), 1 - 5 * 0.5))
    assert [each.job.failure for each in world.servers] == [None, None]
    said = [each.text for each in world.one.job.status(StatusRequest()).events]
    assert "server 0 is gone; nothing is applied until it has come back" in said
    assert "server 0 has come back; the job goes on" in said


def test_a_step_waits_for_it_and_counts_once(world: World, tmp_path: Path) -> None:
    """The other server holds it undecided, and says that again; the trainer sends it to server 0
    again.
    """
    world.step(0, 1)
    path = world.save(tmp_path, 0)
    world.lose(0)
    held = world.pool.submit(world.trainers[0][1].take, 2)
    until(lambda: world.one.job.installed().lanes[0].undecided == 1)
    back(world, path)
    w = world.trainers[0][0].take(2)

    assert torch.equal(held.result(DEADLINE), torch.zeros(3))
    assert torch.equal(w, torch.zeros(2, 3))
    assert world.zero.job.status(StatusRequest()).reload.steps == 0
    assert torch.equal(world.step(1, 1)[0], torch.full((2, 3), -0.5))


def test_a_step_that_it_alone_knew_to_be_decided_stays_decided(
    world: World, tmp_path: Path
) -> None:
    """The other server has not heard of the record, and is sent it."""
    path = world.save(tmp_path, 0)
    world.wire.deaf = True
    held = world.pool.submit(world.trainers[0][1].take, 1)
    assert torch.equal(world.trainers[0][0].take(1), torch.full((2, 3), 0.5))
    assert world.one.job.installed().lanes[0].undecided == 1
    world.lose(0)
    back(world, path)

    assert torch.equal(held.result(DEADLINE), torch.full((3,), 0.5))
    assert world.zero.job.status(StatusRequest()).reload.steps == 1
    assert torch.equal(world.step(0, 2)[1], torch.zeros(3))


def test_it_comes_back_twice(world: World, tmp_path: Path) -> None:
    """Its second process has written on where the first one was."""
    path = world.save(tmp_path, 0)
    for step in (1, 2):
        world.step(0, step)
        world.lose(0)
        back(world, path)

    assert world.zero.job.status(StatusRequest()).reload.steps == 2
    assert torch.equal(world.step(0, 3)[1], torch.full((3,), -0.5))


def test_it_is_lost_again_before_the_other_has_heard_of_it(world: World, tmp_path: Path) -> None:
    """Who follows it again, and has not been told where the log is, does so once more."""
    world.step(0, 1)
    path = world.save(tmp_path, 0)
    world.lose(0)
    end = world.one.job.installed().decisions
    until(lambda: end.resumes)
    end.cut(ServerLost("server 0 is gone once more"))
    back(world, path)

    assert torch.equal(world.step(0, 2)[1], torch.zeros(3))


def test_both_servers_come_back_one_after_the_other(world: World, tmp_path: Path) -> None:
    """Each with what it had saved."""
    paths = [world.save(tmp_path, server) for server in (0, 1)]
    world.step(0, 1)
    for server in (0, 1):
        world.lose(server)
        world.again(paths[server], server)
        for number in (0, 1):
            world.rejoin(number, server)
        world.step(0, 2 + server)

    assert [each.job.status(StatusRequest()).reload.steps for each in world.servers] == [1, 2]


def test_a_barrier_that_one_has_passed_lets_the_other_pass(world: World, tmp_path: Path) -> None:
    """The one that has passed it never comes again; what trainers have agreed on stays."""
    path = world.save(tmp_path, 0)
    first, second = (parts[0] for parts in world.trainers)

    def meets(part: Part, text: str) -> dict[int, str] | None:
        request = BarrierRequest(session=part.session, name="1: epoch", text=text)
        reply = part.job.barrier(request)
        return dict(reply.texts) if reply.passed else None

    asked = RendezvousRequest(session=first.session, topic="port", address="h:1")
    assert first.job.rendezvous(asked).address == "h:1"
    other = world.pool.submit(meets, second, "b")
    until(lambda: "1: epoch" in world.zero.job.installed().barriers._arrived)
    assert meets(first, "a") == {0: "a", 1: "b"} == other.result(DEADLINE)
    world.lose(0)
    back(world, path)
    second = world.trainers[1][0]

    assert meets(second, "b") == {0: "a", 1: "b"}
    asked = RendezvousRequest(session=second.session, topic="port", address="h:2")
    assert second.job.rendezvous(asked).address == "h:1"


def test_leases_stay_with_their_trainers(world: World, tmp_path: Path) -> None:
    """Also those of a step that was decided, and of which the lease table had not heard."""
    path = world.save(tmp_path, 0)
    epoch = LeaseEpoch(number=0, seed="0", samples=100, batch_size=5, unit="samples")

    def leased(part: Part, number: int) -> list[tuple[int, int]]:
        asked = LeaseRequest(session=part.session, number=number, epoch=epoch, most=1)
        return [(each.start, each.stop) for each in part.job.lease(asked).ranges]

    mine, theirs = (leased(parts[0], 1) for parts in world.trainers)
    world.step(0, 1)
    log = tmp_path / "log"
    kind, text, rows, _ = next(
        each for each in reversed(list(files.read(str(log)))) if each[0] == "record"
    )
    lines = log.read_text().splitlines(keepends=True)
    incarnation = world.trainers[0][0].incarnation
    world.lose(0)
    said = [kind, text, rows, [[0, incarnation, [[0, *each] for each in mine]]]]
    lines[-1] = files._line(said).decode()
    log.write_text("".join(lines))
    back(world, path)
    account = world.zero.job.installed().leases.accounts[0]

    assert (account.decided, account.leased) == (5, 5)
    assert leased(world.trainers[1][0], 1) == theirs
    assert leased(world.trainers[0][0], 2) not in ([], mine, theirs)


def test_a_trainer_that_has_died_meanwhile_is_lost(world: World, tmp_path: Path) -> None:
    """It does not come back to server 0 within the heartbeat timeout; what it had leased is dealt
    out again, and another process takes its number.
    """
    path = world.save(tmp_path, 0)
    world.step(1, 1)
    world.lose(0)
    world.again(path, 0)
    world.rejoin(0, 0)
    assert world.zero.job._members.unfinished() == [0, 1]
    for later in (0.0, DEADLINE + 1):
        world.clock.time += later
        for each in world.servers:
            each.job.heartbeat(HeartbeatRequest(session=world.trainers[0][each.index].session))
        world.zero.job.tick()
    until(lambda: world.one.job.status(StatusRequest()).trainers[1].state == "lost")

    assert torch.equal(world.step(0, 1)[0], torch.full((2, 3), 0.5))
    said = [each.text for each in world.zero.job.status(StatusRequest()).events]
    text = "trainer 1 has not come back to server 0 within 20 s; its decided steps count"
    assert any(each.startswith(text) for each in said)
    world.trainers[1] = world.trainer(1, "another")
    assert torch.equal(world.step(1, 2)[0], torch.zeros(2, 3))


def test_a_trainer_that_ends_before_it_is_back_does_not_end_the_job(
    world: World, tmp_path: Path
) -> None:
    """Who has started it says so to server 0 before that knows its trainers, and once more."""
    path = world.save(tmp_path, 0)
    world.step(1, 1)
    world.lose(0)
    world.again(path, 0)
    ended = AnnounceRequest(trainer_id=1, failure="killed")
    world.zero.job.announce(ended)
    world.rejoin(0, 0)
    world.zero.job.tick()
    assert torch.equal(world.step(0, 1)[0], torch.full((2, 3), 0.5))
    world.zero.job.announce(ended)

    states = [each.state for each in world.zero.job.status(StatusRequest()).trainers]
    assert states == ["joined", "lost"] and world.zero.job.failure is None


def test_another_process_waits_until_the_one_before_is_back_or_lost(
    world: World, tmp_path: Path
) -> None:
    """It is not refused: what server 0 knows of the one before may be out of date."""
    path = world.save(tmp_path, 0)
    world.lose(0)
    world.again(path, 0)
    world.rejoin(0, 0)
    other = Part(world.zero, world.plan, 1, "another")
    assert not world.zero.job.join(other.request()).ready
    left = LeaveRequest(session="", success=True, preempted=True, step=1)
    left.session = world.rejoin(1, 0).session
    world.zero.job.leave(left)

    assert world.zero.job.join(other.request()).ready


def test_who_joins_before_the_others_are_back_begins_where_they_are(
    world: World, tmp_path: Path
) -> None:
    """And the job goes on where one is lost while another has not come back."""
    path = world.save(tmp_path, 0)
    for step in (1, 2):
        world.step(0, step)
    gone = process_of(world.zero.job.member(world.trainers[1][0].session))
    with world.zero.job.condition:
        world.zero.job._silent(gone, "trainer 1 is gone")
    world.lose(0)
    world.again(path, 0)
    other = Part(world.zero, world.plan, 1, "another")
    assert list(other.enter().steps) == [2]
    with world.zero.job.condition:
        member = world.zero.job.member(other.session)
        world.zero.job._silent(process_of(member), "trainer 1 is gone again")
    world.rejoin(0, 0)

    assert torch.equal(world.step(0, 3)[1], torch.full((3,), 1 - 3 * 0.5))
    said = [each.text for each in world.zero.job.status(StatusRequest()).events]
    text = "trainer 1 is gone again; its decided steps count, and the job goes on with trainer 0"
    assert text in said


def test_who_asks_before_the_program_has_come_joins_first(world: World, tmp_path: Path) -> None:
    """A call that was under way is made again then; a name that no table has is an error all the
    same, and no reason to wait.
    """
    path = world.save(tmp_path, 0)
    world.lose(0)
    served = world.again(path, 0)
    session = world.trainers[0][0].session
    with pytest.raises(UnknownSession, match="has come back"):
        served.job.barrier(BarrierRequest(session=session, name="1: epoch"))
    for number in (0, 1):
        world.rejoin(number, 0)
    with pytest.raises(Unprepared, match="the plan has no table 'x'"):
        served.job.shrink(ShrinkRequest(session=world.trainers[0][0].session, tables=["x"]))


@pytest.mark.parametrize("text", ["", "no log\n", '["plan","another"]\n', '["plan"]\n["x"]\n'])
def test_a_log_of_another_job_ends_the_server(world: World, tmp_path: Path, text: str) -> None:
    """Who has started it is to do something else."""
    path = world.save(tmp_path, 0)
    world.lose(0)
    (tmp_path / "log").write_text(text)
    served = world.again(path, 0)

    with pytest.raises(Refused, match="the log that server 0 has written"):
        world.rejoin(0, 0)
    assert served.job.ended.is_set()


def test_a_log_that_cannot_be_written_stops_no_job(tmp_path: Path) -> None:
    """Server 0 cannot come back alone, and says so."""
    (tmp_path / "file").touch()
    world = World(write_ahead_log=str(tmp_path / "file" / "log"))
    try:
        assert torch.equal(world.step(0, 1)[0], torch.full((2, 3), 0.5))
        assert world.zero.job.failure is None
    finally:
        world.end()
