"""A trainer that is lost, as its streams and several lanes see it.  One server's job, with a clock
that the test moves.  Transcripts in ``tests/testdata/interaction`` show who goes on, and with whom.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from pserver.errors import PServerError, TrainerLost
from pserver.job.job import Job
from pserver.telemetry.counts import counted
from pserver.transport import inprocess
from pserver.wire_pb2 import (
    HeartbeatRequest,
    StatusRequest,
)
from tests.support.job_frames import DEADLINE, Clock, Trainer, plan_of, together
from tests.support.waiting import eventually
from transpiler.plan.plan import Lane
from transpiler.plan.planner import LanePlan

Served = tuple[Job, inprocess.InprocessListener]
ONES = dict(w=torch.ones(2, 3), b=torch.ones(3))


def begun(served: Served, mode: str = "async", trainers: int = 3) -> list[Trainer]:
    job, listener = served
    plan = plan_of(trainers, mode)
    return [Trainer(job, listener, plan, number) for number in range(trainers)]


def lose(job: Job, clock: Clock, lost: Trainer, *others: Trainer) -> None:
    """One trainer shows no heartbeat for longer than the timeout; the others do."""
    clock.time += DEADLINE + 1
    for each in others:
        job.heartbeat(HeartbeatRequest(session=each.session))
    job.tick()


def states(job: Job) -> dict[int, str]:
    return {each.trainer_id: each.state for each in job.status(StatusRequest()).trainers}


TWO_LANES = LanePlan((("w", Lane("async")), ("*", Lane("geo", k_steps=1))))


def test_steps_of_which_one_lane_has_its_part_are_counted(served: Served, clock: Clock) -> None:
    """Where a trainer is lost between the commits of two lanes ``status`` and an event say so; a
    message of several steps counts with all of them.
    """
    job, listener = served
    plan = plan_of(2, lanes=TWO_LANES)
    assert [lane.mode for lane in plan.lanes] == ["async", "geo"]
    first, lost = (Trainer(job, listener, plan, number) for number in range(2))
    for trainer in first, lost:
        trainer.step(1, steps=3, w=ONES["w"])
        trainer.step(2, w=ONES["w"])
        trainer.of_lane(1, listener).step(1, steps=2, b=ONES["b"])
    first.of_lane(1, listener).step(2, steps=2, b=ONES["b"])
    lose(job, clock, lost, first)

    status = job.status(StatusRequest())
    lines = [each.text for each in status.events if each.kind == "lost"]
    assert counted(status.trainers, "partial") == 2
    assert len(lines) == 1 and "2 steps of it are decided in lanes of one mode" in lines[0]
    lose(job, clock, first)
    trainers = job.status(StatusRequest()).trainers
    assert counted(trainers, "partial") == 2  # the other one has the same steps in both


def test_a_zombie_is_told_that_it_was_lost(served: Served, clock: Clock) -> None:
    """Its calls and its steps change nothing; nor may it join again."""
    job, listener = served
    first, zombie = begun(served, trainers=2)
    zombie.step(1, **ONES)
    lose(job, clock, zombie, first)
    before = job.installed().slices.values["w"].clone()

    with pytest.raises(PServerError, match=r"trainer 1 .*goes on without it|cancelled"):
        zombie.step(2, **ONES)
    with pytest.raises(TrainerLost, match="the job goes on without it"):
        job.heartbeat(HeartbeatRequest(session=zombie.session))
    with pytest.raises(TrainerLost, match="trainer 1 was lost"):
        Trainer(job, listener, zombie.plan, 1)
    assert torch.equal(job.installed().slices.values["w"], before)


def test_a_diloco_trainer_has_a_rate_of_its_own(served: Served) -> None:
    """A window may be shorter than the others', so that a schedule is at another step."""
    job, listener = served
    plan = plan_of(2, "diloco")
    first, second = (Trainer(job, listener, plan, number) for number in range(2))

    done = together(
        lambda: first.step(1, lr=0.5, **ONES)[0], lambda: second.step(1, lr=0.25, **ONES)[0]
    )

    assert [each.committed for each in done] == [2, 2]


def stepped_together(served: Served, mode: str = "sync") -> list[Trainer]:
    """Two trainers of a sync job that have taken a step."""
    both = begun(served, mode, trainers=2)
    together(*[lambda each=each: each.step(1, **ONES) for each in both])
    return both


def waits(pool: ThreadPoolExecutor, job: Job, trainer: Trainer, step: int) -> Future[Any]:
    """A step of a trainer that waits for others."""
    future = pool.submit(trainer.step, step, **ONES)
    eventually(lambda: job.status(StatusRequest()).trainers[0].activity == f"step {step}")
    return future


def committed(step: Future[Any]) -> int:
    """How many trainers were in it."""
    done, _ = step.result(timeout=20)
    return int(done.committed)


def test_a_sync_step_goes_on_without_a_lost_trainer(served: Served, clock: Clock) -> None:
    """At once, under lost_trainer="go_on"; by the mean of those that are left."""
    job, _ = served
    first, lost = stepped_together(served, "go_on")
    with ThreadPoolExecutor(1) as pool:
        step = waits(pool, job, first, 2)
        lose(job, clock, lost, first)

        assert committed(step) == 1
    assert job.failure is None and states(job) == {0: "joined", 1: "lost"}
