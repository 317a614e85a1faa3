"""Server 0 is lost and comes back while its job goes on: what it has written beside the log, and
what it cannot read or write.  Transcripts in ``tests/testdata/interaction`` show the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from pserver.errors import Refused, TrainerLost, UnknownSession, Unprepared
from pserver.job_log import files
from pserver.job_log.files import WriteAheadLog
from pserver.job_log_pb2 import OwnEntry
from pserver.wire_pb2 import (
    LeaseEpoch,
    LeaseRequest,
    LeaveRequest,
    MeetMode,
    MeetRequest,
    ShrinkRequest,
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


def test_a_barrier_that_one_has_passed_lets_the_other_pass(world: World, tmp_path: Path) -> None:
    """The one that has passed it never comes again; what trainers have agreed on stays."""
    path = world.save(tmp_path, 0)
    first, second = (parts[0] for parts in world.trainers)

    def meets(part: Part, text: str) -> dict[int, str] | None:
        request = MeetRequest(session=part.session, key="1: epoch", text=text)
        reply = part.job.meet(request)
        return dict(reply.texts) if reply.over else None

    def keeps(part: Part, mode: MeetMode, key: str, text: str) -> str:
        request = MeetRequest(session=part.session, mode=mode, key=key, text=text)
        return "".join(part.job.meet(request).texts.values())

    first_of, sets = MeetMode.MEET_FIRST, MeetMode.MEET_SET
    assert keeps(first, first_of, "port", "h:1") == "h:1"
    assert [keeps(first, sets, "rendezvous", each) for each in ("h:3", "h:4")] == ["h:3", "h:4"]
    other = world.pool.submit(meets, second, "b")
    until(lambda: "1: epoch" in world.zero.job.installed().meetings.state.barriers)
    assert meets(first, "a") == {0: "a", 1: "b"} == other.result(DEADLINE)
    world.lose(0)
    back(world, path)
    second = world.trainers[1][0]

    assert meets(second, "b") == {0: "a", 1: "b"}
    assert keeps(second, first_of, "port", "h:2") == "h:1"
    assert keeps(second, sets, "rendezvous", "h:5") == "h:4"


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
    known = list(files.read(str(log)))
    at = max(n for n, each in enumerate(known) if each.HasField("record"))
    known[at].record.record.decided.consumed.add(ranges=[0, *mine[0]])
    world.lose(0)
    again = WriteAheadLog(str(log))
    again.begin(known[: at + 1])
    again.close()
    back(world, path)
    account = world.zero.job.installed().leases.accounts[0]

    assert (account.decided, account.leased) == (5, 5)
    assert leased(world.trainers[1][0], 1) == theirs
    assert leased(world.trainers[0][0], 2) not in ([], mine, theirs)


def test_a_preempted_trainer_whose_leave_is_in_the_log_joins_no_more(
    world: World, tmp_path: Path
) -> None:
    """Server 0 dies before it can answer the leave, so the trainer asks again, as one of a server
    that has not heard it.  Another process takes its place.
    """
    path = world.save(tmp_path, 0)
    gone = world.trainers[1]
    for part in reversed(gone):
        leaves = LeaveRequest(session=part.session, success=True, preempted=True, step=1)
        part.job.leave(leaves)
    world.lose(0)
    world.again(path, 0)
    world.rejoin(0, 0)
    with pytest.raises(TrainerLost, match="trainer 1 was preempted, and has left"):
        world.rejoin(1, 0)
    world.trainers[1] = world.trainer(1, "another process")

    for trainer in (0, 1):
        assert world.step(trainer, 1)


def test_who_asks_before_the_program_has_come_joins_first(world: World, tmp_path: Path) -> None:
    """A call that was under way is made again then; a name that no table has is an error all the
    same, and no reason to wait.
    """
    path = world.save(tmp_path, 0)
    world.lose(0)
    served = world.again(path, 0)
    session = world.trainers[0][0].session
    with pytest.raises(UnknownSession, match="has come back"):
        served.job.meet(MeetRequest(session=session, key="1: epoch"))
    for number in (0, 1):
        world.rejoin(number, 0)
    with pytest.raises(Unprepared, match="the plan has no table 'x'"):
        served.job.shrink(ShrinkRequest(session=world.trainers[0][0].session, tables=["x"]))


def test_a_log_that_was_written_anew_has_all(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While steps are taken, in a thread beside them."""
    monkeypatch.setattr(files, "SHORT", 2)
    path, threads, right = world.save(tmp_path, 0), set[str](), WriteAheadLog.write_beside

    def noted(self: WriteAheadLog, entries: Sequence[OwnEntry]) -> int:
        threads.add(threading.current_thread().name)
        return right(self, entries)

    monkeypatch.setattr(WriteAheadLog, "write_beside", noted)
    for step in range(1, 40):
        for trainer in (0, 1):
            world.step(trainer, step)
    until(lambda: threads == {"the log anew"})
    decided = world.zero.job.installed().decisions.last
    world.lose(0)
    back(world, path)

    assert world.zero.job.installed().decisions.last >= decided > 70


@pytest.mark.parametrize("refused", ["a thread", "a file"])
def test_a_log_that_can_not_be_written_anew_stays(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """It grows, and is tried again when it has twice as many entries; the job steps on."""
    monkeypatch.setattr(files, "SHORT", 2)
    path, log, tries = world.save(tmp_path, 0), tmp_path / "log", list[int]()

    def refuses(self: object, *arguments: object) -> None:
        tries.append(len(list(files.read(str(log)))))
        raise RuntimeError("can't start new thread") if refused == "a thread" else OSError(24, "no")

    right = threading.Thread.start

    def start(self: threading.Thread) -> None:
        (refuses if self.name == "the log anew" else right)(self)

    if refused == "a thread":
        monkeypatch.setattr(threading.Thread, "start", start)
    else:
        monkeypatch.setattr(WriteAheadLog, "write_beside", refuses)
    for step in range(1, 30):
        for trainer in (0, 1):
            world.step(trainer, step)
    until(lambda: len(tries) >= 2)
    assert len(tries) <= 6
    monkeypatch.undo()
    decided = world.zero.job.installed().decisions.last
    world.lose(0)
    back(world, path)

    assert world.zero.job.installed().decisions.last >= decided > 50


def another_log(name: str, path: Path) -> None:
    """Replaces server 0's log."""
    log = WriteAheadLog(str(path))
    plan = next(files.read(str(path)))
    log.begin([OwnEntry(plan="another")] if name == "of another plan" else [plan, OwnEntry()])
    log.close()
    if name in ("empty", "no log"):
        path.write_text("" if name == "empty" else name)


@pytest.mark.parametrize("name", ["empty", "no log", "of another plan", "of another version"])
def test_a_log_of_another_job_ends_the_server(world: World, tmp_path: Path, name: str) -> None:
    """Who has started it is to do something else."""
    path = world.save(tmp_path, 0)
    world.lose(0)
    another_log(name, tmp_path / "log")
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
