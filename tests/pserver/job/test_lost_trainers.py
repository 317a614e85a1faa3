"""A trainer that is lost where no step needs it: the others go on, and its number may join again.
One server's job, with a clock that the test moves.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from pserver.errors import Busy, PServerError, TrainerLost
from pserver.job.job import Job
from pserver.job_log.records import Process
from pserver.lane.rounds import Contribution
from pserver.transport import inprocess
from pserver.wire_pb2 import (
    AnnounceRequest,
    BarrierRequest,
    FinishRequest,
    Frame,
    HeartbeatRequest,
    JoinRequest,
    Kind,
    LeaveRequest,
    StatusRequest,
)
from tests.support.job_frames import DEADLINE, Clock, Trainer, plan_of, together
from tests.support.waiting import eventually
from transpiler.plan.plan import Lane
from transpiler.plan.planner import LanePlan

Served = tuple[Job, inprocess.InprocessListener]
ONES = dict(w=torch.ones(2, 3), b=torch.ones(3))


class Again(Trainer):
    """The same number in another process."""

    def request(self, **changed: object) -> JoinRequest:
        return super().request(**{"incarnation": "another", **changed})


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


@pytest.mark.parametrize("mode", ["async", "half_async", "geo"])
def test_the_others_go_on_without_a_lost_trainer(served: Served, clock: Clock, mode: str) -> None:
    """Its decided steps count; ``status`` and an event name it; the job ends well without it."""
    job, _ = served
    first, second, lost = begun(served, mode)
    for trainer in (first, second, lost):
        trainer.step(1, **ONES)
    lose(job, clock, lost, first, second)

    assert job.failure is None and states(job) == {0: "joined", 1: "joined", 2: "lost"}
    lines = [each.text for each in job.status(StatusRequest()).events if each.kind == "lost"]
    assert len(lines) == 1 and "trainer 2 has sent no heartbeat for 21.0 s" in lines[0]
    first.step(2, **ONES)
    second.step(2, **ONES)
    assert job.installed().version == 5
    passed = together(
        *[
            lambda each=each: job.barrier(BarrierRequest(session=each.session, name="x")).passed
            for each in (first, second)
        ]
    )
    assert passed == [True, True]
    for each in (first, second):
        job.finish(FinishRequest(session=each.session))
    for each in (first, second):
        assert job.leave(LeaveRequest(session=each.session, success=True)).failure == ""
    assert job.lifecycle.succeeded


def test_a_diloco_round_is_over_without_a_trainer_that_is_lost_in_it(
    served: Served, clock: Clock
) -> None:
    """What it had sent does not count: the divisor is that of those who are there."""
    job, listener = served
    plan = plan_of(3, "diloco")
    first, second, lost = (Trainer(job, listener, plan, number) for number in range(3))
    lost.ask(Frame(kind=Kind.PULL))  # its stream is there
    with ThreadPoolExecutor(2) as pool:
        steps = [pool.submit(each.step, 1, **ONES) for each in (first, second)]
        while job.installed().lanes[0].queued < 2:
            pass
        lose(job, clock, lost, first, second)
        done = [each.result(DEADLINE)[0] for each in steps]

    assert [each.committed for each in done] == [2, 2]


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
    assert status.partial_steps == 2
    assert len(lines) == 1 and "2 steps of it are decided in lanes of one mode" in lines[0]
    lose(job, clock, first)
    assert job.status(StatusRequest()).partial_steps == 2  # it has the same steps in both


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


def test_a_step_that_comes_after_its_trainers_loss_leaves_nothing(
    served: Served, clock: Clock
) -> None:
    """A thread may have it in its hands already: another process may join all the same."""
    job, listener = served
    first, zombie = begun(served, trainers=2)
    zombie.step(1, **ONES)
    first.step(1, **ONES)
    lane, member = job.installed().lanes[0], job.member(zombie.session)
    lose(job, clock, zombie, first)

    with pytest.raises(TrainerLost, match="trainer 1 has sent no heartbeat"):
        lane.commit(member, 2, Contribution({}, {0: {"lr": 0.1}}, overflow=False))

    assert not member.steps_under_way and not lane.undecided
    Again(job, listener, zombie.plan, 1).step(2, **ONES)


def test_a_diloco_trainer_has_a_rate_of_its_own(served: Served) -> None:
    """A window may be shorter than the others', so that a schedule is at another step."""
    job, listener = served
    plan = plan_of(2, "diloco")
    first, second = (Trainer(job, listener, plan, number) for number in range(2))

    done = together(
        lambda: first.step(1, lr=0.5, **ONES)[0], lambda: second.step(1, lr=0.25, **ONES)[0]
    )

    assert [each.committed for each in done] == [2, 2]


