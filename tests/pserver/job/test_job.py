"""One server's job, driven by frames over the in-process transport: no sockets, no gRPC."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from pserver.config import ServerConfig
from pserver.dense.slice_update import SliceUpdate
from pserver.errors import (
    Busy,
    FingerprintMismatch,
    JobFailed,
    PServerError,
    Refused,
    TrainerLost,
    from_wire,
)
from pserver.job.job import Job
from pserver.job.job_identity import PROTOCOL
from pserver.service.tensor_service import handle
from pserver.transport import codec, inprocess
from pserver.transport.stream import Stream
from pserver.wire_pb2 import (
    BarrierRequest,
    Commit,
    Done,
    Frame,
    GroupHparams,
    HeartbeatRequest,
    Hello,
    InstallRequest,
    JoinRequest,
    Kind,
    LeaveRequest,
    Part,
    StatusRequest,
)
from transpiler.distribute import plan_parameters, pserver_program
from transpiler.formats.plan_message import hparams_to_proto
from transpiler.ir.rules import Clip, Rule
from transpiler.plan.plan import Deployment, Plan
from transpiler.program import Program

DEADLINE = 20.0


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def plan_of(
    trainers: int = 1, mode: str = "sync", lr: float = 0.5, clip: Clip | None = None
) -> Plan:
    rule = Rule("sgd", {"lr": lr, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}, {})
    named = [
        ("w", (2, 3), "float32", 0),
        ("b", (3,), "float32", 0),
        ("mean", (3,), "float32", None),
    ]
    return plan_parameters(named, [rule], mode=mode, trainers=trainers, servers=1, clip=clip)


def program_of(plan: Plan) -> Program:
    return pserver_program(Deployment(plan, ("h:1",), server_index=0))


class Trainer:
    """Just enough of a client: one frame out, the answer back."""

    def __init__(
        self, job: Job, listener: inprocess.InprocessListener, plan: Plan, number: int
    ) -> None:
        self.job, self.plan, self.number = job, plan, number
        reply = job.join(self.request())
        self.session = reply.session
        self.stream: Stream = inprocess.connect(
            "127.0.0.1", listener.port, timeout_seconds=DEADLINE
        )
        self.stream.send(
            Frame(kind=Kind.HELLO, hello=Hello(session=self.session, trainer_id=number))
        )
        if reply.install:
            job.install(InstallRequest(session=self.session, program=program_of(plan).to_proto()))
            self.post(
                Kind.VALUE, 0, w=torch.ones(2, 3), b=torch.ones(3), mean=torch.full((3,), 7.0)
            )
            self.ask(Frame(kind=Kind.COMMIT, step=0))

    def request(self, **changed: object) -> JoinRequest:
        known = {
            "protocol": PROTOCOL,
            "trainer_id": self.number,
            "incarnation": "a",
            "fingerprint": self.plan.fingerprint(),
            "manifest": self.plan.manifest(),
            "transports": ["inprocess"],
        }
        return JoinRequest(**{**known, **changed})  # type: ignore[arg-type]

    def post(self, kind: Kind, step: int, **tensors: torch.Tensor) -> None:
        for header, payload in codec.frames(kind, step, tensors.items()):
            self.stream.send(header, payload)

    def ask(self, header: Frame) -> tuple[Done, dict[str, torch.Tensor]]:
        self.stream.send(header)
        return self.answer()

    def answer(self) -> tuple[Done, dict[str, torch.Tensor]]:
        values: dict[str, torch.Tensor] = {}
        while (received := self.stream.receive()) is not None:
            header, payload = received
            if header.kind == Kind.DONE:
                return header.done, values
            if header.kind == Kind.FAILURE:
                raise from_wire(header.failure.error, header.failure.message)
            if header.kind == Kind.NORMS:
                self.norms = dict(header.norms.squared)
                return Done(), values
            codec.scatter(
                header, payload, lambda part: values.setdefault(part.name, codec.blank(part))
            )
        raise AssertionError("the stream ended")

    def step(
        self,
        step: int,
        *,
        lr: float = 0.5,
        absent: tuple[str, ...] = (),
        overflow: bool = False,
        **grads: torch.Tensor,
    ):
        self.post(Kind.GRADIENT, step, **grads)
        rule = {"lr": lr, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}
        commit = Commit(
            hparams=[GroupHparams(group=0, values=hparams_to_proto(rule))],
            absent=absent,
            overflow=overflow,
        )
        return self.ask(Frame(kind=Kind.COMMIT, step=step, commit=commit))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def served(clock: Clock) -> Iterator[tuple[Job, inprocess.InprocessListener]]:
    made: list[Job] = []
    listener = inprocess.listen(lambda stream: handle(stream, made[0]))
    made.append(
        Job(ServerConfig(heartbeat_timeout_seconds=DEADLINE), {"inprocess": listener.port}, clock)
    )
    yield made[0], listener
    made[0].lifecycle.drain()
    listener.close(0.0)


def together(*calls):  # type: ignore[no-untyped-def]
    """Runs the calls at the same time; their results, in order."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(timeout=20) for future in [pool.submit(call) for call in calls]]


