"""What one server's job refuses, and what ends it; driven by frames over the in-process
transport.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pserver.config import PROTOCOL
from pserver.errors import (
    Busy,
    FingerprintMismatch,
    JobFailed,
    PServerError,
    Refused,
    TrainerLost,
)
from pserver.wire_pb2 import (
    Commit,
    Frame,
    HeartbeatRequest,
    InstallRequest,
    JoinRequest,
    Kind,
    MeetRequest,
    Part,
    StatusRequest,
)
from tests.support.job_frames import DEADLINE, Clock, Trainer, plan_of, program_of, together

# ---- what is refused ----


def test_trainers_that_disagree_on_the_rate_are_told_group_and_key(served) -> None:
    """In sync mode all schedules move alike."""
    job, listener = served
    plan = plan_of(trainers=2)
    first, second = Trainer(job, listener, plan, 0), Trainer(job, listener, plan, 1)
    ones = dict(w=torch.ones(2, 3), b=torch.ones(3))

    def attempt(trainer: Trainer, lr: float) -> str:
        try:
            trainer.step(1, lr=lr, **ones)
        except FingerprintMismatch as error:
            return str(error)
        return "went through"

    for message in together(lambda: attempt(first, 0.5), lambda: attempt(second, 0.25)):
        assert "'lr' of parameter group 0" in message


def test_a_fingerprint_mismatch_says_in_words_what_differs(served) -> None:
    """One different learning rate is enough."""
    job, listener = served
    Trainer(job, listener, plan_of(trainers=2), 0)

    with pytest.raises(FingerprintMismatch, match=r"group 0: lr: 0\.25 \(trainer 0 has 0\.5\)"):
        Trainer(job, listener, plan_of(trainers=2, lr=0.25), 1)


def test_a_second_job_is_told_that_the_server_is_busy(served) -> None:
    """A running job is not disturbed."""
    job, listener = served
    first = Trainer(job, listener, plan_of(), 0)

    with pytest.raises(Busy):
        job.join(first.request(incarnation="b"))
    with pytest.raises(Busy):
        job.join(first.request(incarnation="b", fingerprint="other"))
    assert first.step(1, w=torch.ones(2, 3), b=torch.ones(3))[0].version == 1


def test_another_protocol_version_is_refused(served) -> None:
    """Join carries the protocol's version."""
    job, _ = served
    with pytest.raises(Refused, match="protocol version"):
        job.join(JoinRequest(protocol=PROTOCOL + 1))


@pytest.mark.parametrize("coordinator", ["nowhere", ":1", "host:70000", "host:x"])
def test_a_coordinator_that_is_no_endpoint_is_refused(served, coordinator: str) -> None:
    """A server would dial it; the job begins without that trainer."""
    job, listener = served
    first = Trainer(job, listener, plan_of(trainers=2), 0)

    with pytest.raises(Refused, match="the coordinator's endpoint: expected an endpoint"):
        job.join(first.request(trainer_id=1, coordinator=coordinator))
    assert job.failure is None


