"""Who takes part in a job, and how it ends: one server's job, with a clock that the test moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pserver.config import PROTOCOL
from pserver.errors import Busy, Draining, JobFailed, PServerError, TrainerLost
from pserver.job.job import Job
from pserver.transport import inprocess
from pserver.wire_pb2 import (
    AnnounceRequest,
    FinishRequest,
    HeartbeatRequest,
    InstallRequest,
    JoinRequest,
    LeaveRequest,
    MeetMode,
    MeetRequest,
    ResetRequest,
    StatusRequest,
)
from tests.support.job_frames import DEADLINE, Clock, Trainer, plan_of, program_of, together
from transpiler.ir.graph import Storage

Served = tuple[Job, inprocess.InprocessListener]


def state(job: Job) -> str:
    return job.status(StatusRequest()).state


def finish(job: Job, trainer: Trainer) -> bool:
    return job.finish(FinishRequest(session=trainer.session)).over


def leave(job: Job, trainer: Trainer, **how: Any) -> str:
    return job.leave(LeaveRequest(session=trainer.session, **how)).failure


def join(job: Job, number: int, incarnation: str = "b", lr: float = 0.5, trainers: int = 2) -> bool:
    plan = plan_of(trainers, lr=lr)
    request = JoinRequest(
        protocol=PROTOCOL,
        trainer_id=number,
        incarnation=incarnation,
        fingerprint=plan.fingerprint(),
        manifest=plan.manifest(),
        transports=["inprocess"],
    )
    return job.join(request).ready


def stepped(served: Served, trainers: int = 1) -> tuple[Job, list[Trainer]]:
    """A job that has applied one update."""
    job, listener = served
    found = [Trainer(job, listener, plan_of(trainers), number) for number in range(trainers)]
    ones = dict(w=torch.ones(2, 3), b=torch.ones(3))
    together(*[lambda trainer=trainer: trainer.step(1, **ones) for trainer in found])
    return job, found


# ---- success is what all have said ----


def test_a_job_has_succeeded_when_every_trainer_has_said_so(served: Served) -> None:
    """Neither before the last one has left, nor without its word."""
    job, (first, second) = stepped(served, 2)

    assert not finish(job, first) and finish(job, second) and finish(job, first)
    assert leave(job, first, success=True) == "" and not job.ended.is_set()
    leave(job, second, success=True)

    assert job.ended.is_set() and job.lifecycle.succeeded
    assert state(job) == "empty"


@pytest.mark.parametrize("failure", ["", "a server is lost"])
def test_a_trainer_that_does_not_say_success_fails_the_job(served: Served, failure: str) -> None:
    """And one that has finished before is told when it leaves."""
    job, (first, second) = stepped(served, 2)
    finish(job, first)
    leave(job, second, failure=failure)

    with pytest.raises(JobFailed, match=failure or "without reporting that it had finished"):
        finish(job, first)
    assert (failure or "without reporting") in leave(job, first, success=True)
    assert job.ended.is_set() and not job.lifecycle.succeeded
    assert state(job) == "failed"


def test_a_trainer_that_returns_is_waited_for(served: Served) -> None:
    """Trainers leave to join with another plan: the server's first job has not ended, and the next
    Join begins it anew.
    """
    job, (first, second) = stepped(served, 2)

    assert leave(job, first, success=True, returns=True) == ""
    assert not join(job, 0, lr=0.25)  # the other has not left
    leave(job, second, success=True, returns=True)
    assert state(job) == "empty" and not job.ended.is_set() and not job.lifecycle.succeeded
    assert join(job, 0, lr=0.25) and state(job) == "installing"


def test_a_finished_trainer_is_not_waited_for_and_is_still_watched(
    served: Served, clock: Clock
) -> None:
    """Sync steps go on without it; its silence is told, and nobody waits in its place."""
    job, (first, second) = stepped(served, 2)
    finish(job, first)
    done, _ = second.step(2, w=torch.ones(2, 3), b=torch.ones(3))
    assert done.committed == 1

    clock.time = DEADLINE + 1
    job.heartbeat(HeartbeatRequest(session=second.session))
    job.tick()
    said = job.status(StatusRequest())
    assert said.trainers[0].state == "left" and job.failure is None
    assert any("no heartbeat" in each.text and "finished" in each.text for each in said.events)
    done, _ = second.step(3, w=torch.ones(2, 3), b=torch.ones(3))
    assert done.committed == 1


@pytest.mark.parametrize("last", [False, True])
def test_one_whose_process_ends_after_its_last_word_has_left(served: Served, last: bool) -> None:
    """As launch says it, and the job is done when the others are; also where it is the last one."""
    job, (first, second) = stepped(served, 2)
    for each in (first, second) if last else (first,):
        finish(job, each)
    if last:
        leave(job, second, success=True)
    announce(job, 0, "", failure="its process ended with status 137")
    if not last:
        assert job.failure is None and state(job) == "serving"
        assert [each.state for each in job.status(StatusRequest()).trainers] == ["left", "joined"]
        assert finish(job, second)
        leave(job, second, success=True)

    assert job.lifecycle.succeeded and state(job) == "empty"


def test_silence_after_the_last_word_is_no_failure(served: Served, clock: Clock) -> None:
    """All have finished: one that dies before its goodbye has done its part."""
    job, (first, second) = stepped(served, 2)
    finish(job, first), finish(job, second)
    leave(job, first, success=True)
    clock.time = DEADLINE + 1
    job.tick()

    assert job.lifecycle.succeeded and state(job) == "empty"


def test_a_server_that_shuts_down_tells_heartbeats(served: Served) -> None:
    """A trainer that computes hears of it, too; an idle server has no job to fail."""
    job, (trainer,) = stepped(served)
    job.shut_down()

    reply = job.heartbeat(HeartbeatRequest(session=trainer.session))
    assert (reply.error, reply.failure) == ("Draining", "the server is shutting down")
    assert state(job) == "draining"


# ---- trainers that never join ----


def announce(job: Job, number: int, incarnation: str, **end: Any) -> None:
    job.announce(AnnounceRequest(trainer_id=number, incarnation=incarnation, **end))


def test_an_announced_trainer_that_falls_silent_fails_the_job(served: Served, clock: Clock) -> None:
    """Within the heartbeat timeout, long before the start timeout."""
    job, listener = served
    announce(job, 0, "a"), announce(job, 1, "b")
    trainer = Trainer(job, listener, plan_of(2), 0)
    clock.time = DEADLINE + 1
    job.heartbeat(HeartbeatRequest(session=trainer.session))
    job.tick()

    assert isinstance(job.failure, TrainerLost)
    assert "trainer 1 ended before it joined: it has sent no heartbeat" in str(job.failure)


def test_trainers_that_wait_for_trainer_0_hear_of_its_end(served: Served, clock: Clock) -> None:
    """There is no job yet that could fail; one that starts later waits for the next trainer 0."""
    job, _ = served
    announce(job, 0, "a"), announce(job, 1, "b")
    assert not join(job, 1)
    clock.time = 1.0
    announce(job, 0, "a", failure="ImportError: no module named net")

    with pytest.raises(TrainerLost, match="trainer 0 ended before it joined: ImportError"):
        join(job, 1)
    clock.time = 2.0
    assert not join(job, 1, "c")


def test_a_trainer_that_ends_before_it_hears_that_it_joined_is_known_at_once(
    served: Served,
) -> None:
    """It has no session to leave with; its announcement says why."""
    job, listener = served
    Trainer(job, listener, plan_of(2), 0)
    assert join(job, 1, "b")
    announce(job, 1, "b", failure="ended by SIGTERM")

    assert isinstance(job.failure, JobFailed)
    assert "trainer 1 ended the job: ended by SIGTERM" in str(job.failure)


def test_whoever_starts_a_trainer_may_tell_its_end(served: Served) -> None:
    """It died before ``fleet.init``, so that it never was announced."""
    job, listener = served
    Trainer(job, listener, plan_of(2), 0)
    announce(job, 1, "", failure="its process ended with status 3")
    job.tick()

    assert "trainer 1 ended before it joined: its process ended with status 3" in str(job.failure)


def test_trainer_0_hears_of_an_end_between_joining_and_installing(served: Served) -> None:
    """Not that there is nothing to install, or that nothing has been installed."""
    job, _ = served
    plan = plan_of(2)
    facts = {"fingerprint": plan.fingerprint(), "manifest": plan.manifest()}
    session = job.join(JoinRequest(protocol=PROTOCOL, transports=["inprocess"], **facts)).session
    announce(job, 1, "", failure="ImportError: no module named net")
    job.tick()

    for call in (
        lambda: job.install(InstallRequest(session=session)),
        lambda: job.meet(MeetRequest(session=session, key="begin")),
        lambda: job.meet(MeetRequest(session=session, mode=MeetMode.MEET_FIRST)),
    ):
        with pytest.raises(TrainerLost, match="trainer 1 ended before it joined: ImportError"):
            call()


def test_an_end_just_before_counts_when_nobody_else_has_come(served: Served, clock: Clock) -> None:
    """Trainers of one job start at about the same time: trainer 0 comes a second later."""
    job, listener = served
    announce(job, 1, "b")
    announce(job, 1, "b", failure="killed")
    clock.time = 1.0
    trainer = Trainer(job, listener, plan_of(2), 0)
    clock.time += DEADLINE
    job.heartbeat(HeartbeatRequest(session=trainer.session))
    job.tick()
    assert job.failure is None

    clock.time += 0.1
    job.tick()
    assert "trainer 1 ended before it joined: killed" in str(job.failure)


def test_the_end_of_trainer_0_just_before_counts_likewise(served: Served, clock: Clock) -> None:
    """Not for one that starts long after it."""
    job, _ = served
    announce(job, 0, "a")
    announce(job, 0, "a", failure="killed")
    clock.time = 1.0
    announce(job, 1, "b")
    assert not join(job, 1)
    clock.time += DEADLINE + 0.1
    with pytest.raises(TrainerLost, match="trainer 0 ended before it joined: killed"):
        join(job, 1)

    announce(job, 1, "late")
    clock.time += DEADLINE + 0.1
    assert not join(job, 1, "late")


@pytest.mark.parametrize("known", ["another", "earlier", "good"])
def test_whose_end_it_is(served: Served, clock: Clock, known: str) -> None:
    """Another process of the same number is there, or it ended before this job began, or it stays
    away in good order: nobody is told.
    """
    job, listener = served
    announce(job, 1, "x")
    if known == "another":
        announce(job, 1, "y")
    if known == "earlier":
        announce(job, 1, "x", failure="killed")
        clock.time = 1.0
    trainer = Trainer(job, listener, plan_of(2), 0)
    if known == "another":
        announce(job, 1, "x", failure="killed")
    if known == "good":
        announce(job, 1, "x", joined=True)
    clock.time += DEADLINE / 2
    job.heartbeat(HeartbeatRequest(session=trainer.session))
    job.tick()

    assert job.failure is None
    assert join(job, 1)


# ---- what a failed job leaves ----


def test_a_failed_job_is_kept_from_others(served: Served, clock: Clock) -> None:
    """Busy names both commands, until the time is over."""
    job, (trainer,) = stepped(served)
    leave(job, trainer, failure="disk full")

    with pytest.raises(Busy, match="disk full.*pserver save.*pserver reset"):
        join(job, 0, lr=0.25, trainers=1)
    status = job.status(StatusRequest())
    assert (status.state, status.slices, status.kept_seconds) == ("failed", 3, 600.0)
    clock.time = 601.0
    assert job.status(StatusRequest()).failed_seconds == 601.0
    assert join(job, 0, lr=0.25, trainers=1)


@pytest.mark.parametrize("way", ["reset", "the same job"])
def test_a_failed_job_makes_way(served: Served, way: str) -> None:
    """For anybody after a reset, and for the same job started again at once."""
    job, (trainer,) = stepped(served)
    leave(job, trainer, failure="disk full")

    if way == "reset":
        assert job.reset(ResetRequest()).state == "failed"
        assert (state(job), job.failure) == ("empty", None)
    assert join(job, 0, lr=0.25 if way == "reset" else 0.5, trainers=1)


def test_reset_refuses_a_running_job(served: Served) -> None:
    """Who resets means to drop what nobody uses."""
    job, (_,) = stepped(served)

    with pytest.raises(Busy, match="a job runs here, with trainer 0"):
        job.reset(ResetRequest())
    assert state(job) == "serving"


def test_a_job_without_an_update_has_nothing_to_keep(served: Served) -> None:
    """A script with a mistake before its first step does not lock the server."""
    job, listener = served
    leave(job, Trainer(job, listener, plan_of(), 0), failure="NameError")

    assert join(job, 0, lr=0.25, trainers=1)


def test_a_preset_server_forgets_the_failure_on_reset(served: Served) -> None:
    """``--program``: the next job begins with the program's values, and without the old failure."""
    job, listener = served
    values = dict(w=torch.ones(2, 3), b=torch.ones(3), mean=torch.ones(3))
    job.preset(program_of(plan_of()), Storage(values, None))
    trainer = Trainer(job, listener, plan_of(), 0)
    trainer.step(1, w=torch.ones(2, 3), b=torch.ones(3))
    leave(job, trainer, failure="disk full")
    with pytest.raises(PServerError):
        trainer.step(2, w=torch.ones(2, 3), b=torch.ones(3))

    job.reset(ResetRequest())
    again = Trainer(job, listener, plan_of(), 0)
    _, got = again.step(1, w=torch.ones(2, 3), b=torch.ones(3))
    assert torch.equal(got["b"], torch.full((3,), 0.5))


def test_a_trainer_on_its_way_is_told_that_the_server_shuts_down(served: Served) -> None:
    """It need not wait for it; when all have been told, nobody is awaited."""
    job, _ = served
    announce(job, 0, "a"), announce(job, 1, "b")
    assert job.awaited
    job.shut_down()
    for number, incarnation in enumerate("ab"):
        assert job.awaited
        with pytest.raises(Draining, match="the server is shutting down"):
            announce(job, number, incarnation)
    assert not job.awaited
