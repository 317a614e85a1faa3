"""A trainer that was preempted, on one server: what it leaves, and what the others are told."""

from __future__ import annotations

import torch

from pserver.errors import JobFailed
from pserver.job.job import Job
from pserver.transport import inprocess
from pserver.wire_pb2 import BarrierRequest, HeartbeatRequest, LeaveRequest, StatusRequest
from tests.support.job_frames import Trainer, plan_of, together

Served = tuple[Job, inprocess.InprocessListener]


def stepped(served: Served, trainers: int) -> tuple[Job, list[Trainer]]:
    """A sync job that has applied one update."""
    job, listener = served
    found = [Trainer(job, listener, plan_of(trainers), number) for number in range(trainers)]
    step(*found, number=1)
    return job, found


def step(*trainers: Trainer, number: int) -> None:
    """All of these take a step."""
    ones = dict(w=torch.ones(2, 3), b=torch.ones(3))
    together(*(lambda each=each: each.step(number, **ones) for each in trainers))


def preempt(job: Job, trainer: Trainer, after: int) -> None:
    """Its host takes it away."""
    request = LeaveRequest(session=trainer.session, success=True, preempted=True, step=after)
    job.leave(request)


def test_the_others_step_without_it_and_are_told(served: Served) -> None:
    """By the next heartbeat, and at barriers; ``status`` has a word of its own for it."""
    job, (first, gone, last) = stepped(served, 3)
    preempt(job, gone, after=57)
    step(first, last, number=2)

    told = job.heartbeat(HeartbeatRequest(session=first.session)).roll
    assert (list(told.absent), dict(told.preempted)) == ([1], {1: 57})
    states = {each.trainer_id: each.state for each in job.status(StatusRequest()).trainers}
    assert states == {0: "joined", 1: "preempted", 2: "joined"}
    barriers = [BarrierRequest(session=each.session, name="b") for each in (first, last)]
    assert not job.barrier(barriers[0]).passed
    assert list(job.barrier(barriers[1]).roll.absent) == [1]


def test_a_job_without_its_last_trainer_has_failed_and_keeps_its_values(served: Served) -> None:
    """Nobody has done their part."""
    job, trainers = stepped(served, 2)
    for trainer in trainers:
        preempt(job, trainer, after=1)

    assert isinstance(job.failure, JobFailed) and "every trainer" in str(job.failure)
    assert job.ended.is_set() and job.program is not None
    assert job.status(StatusRequest()).state == "failed"


def test_a_job_that_the_others_finish_has_succeeded(served: Served) -> None:
    """Though one was preempted."""
    job, (first, gone) = stepped(served, 2)
    preempt(job, gone, after=1)
    job.leave(LeaveRequest(session=first.session, success=True))

    assert job.lifecycle.succeeded and job.failure is None