def test_a_program_with_an_unknown_op_is_refused(served) -> None:
    """Only allow-listed ops run on a server."""
    job, listener = served
    plan = plan_of()
    facts = {"fingerprint": plan.fingerprint(), "manifest": plan.manifest()}
    reply = job.join(JoinRequest(protocol=PROTOCOL, transports=["inprocess"], **facts))
    message = program_of(plan).to_proto()
    message.blocks[1].ops[0].type = "os.system"

    with pytest.raises(Refused, match="os.system"):
        job.install(InstallRequest(session=reply.session, program=message))


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (
            Frame(
                kind=Kind.GRADIENT,
                step=1,
                parts=[Part(name="w", dtype="float64", shape=[2, 3], size=0)],
            ),
            "dtype",
        ),
        (
            Frame(
                kind=Kind.GRADIENT,
                step=1,
                parts=[Part(name="w", dtype="float32", shape=[3, 2], size=0)],
            ),
            "shape",
        ),
        (
            Frame(
                kind=Kind.GRADIENT,
                step=1,
                parts=[Part(name="v", dtype="float32", shape=[3], size=0)],
            ),
            "elsewhere",
        ),
        (
            Frame(
                kind=Kind.GRADIENT,
                step=1,
                parts=[Part(name="mean", dtype="float32", shape=[3], size=0)],
            ),
            "elsewhere",
        ),
        (Frame(kind=Kind.COMMIT, step=1), "expected 24 bytes of the gradient of 'w', got 0"),
        (Frame(kind=Kind.COMMIT, step=1, commit=Commit(absent=["w", "b", "x"])), "not updated"),
        (
            Frame(kind=Kind.COMMIT, step=1, commit=Commit(absent=["w", "b"])),
            "no hyper-parameters for group 0",
        ),
        (Frame(kind=Kind.COMMIT, step=5, commit=Commit(absent=["w", "b"])), "expected step 1"),
        (Frame(kind=Kind.DONE), "expected GRADIENT"),
        (Frame(kind=99), "expected GRADIENT"),  # type: ignore[arg-type]
    ],
)
def test_a_frame_that_contradicts_the_plan_is_refused_and_nothing_changes(
    served, frame: Frame, words: str
) -> None:
    """The peer is told what was expected, and the next stream finds everything as it was."""
    job, listener = served
    trainer = Trainer(job, listener, plan_of(), 0)

    with pytest.raises(PServerError, match=words):
        trainer.ask(frame)

    assert job.installed().version == 0
    assert torch.equal(job.installed().slices.values["w"], torch.ones(2, 3))


# ---- what ends a job ----


def test_a_silent_trainer_fails_the_job_for_all_and_is_named(served, clock: Clock) -> None:
    """A wait ends when the peer that it waits for has sent no heartbeat for the deadline, where
    the job is to stop then.
    """
    job, listener = served
    plan = plan_of(trainers=2, mode="stop")
    first, _ = Trainer(job, listener, plan, 0), Trainer(job, listener, plan, 1)
    ones = dict(w=torch.ones(2, 3), b=torch.ones(3))
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(first.step, 1, **ones)
        while job.status(StatusRequest()).trainers[0].activity != "step 1":
            threading.Event().wait(0.01)
        clock.time = DEADLINE + 1
        job.heartbeat(HeartbeatRequest(session=first.session))
        job.tick()

        with pytest.raises(TrainerLost, match="trainer 1 has sent no heartbeat for 21.0 s"):
            step.result(timeout=20)


def test_a_barrier_and_a_step_that_wait_for_one_another_end_the_job(served) -> None:
    """Trainers with different numbers of steps are told so instead of hanging."""
    job, listener = served
    plan = plan_of(trainers=2)
    first, second = Trainer(job, listener, plan, 0), Trainer(job, listener, plan, 1)

    def at_barrier() -> None:
        while not job.meet(MeetRequest(session=second.session, key="x")).over:
            pass

    with ThreadPoolExecutor(2) as pool:
        step = pool.submit(first.step, 1, w=torch.ones(2, 3), b=torch.ones(3))
        barrier = pool.submit(at_barrier)
        for future in (step, barrier):
            with pytest.raises(JobFailed, match="different numbers of steps"):
                future.result(timeout=20)


def test_barriers_that_wait_for_one_another_end_the_job(served) -> None:
    """Trainers that are at different barriers are told so instead of hanging."""
    job, listener = served
    plan = plan_of(trainers=2)
    trainers = [Trainer(job, listener, plan, number) for number in range(2)]

    def at_barrier(trainer: Trainer, name: str) -> None:
        while not job.meet(MeetRequest(session=trainer.session, key=name)).over:
            pass

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(at_barrier, *each) for each in zip(trainers, "xy", strict=True)]:
            with pytest.raises(JobFailed, match="barrier 'x'.*barrier 'y'"):
                future.result(timeout=20)


def test_a_barrier_that_all_have_left_is_forgotten(served) -> None:
    """What trainers have told there takes no memory; nor does it count as one of the barriers that
    a job may have.
    """
    job, listener = served
    trainer = Trainer(job, listener, plan_of(trainers=1), 0)
    for name in "abc":
        job.meet(MeetRequest(session=trainer.session, key=name, text="told"))

    assert list(job.installed().meetings.state.barriers) == ["c"]