def test_a_job_installs_steps_and_leaves(served) -> None:
    """Trainer 0 installs an empty server, its step is applied, and after its goodbye the server is
    empty again.
    """
    job, listener = served
    trainer = Trainer(job, listener, plan_of(), 0)

    done, values = trainer.step(1, w=torch.full((2, 3), 2.0), b=torch.full((3,), 4.0))

    assert (done.version, done.committed) == (1, 1)
    assert torch.equal(values["w"], torch.zeros(2, 3))
    assert torch.equal(values["b"], torch.full((3,), -1.0))
    assert "mean" not in values
    assert torch.equal(trainer.ask(Frame(kind=Kind.PULL))[1]["mean"], torch.full((3,), 7.0))
    trainer.stream.send(Frame(kind=Kind.BYE))
    job.leave(LeaveRequest(session=trainer.session))
    assert job.status(StatusRequest()).state == "empty"
    assert job.ended.is_set()


def test_sync_is_the_mean_in_trainer_order(served) -> None:
    """Two trainers' gradients are averaged, whoever comes first."""
    job, listener = served
    plan = plan_of(trainers=2)
    first, second = Trainer(job, listener, plan, 0), Trainer(job, listener, plan, 1)

    grads = [dict(w=torch.randn(2, 3), b=torch.randn(3)) for _ in range(2)]
    results = together(lambda: second.step(1, **grads[1]), lambda: first.step(1, **grads[0]))

    for done, values in results:
        assert done.committed == 2
        assert torch.equal(
            values["w"], torch.ones(2, 3) - 0.5 * ((grads[0]["w"] + grads[1]["w"]) * 0.5)
        )


def test_an_absent_gradient_counts_as_zero_and_one_absent_everywhere_is_skipped(served) -> None:
    """Decision: the divisor is the number of trainers that committed."""
    job, listener = served
    plan = plan_of(trainers=2)
    first, second = Trainer(job, listener, plan, 0), Trainer(job, listener, plan, 1)

    results = together(
        lambda: first.step(1, w=torch.full((2, 3), 4.0), absent=("b",)),
        lambda: second.step(1, absent=("w", "b")),
    )

    for _, values in results:
        assert torch.equal(values["w"], torch.zeros(2, 3))
        assert torch.equal(values["b"], torch.ones(3))


def test_the_divisor_is_the_trainers_that_committed(served) -> None:
    """After a trainer has left, the others' steps neither wait for it nor shrink, and its last
    gradient is not used again.
    """
    job, listener = served
    plan = plan_of(trainers=2)
    first, second = Trainer(job, listener, plan, 0), Trainer(job, listener, plan, 1)
    ones = dict(w=torch.ones(2, 3), b=torch.ones(3))
    together(lambda: first.step(1, **ones), lambda: second.step(1, **ones))
    second.stream.send(Frame(kind=Kind.BYE))

    waiting, _ = together(
        lambda: first.step(2, **ones), lambda: job.leave(LeaveRequest(session=second.session))
    )

    done, values = waiting
    assert done.committed == 1
    assert torch.equal(values["b"], torch.zeros(3))


def test_an_overflow_on_one_trainer_skips_the_step_on_all(served) -> None:
    """Mixed precision: nobody's parameters move."""
    job, listener = served
    plan = plan_of(trainers=2)
    first, second = Trainer(job, listener, plan, 0), Trainer(job, listener, plan, 1)
    ones = dict(w=torch.ones(2, 3), b=torch.ones(3))

    results = together(
        lambda: first.step(1, **ones), lambda: second.step(1, absent=("w", "b"), overflow=True)
    )

    for done, values in results:
        assert done.overflow
        assert torch.equal(values["w"], torch.ones(2, 3))


def test_a_step_is_applied_once_however_often_it_is_sent(served) -> None:
    """A repeated step is answered with the present values and changes nothing."""
    job, listener = served
    trainer = Trainer(job, listener, plan_of(), 0)
    ones = dict(w=torch.ones(2, 3), b=torch.ones(3))
    trainer.step(1, **ones)

    done, values = trainer.step(1, **ones)

    assert done.version == 1
    assert torch.equal(values["b"], torch.full((3,), 0.5))


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