def test_another_process_takes_the_place_of_a_lost_trainer(served: Served, clock: Clock) -> None:
    """It begins at the step of the slowest one that takes part, and its next one counts; while the
    first one takes part, no other is let in.
    """
    job, listener = served
    first, second, lost = begun(served)
    with pytest.raises(Busy, match="trainer 2 has already joined"):
        Again(job, listener, lost.plan, 2)
    for step in (1, 2):
        first.step(step, **ONES)
        lost.step(step, **ONES)
    second.step(1, **ONES)
    lose(job, clock, lost, first, second)

    again = Again(job, listener, lost.plan, 2)

    assert list(job.join(again.request()).steps) == [1]
    again.step(2, **ONES)
    assert states(job) == dict.fromkeys(range(3), "joined")
    assert job.installed().version == 6


def test_nobody_is_let_in_when_all_others_have_finished(served: Served, clock: Clock) -> None:
    """They may have left another server already, and the job ends without who comes so late."""
    job, _ = served
    first, second, lost = begun(served)
    lost.ask(Frame(kind=Kind.PULL))  # its stream is there
    lose(job, clock, lost, first, second)
    for each in (first, second):
        job.finish(FinishRequest(session=each.session))

    assert not job.join(lost.request(incarnation="another")).ready
    for each in (first, second):
        job.leave(LeaveRequest(session=each.session, success=True))
    assert job.lifecycle.succeeded


def test_a_trainer_that_was_lost_before_it_joined_here_is_not_waited_for(served: Served) -> None:
    """It had joined another server, which has seen its end."""
    job, listener = served
    first = Trainer(job, listener, plan_of(2, "async"), 0)
    with job.condition:
        job.installed().decisions.silent(Process(1, "elsewhere"), "trainer 1 is gone")
    first.step(1, **ONES)

    assert states(job) == {0: "joined", 1: "lost"} and job.failure is None
    assert Again(job, listener, first.plan, 1).session


def test_a_lost_trainer_does_not_hold_up_those_that_are_bounded(
    served: Served, clock: Clock
) -> None:
    """Where staleness is bounded the others wait for the slowest one that is there."""
    job, listener = served
    plan = plan_of(2, "async")
    first, lost = (Trainer(job, listener, plan, number) for number in range(2))
    lost.ask(Frame(kind=Kind.PULL))  # its stream is there
    object.__setattr__(job.installed().lanes[0].lane, "staleness", 1)
    first.step(1, **ONES)
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(first.step, 2, **ONES)
        while "step 2" not in job.status(StatusRequest()).trainers[0].activity:
            assert not step.done()
        lose(job, clock, lost, first)

        assert step.result(DEADLINE)[0].version == 2


def test_a_bounded_step_waits_for_those_that_are_too_far_behind(served: Served) -> None:
    """Not for the others that are behind it, too."""
    job, _ = served
    first, second, third = begun(served, trainers=3)
    for each in (second, third):
        each.ask(Frame(kind=Kind.PULL))  # its stream is there
    object.__setattr__(job.installed().lanes[0].lane, "staleness", 1)
    first.step(1, **ONES)
    second.step(1, **ONES)
    waits = job._members.by_trainer[0].waits
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(first.step, 2, **ONES)
        while not waits:
            assert not step.done()
        with job.condition:
            assert waits["lane 0"].missing() == [2]
        third.step(1, **ONES)

        assert step.result(DEADLINE)[0].committed


