"""Whole jobs of servers whose threads ask again after an hour only: a wake-up that is missed is a
hang.  Trainers step, wait for one another, are lost, leave, come late; steps are held for saves and
pauses; servers fail and drain.
"""

from __future__ import annotations

import random
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from pserver.errors import JobFailed, PServerError
from pserver.job import job_files
from pserver.job.job import Job
from pserver.transport import inprocess
from pserver.wire_pb2 import AnnounceRequest, FinishRequest, Frame, Kind, LeaveRequest
from tests.support.job_frames import DEADLINE, Trainer, plan_of
from tests.support.reloading_jobs import World
from tests.support.waiting import eventually
from transpiler.plan.plan import Lane, Plan
from transpiler.plan.planner import uniform

Served = tuple[Job, inprocess.InprocessListener]
ONES = dict(w=torch.ones(2, 3), b=torch.ones(3))
MODES = ["sync", "go_on", "diloco", "async", "bounded", "half_async", "geo"]
OUTLIVE = [mode for mode in MODES if mode != "sync"]  # a lost trainer, at once
STEPS = 12
pytestmark = pytest.mark.usefixtures("patient_waits")


def plan_in(mode: str, trainers: int) -> Plan:
    if mode == "bounded":
        return plan_of(trainers, lanes=uniform(Lane("async", staleness=1)))
    return plan_of(trainers, mode)


class Steppers:
    """The trainers of one job, each in a thread that takes steps."""

    def __init__(self, served: Served, mode: str, trainers: int = 5) -> None:
        self.job, self.listener = served
        self.plan = plan_in(mode, trainers)
        self.trainers = [self.trainer(number) for number in range(trainers)]
        for each in self.trainers:
            each.ask(Frame(kind=Kind.PULL))  # its stream is there
        self.pool = ThreadPoolExecutor(2 * trainers + 2)

    def trainer(self, number: int) -> Trainer:
        return Trainer(self.job, self.listener, self.plan, number)

    def begin(self, *numbers: int, first: int = 1, last: int = STEPS) -> list[Future[int]]:
        """The steps of these trainers, or of all."""
        chosen = numbers or range(len(self.trainers))
        return [self.pool.submit(self._steps, self.trainers[n], first, last) for n in chosen]

    def _steps(self, trainer: Trainer, first: int, last: int) -> int:
        for step in range(first, last + 1):
            trainer.step(step, **ONES)
        return last

    def applied(self) -> int:
        return self.job.installed().version

    def end(self, *numbers: int) -> None:
        """These trainers, or all, leave in good order."""
        chosen = [self.trainers[n] for n in numbers or range(len(self.trainers))]
        for each in chosen:
            self.job.finish(FinishRequest(session=each.session))
        for each in chosen:
            self.job.leave(LeaveRequest(session=each.session, success=True))


def ended(made: list[Future[int]]) -> list[int]:
    return [each.result(DEADLINE) for each in made]


@pytest.mark.parametrize("mode", MODES)
def test_all_steps_of_all_trainers_are_answered(served: Served, mode: str) -> None:
    """And the job ends well."""
    steppers = Steppers(served, mode)

    assert ended(steppers.begin()) == [STEPS] * 5
    steppers.end()
    assert steppers.job.lifecycle.succeeded


