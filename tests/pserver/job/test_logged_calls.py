"""Control calls that have a place in the job's log: a save's moment, a shrink."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from pserver.errors import Draining, Refused, TrainerLost
from pserver.job_log.records import Call, Process
from pserver.membership.decisions import LoggedCalls, Quiesce
from pserver.membership.lifecycle import Lifecycle
from pserver.membership.members import Member
from pserver.wire_pb2 import ShrinkRequest
from tests.support.job_frames import DEADLINE
from tests.support.reloading_jobs import World, until


class Calls:
    """One server's calls, with a lane whose steps a test applies, and a coordinator that is the
    test.
    """

    def __init__(self) -> None:
        self.job = Lifecycle()
        self.quiesce = Quiesce(self.job)
        self.applied = 0  # records of steps
        self.ready: list[Call] = []
        self.calls = LoggedCalls(self.job, self.quiesce, [self], self.ready.append)
        self.member = Member(0, "a", "", 0.0)
        self.run: list[int] = []  # records of calls that were carried out
        self.pool = ThreadPoolExecutor(8)

    def has_applied(self, record: int) -> bool:
        return self.applied >= record - 1

    def apply(self, record: int) -> None:
        with self.job.lock:
            self.applied = record
            self.quiesce.rested.notify()

    def begin(self, number: int, kind: str = "shrink") -> Future[str | None]:
        """A call comes; it is ready when this returns, or has ended."""
        before = len(self.ready)
        made = self.pool.submit(
            self.calls.carry_out, self.member, kind, number, lambda record: self._run(record)
        )
        until(lambda: len(self.ready) > before or made.done())
        return made

    def _run(self, record: int) -> str:
        self.run.append(record)
        return f"at {record}"

    def log(self, number: int, record: int, kind: str = "shrink") -> None:
        with self.job.lock:
            self.calls.logged(Call(Process(0, "a"), kind, number), record)

    def step(self, record: int) -> Future[None]:
        """A step whose record stands."""

        def step() -> None:
            with self.quiesce.updating(record):
                pass

        return self.pool.submit(step)


@pytest.fixture
def calls() -> Iterator[Calls]:
    made = Calls()
    yield made
    made.job.drain()
    made.pool.shutdown()


def test_a_call_comes_behind_the_steps_before_it_and_before_those_behind(calls: Calls) -> None:
    """And holds none that is before it."""
    made = calls.begin(1)
    calls.log(1, 5)
    behind, before = calls.step(6), calls.step(4)

    before.result(DEADLINE)
    assert not calls.run and not behind.done()
    calls.apply(4)
    assert made.result(DEADLINE) == "at 5"
    behind.result(DEADLINE)


def test_calls_take_turns_in_the_order_of_the_log(calls: Calls) -> None:
    """Whichever came first."""
    shrink, save = calls.begin(1), calls.begin(1, "save")
    calls.log(1, 2, "save")
    calls.log(1, 3)
    behind = calls.step(4)
    calls.apply(9)

    assert (save.result(DEADLINE), shrink.result(DEADLINE)) == ("at 2", "at 3")
    behind.result(DEADLINE)
    assert calls.run == [2, 3]


def test_a_call_that_comes_twice_is_carried_out_once(calls: Calls) -> None:
    """Before and after it is done; an older one is refused."""
    made, again = calls.begin(2), calls.pool.submit(calls.begin, 2)
    calls.log(2, 1)

    assert made.result(DEADLINE) == again.result(DEADLINE).result(DEADLINE) == "at 1"
    assert calls.begin(2).result(DEADLINE) == "at 1" and calls.run == [1]
    for number in (0, 1):
        with pytest.raises(Refused, match=f"of a new shrink or of the last one, got {number}"):
            calls.begin(number).result(DEADLINE)


def test_what_fails_fails_for_whoever_asks_and_holds_nobody(calls: Calls) -> None:
    """Steps go on."""

    def fail(record: int) -> str:
        raise Refused("the disk is full")

    first = calls.pool.submit(calls.calls.carry_out, calls.member, "save", 1, fail)
    until(lambda: bool(calls.ready))
    calls.log(1, 1, "save")

    for made in (first, calls.begin(1, "save")):
        with pytest.raises(Refused, match="the disk is full"):
            made.result(DEADLINE)
    calls.step(2).result(DEADLINE)


@pytest.mark.parametrize("how", ["withdrawn", "lost"])
def test_a_call_that_is_given_up_is_never_carried_out(calls: Calls, how: str) -> None:
    """Its record, which another server's readiness may still cause, holds nobody."""
    made = calls.begin(1)
    with calls.job.condition:
        if how == "withdrawn":
            calls.calls.withdraw(calls.member, "shrink", 1)
        else:
            calls.member.fenced = "trainer 0 is lost"
            calls.calls.drop(calls.member)
    assert not calls.calls.waiting
    with pytest.raises((Refused, TrainerLost), match="withdrawn|is lost"):
        made.result(DEADLINE)
    calls.log(1, 1)

    calls.step(2).result(DEADLINE)
    assert not calls.run