def test_a_global_norm_is_clipped_on_the_merged_gradient(served) -> None:
    """Servers tell their part of the squared norm of the mean, and the trainers' coefficient comes
    back.
    """
    job, listener = served
    plan = plan_of(trainers=2, clip=Clip("global_norm", 1.0))
    trainers = [Trainer(job, listener, plan, number) for number in range(2)]
    grads = dict(w=torch.full((2, 3), 2.0), b=torch.full((3,), 2.0))

    def clipped(trainer: Trainer) -> dict[str, torch.Tensor]:
        trainer.step(1, **grads)
        assert trainer.norms == pytest.approx({"w": 24.0, "b": 12.0})
        return trainer.ask(Frame(kind=Kind.SCALE, step=1, commit=Commit(scale={"": 0.25})))[1]

    for values in together(*(lambda trainer=trainer: clipped(trainer) for trainer in trainers)):
        assert torch.equal(values["b"], torch.full((3,), 1 - 0.5 * 0.5))


def test_async_steps_do_not_wait(served) -> None:
    """Each trainer's step is applied as it arrives, whole."""
    job, listener = served
    plan = plan_of(trainers=2, mode="async")
    first, second = Trainer(job, listener, plan, 0), Trainer(job, listener, plan, 1)
    ones = dict(w=torch.ones(2, 3), b=torch.ones(3))

    assert torch.equal(first.step(1, **ones)[1]["b"], torch.full((3,), 0.5))
    assert torch.equal(second.step(1, **ones)[1]["b"], torch.zeros(3))
    assert first.step(2, **ones)[0].version == 3


def test_a_silent_trainer_fails_the_job_for_all_and_is_named(served, clock: Clock) -> None:
    """A wait ends when the peer that it waits for has shown no heartbeat for the deadline."""
    job, listener = served
    plan = plan_of(trainers=2)
    first, _ = Trainer(job, listener, plan, 0), Trainer(job, listener, plan, 1)
    ones = dict(w=torch.ones(2, 3), b=torch.ones(3))
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(first.step, 1, **ones)
        while job.status(StatusRequest()).trainers[0].activity != "step 1":
            threading.Event().wait(0.01)
        clock.time = DEADLINE + 1
        job.heartbeat(HeartbeatRequest(session=first.session))
        job.tick()

        with pytest.raises(TrainerLost, match="trainer 1 has shown no heartbeat for 21.0 s"):
            step.result(timeout=20)


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


def test_a_barrier_and_a_step_that_wait_for_one_another_end_the_job(served) -> None:
    """Trainers with different numbers of steps are told so instead of hanging."""
    job, listener = served
    plan = plan_of(trainers=2)
    first, second = Trainer(job, listener, plan, 0), Trainer(job, listener, plan, 1)

    def at_barrier() -> None:
        while not job.barrier(BarrierRequest(session=second.session, name="x")).passed:
            pass

    with ThreadPoolExecutor(2) as pool:
        step = pool.submit(first.step, 1, w=torch.ones(2, 3), b=torch.ones(3))
        barrier = pool.submit(at_barrier)
        for future in (step, barrier):
            with pytest.raises(JobFailed, match="different numbers of steps"):
                future.result(timeout=20)


@pytest.mark.slow
def test_a_step_that_comes_again_while_it_is_applied_waits_for_nobody_else(
    served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow update, asked for twice, beside a trainer at a barrier: nobody waits for one another,
    and the job stands.
    """
    job, listener = served
    plan = plan_of(trainers=2, mode="async")
    first, second = Trainer(job, listener, plan, 0), Trainer(job, listener, plan, 1)
    updating, released, update = threading.Event(), threading.Event(), SliceUpdate.update

    def slow(*arguments: Any, **named: Any) -> None:
        updating.set()
        assert released.wait(20)
        update(*arguments, **named)

    monkeypatch.setattr(SliceUpdate, "update", slow)
    with ThreadPoolExecutor(2) as pool:
        pool.submit(first.step, 1, w=torch.ones(2, 3), b=torch.ones(3))
        assert updating.wait(20)
        first.stream = inprocess.connect("127.0.0.1", listener.port, timeout_seconds=DEADLINE)
        first.stream.send(
            Frame(kind=Kind.HELLO, hello=Hello(session=first.session, trainer_id=0, stream=2))
        )
        again = pool.submit(first.step, 1, w=torch.ones(2, 3), b=torch.ones(3))
        assert not job.installed().barrier(job.member(second.session), "x", 0.3)
        assert job.failure is None
        released.set()
        assert again.result(timeout=20)[0].version == 1


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