@pytest.mark.parametrize("mode", OUTLIVE)
def test_the_others_go_on_when_one_is_lost_at_any_time(served: Served, mode: str) -> None:
    """Wherever they wait for it."""
    steppers = Steppers(served, mode)
    others, lost = steppers.begin(0, 1, 2, 3), steppers.begin(4, last=STEPS // 2)[0]
    lost.result(DEADLINE) if mode in ("async", "geo") else None
    steppers.job.announce(AnnounceRequest(trainer_id=4, failure="killed", unreplaced=True))

    assert ended(others) == [STEPS] * 4
    lost.exception(DEADLINE)
    steppers.end(0, 1, 2, 3)
    assert steppers.job.lifecycle.succeeded


def test_nobody_runs_ahead_of_one_that_is_admitted(served: Served) -> None:
    """Under bounded staleness a process counts from its record on, before it has arrived."""
    steppers = Steppers(served, "bounded", 2)
    assert ended(steppers.begin(first=1, last=3)) == [3, 3]
    job = steppers.job
    job.announce(AnnounceRequest(trainer_id=1, failure="killed", unreplaced=True))
    with job.lifecycle.lock:
        job._members.arriving[1] = float("inf")

    (made,) = steppers.begin(0, first=4, last=8)
    eventually(lambda: bool(job._members.by_trainer[0].waits))
    assert [each.missing() for each in job._members.by_trainer[0].waits.values()] == [[1]]
    assert not made.done() and job._members.step(0, 0) == 5

    with job.lifecycle.lock:
        job._members.expire(float("inf"))
        job.lifecycle.wake_all()
    assert made.result(DEADLINE) == 8
    steppers.end(0)


def test_a_decided_step_bounds_the_others_when_its_trainer_is_lost(served: Served) -> None:
    """Under bounded staleness nobody reads values without it: it counts, and is applied first."""
    steppers = Steppers(served, "bounded", 2)
    job, members = steppers.job, steppers.job._members
    (made,) = steppers.begin(0, last=2)
    eventually(lambda: bool(members.by_trainer[0].waits))
    with job.installed().quiesce.paused():
        steppers.begin(1, last=1)
        eventually(lambda: 1 in job.installed().lanes[0].unapplied)
        job.announce(AnnounceRequest(trainer_id=1, failure="killed", unreplaced=True))
        with job.lifecycle.lock:
            assert members.by_trainer[1].fenced and not members.step(1, 0)
            assert [each.done() for each in members.by_trainer[0].waits.values()] == [False]
            assert [each.missing() for each in members.by_trainer[0].waits.values()] == [[1]]

    assert made.result(DEADLINE) == 2
    assert (members.step(1, 0), steppers.applied()) == (1, 3)
    steppers.end(0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["fail", "drain"])
def test_every_wait_ends_with_the_job(served: Served, mode: str, how: str) -> None:
    """Those of all steps that are not answered yet."""
    steppers = Steppers(served, mode)
    made = steppers.begin(0, 1, 2, 3)  # where steps need all, they wait for the last one
    if mode not in ("sync", "go_on", "diloco", "bounded"):
        eventually(lambda: steppers.applied() > 4)
    lifecycle = steppers.job.lifecycle
    lifecycle.fail(JobFailed("enough")) if how == "fail" else lifecycle.drain()

    for each in made:
        failure = each.exception(DEADLINE)
        assert isinstance(failure, PServerError) or each.result() == STEPS


@pytest.mark.parametrize("mode", ["sync", "bounded", "diloco"])
def test_nobody_waits_for_who_has_finished(served: Served, mode: str) -> None:
    """One that takes fewer steps than the others, which wait for it until it says so."""
    steppers = Steppers(served, mode)
    made, short = steppers.begin(0, 1, 2, 3), steppers.begin(4, last=3)
    assert ended(short) == [3]
    eventually(lambda: steppers.applied() >= (3 if mode != "bounded" else 15))
    steppers.end(4)

    assert ended(made) == [STEPS] * 4


@pytest.mark.parametrize("mode", ["go_on", "async", "bounded"])
def test_who_comes_late_steps_with_the_others(served: Served, mode: str) -> None:
    """It takes a lost one's place while they step, and they wait for it where they need it."""

    class Again(Trainer):
        def request(self, **changed: object):  # type: ignore[no-untyped-def]
            return super().request(**{"incarnation": "another", **changed})

    steppers = Steppers(served, mode, 3)
    ended(steppers.begin(last=2))
    steppers.job.announce(AnnounceRequest(trainer_id=2, failure="killed", unreplaced=True))
    again = Again(steppers.job, steppers.listener, steppers.plan, 2)
    steppers.trainers[2] = again
    at = list(steppers.job.join(again.request()).steps)[0]
    made = [*steppers.begin(0, 1, first=3), *steppers.begin(2, first=at + 1)]

    assert ended(made) == [STEPS] * 3
    steppers.end()


@pytest.mark.parametrize("mode", MODES)
def test_steps_go_on_after_saves_and_pauses(served: Served, mode: str, tmp_path: Path) -> None:
    """However often they are held."""
    steppers, over = Steppers(served, mode), threading.Event()
    installed, members = steppers.job.installed(), steppers.job._members

    def hold() -> int:
        held = 0
        while not over.is_set():
            if held % 2:
                job_files.save(str(tmp_path / "saved"), installed, members)
            else:
                with installed.quiesce.paused():
                    pass
            held += 1
        return held

    holding = [steppers.pool.submit(hold) for _ in range(2)]
    assert ended(steppers.begin()) == [STEPS] * 5
    over.set()
    assert min(ended(holding)) > 0


@pytest.mark.parametrize("mode", ["async", "go_on", "sync"])
def test_two_servers_decide_together(mode: str) -> None:
    """Each step is answered by both, in the order in which its record comes."""
    world = World("sync" if mode == "sync" else "async")

    def steps(number: int) -> int:
        for step in range(1, STEPS + 1):
            world.step(number, step)
        return STEPS

    with ThreadPoolExecutor(2) as pool:
        assert ended([pool.submit(steps, number) for number in (0, 1)]) == [STEPS] * 2
    for each in world.started:
        each.end()
    world.wire.end()


@pytest.mark.parametrize("seed", range(6))
def test_whatever_befalls_a_job_nobody_waits_for_ever(served: Served, seed: int) -> None:
    """Many trainers in a mode that is drawn; some are lost, some finish early, steps are paused,
    and at last the server may drain: each thread ends.
    """
    drawn = random.Random(seed)
    steppers = Steppers(served, drawn.choice(OUTLIVE), trainers=10)
    job, quiesce = steppers.job, steppers.job.installed().quiesce
    lengths = [drawn.choice([STEPS, 2 * STEPS]) for _ in range(9)] + [2 * STEPS]
    made = [steppers.begin(n, last=length)[0] for n, length in enumerate(lengths)]
    finishing = [steppers.pool.submit(_finish, steppers, n, each) for n, each in enumerate(made)]
    for number in drawn.sample(range(2, 10), 3):
        eventually(lambda: steppers.applied() > 1 or all(each.done() for each in made))
        with quiesce.paused():
            job.announce(AnnounceRequest(trainer_id=number, failure="killed", unreplaced=True))
    if drawn.random() < 0.5:
        job.lifecycle.drain()
    for each in finishing:
        each.result(DEADLINE)


def _finish(steppers: Steppers, number: int, steps: Future[int]) -> None:
    """A trainer leaves when it has taken its steps, where it is still there."""
    failure = steps.exception(DEADLINE)
    assert failure is None or isinstance(failure, PServerError)
    if failure is None:
        with suppress(PServerError):  # the job has ended, or it is lost by now
            steppers.end(number)