def test_a_call_that_comes_after_it_was_withdrawn_is_refused(calls: Calls) -> None:
    """The next one is not."""
    with calls.job.condition:
        calls.calls.withdraw(calls.member, "shrink", 1)
    with pytest.raises(Refused, match="was withdrawn"):
        calls.begin(1).result(DEADLINE)
    assert not calls.ready and not calls.calls.waiting
    made = calls.begin(2)
    calls.log(2, 1)

    assert made.result(DEADLINE) == "at 1"


@pytest.mark.parametrize("number", [2**20 + 3, 2**63, 2**64 - 1])
def test_a_number_far_ahead_is_refused(calls: Calls, number: int) -> None:
    """That of a call, or of one that is withdrawn: it would make all later ones older."""
    calls.calls.stands(Process(0, "a"), {"shrink": 2})
    with pytest.raises(Refused, match=f"of a new shrink or of the last one, got {number}"):
        calls.begin(number).result(DEADLINE)
    with (
        calls.job.condition,
        pytest.raises(Refused, match=f"of a new shrink or of the last one, got {number}"),
    ):
        calls.calls.withdraw(calls.member, "shrink", number)
    assert not calls.ready
    made = calls.begin(3)
    calls.log(3, 1)

    assert made.result(DEADLINE) == "at 1"


def test_what_is_in_the_log_is_not_given_up(calls: Calls) -> None:
    """All servers do it, whatever becomes of who has called."""
    made = calls.begin(1)
    calls.log(1, 3)
    with calls.job.condition:
        calls.calls.withdraw(calls.member, "shrink", 1)
        calls.calls.drop(calls.member)
    calls.apply(2)

    assert made.result(DEADLINE) == "at 3"


def test_a_server_that_comes_back_repeats_no_call(calls: Calls) -> None:
    """What was in the log before is over."""
    calls.calls.stands(Process(0, "a"), {"shrink": 2})

    assert calls.begin(2).result(DEADLINE) is None and not calls.ready
    made = calls.begin(3)
    calls.log(3, 8)
    calls.apply(7)
    assert made.result(DEADLINE) == "at 8"


def test_the_end_of_the_job_ends_a_call(calls: Calls) -> None:
    """In the log or not."""
    waits, logged = calls.begin(1), calls.begin(1, "save")
    calls.log(1, 5, "save")
    calls.job.drain()

    for made in (waits, logged):
        with pytest.raises(Draining):
            made.result(DEADLINE)
    assert not calls.quiesce.held_behind


# ---- two servers: see tests/testdata/interaction/save.txt ----


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(data_dir=str(tmp_path / "saved"), write_ahead_log=str(tmp_path / "log"))
    yield made
    made.end()


@pytest.mark.parametrize(
    "asked",
    [{"days": math.nan}, {"days": math.inf}, {"days": -1.0}, {"threshold": math.nan}],
    ids=str,
)
def test_a_shrink_of_no_number_of_days_is_refused(world: World, asked: dict[str, float]) -> None:
    """Before any server is ready for it; the next one is carried out."""
    parts = world.trainers[0]
    with pytest.raises(Refused, match="expected a finite number"):
        parts[0].job.shrink(ShrinkRequest(session=parts[0].session, number=1, **asked))
    requests = [ShrinkRequest(session=part.session, number=1, days=1.0) for part in parts]
    done = [
        world.pool.submit(part.job.shrink, request)
        for part, request in zip(parts, requests, strict=True)
    ]

    assert [dict(each.result(DEADLINE).removed) for each in done] == [{}, {}]