def test_the_job_fails_when_its_last_trainer_is_lost(served: Served, clock: Clock) -> None:
    """Its values are kept."""
    job, _ = served
    (only,) = begun(served, trainers=1)
    only.step(1, **ONES)
    lose(job, clock, only)

    assert isinstance(job.failure, TrainerLost) and job.kept_seconds > 0


def test_a_sync_job_stops_with_a_lost_trainer_where_it_is_told_to(
    served: Served, clock: Clock
) -> None:
    """The strategy's lost_trainer="stop"."""
    job, _ = served
    first, lost = stepped_together(served, "stop")
    lose(job, clock, lost, first)

    assert isinstance(job.failure, TrainerLost)


# ---- steps that need all trainers: see [Note: kept places] ----


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


def test_what_a_lost_trainer_sent_of_an_undecided_step_does_not_count(
    served: Served, clock: Clock
) -> None:
    """The step is that of the others alone."""
    job, _ = served
    first, second, lost = begun(served, "go_on")
    with ThreadPoolExecutor(2) as pool:
        steps = [pool.submit(lost.step, 1, **ONES), pool.submit(second.step, 1, **ONES)]
        eventually(lambda: len(job.installed().lanes[0]._round.contributions) == 2)
        lose(job, clock, lost, first, second)
        done, _ = first.step(1, **ONES)

        assert done.committed == 2 and committed(steps[1]) == 2
        with pytest.raises(PServerError):  # TrainerLost, or its stream is closed before
            steps[0].result(timeout=20)


def test_a_sync_step_waits_for_another_process_in_the_place(served: Served, clock: Clock) -> None:
    """It begins at the step that the others have taken, and the next one has both."""
    job, listener = served
    first, lost = stepped_together(served)
    with ThreadPoolExecutor(1) as pool:
        step = waits(pool, job, first, 2)
        lose(job, clock, lost, first)
        said = job.status(StatusRequest()).trainers[1]
        assert not step.done() and (said.state, said.kept_seconds) == ("lost", 300.0)
        another = Again(job, listener, plan_of(2, "sync"), 1)

        assert list(another.joined.steps) == [1]
        done, _ = another.step(2, **ONES)
        assert done.committed == committed(step) == 2
    assert job.failure is None


def test_the_wait_ends_with_the_start_timeout(served: Served, clock: Clock) -> None:
    """The others go on without it, and an event says so."""
    job, _ = served
    first, lost = stepped_together(served)
    with ThreadPoolExecutor(1) as pool:
        step = waits(pool, job, first, 2)
        lose(job, clock, lost, first)
        for _ in range(int(job.config.start_timeout_seconds / DEADLINE) + 1):
            clock.time += DEADLINE - 1
            job.heartbeat(HeartbeatRequest(session=first.session))
            assert not step.done()
        job.tick()

        assert committed(step) == 1
    events = [each.text for each in job.status(StatusRequest()).events]
    assert any("no process takes trainer 1's place within 300 s" in each for each in events)


def test_the_wait_ends_where_nobody_will_start_it_again(served: Served, clock: Clock) -> None:
    """launch says so when it has no restart left."""
    job, _ = served
    first, lost = stepped_together(served)
    with ThreadPoolExecutor(1) as pool:
        step = waits(pool, job, first, 2)
        job.announce(AnnounceRequest(trainer_id=1, failure="killed", unreplaced=True))

        assert committed(step) == 1
    assert states(job)[1] == "lost"


def test_the_others_wait_for_one_that_was_let_in(served: Served, clock: Clock) -> None:
    """From the record of its joining on: its values are those of the step at which it begins."""
    job, listener = served
    first, lost = stepped_together(served, "go_on")
    lose(job, clock, lost, first)
    another = Again(job, listener, plan_of(2, "go_on"), 1)
    with ThreadPoolExecutor(1) as pool:
        step = waits(pool, job, first, 2)
        assert not step.done()
        another.step(2, **ONES)

        assert committed(step) == 2
