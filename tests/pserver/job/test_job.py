"""One server's job, driven by frames over the in-process transport: no sockets, no gRPC."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from pserver.lane.values import AsyncSlices
from pserver.transport import inprocess
from pserver.wire_pb2 import (
    Commit,
    Frame,
    Hello,
    Kind,
    LeaveRequest,
    MeetRequest,
    StatusRequest,
)
from tests.support.job_frames import DEADLINE, Trainer, plan_of, together
from transpiler.ir.rules import Clip


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
    job.leave(LeaveRequest(session=trainer.session, success=True))
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
        lambda: first.step(2, **ones),
        lambda: job.leave(LeaveRequest(session=second.session, success=True)),
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


def test_a_step_that_comes_again_while_it_is_applied_waits_for_nobody_else(
    served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow update, asked for twice, beside a trainer at a barrier: nobody waits for one another,
    and the job stands.
    """
    job, listener = served
    plan = plan_of(trainers=2, mode="async")
    first, second = Trainer(job, listener, plan, 0), Trainer(job, listener, plan, 1)
    updating, released, update = threading.Event(), threading.Event(), AsyncSlices.update

    def slow(*arguments: Any, **named: Any) -> None:
        updating.set()
        assert released.wait(20)
        update(*arguments, **named)

    monkeypatch.setattr(AsyncSlices, "update", slow)
    with ThreadPoolExecutor(2) as pool:
        pool.submit(first.step, 1, w=torch.ones(2, 3), b=torch.ones(3))
        assert updating.wait(20)
        first.stream = inprocess.connect("127.0.0.1", listener.port, timeout_seconds=DEADLINE)
        first.stream.send(
            Frame(kind=Kind.HELLO, hello=Hello(session=first.session, trainer_id=0, stream=2))
        )
        again = pool.submit(first.step, 1, w=torch.ones(2, 3), b=torch.ones(3))
        assert not job.meet(MeetRequest(session=second.session, key="x")).over
        assert job.failure is None
        released.set()
        assert again.result(timeout=20)[0].version == 1
