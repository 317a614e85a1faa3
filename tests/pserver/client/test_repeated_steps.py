"""Streams that break, lose and repeat frames, at the server's end: what is taken once, and the
marks that say what has been taken.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from pserver.config import PROTOCOL, ServerConfig
from pserver.errors import PServerError, Unreachable, from_wire
from pserver.job.job import Job
from pserver.service.handler import handle
from pserver.service.streams import WorkingStreams
from pserver.transport import frames, inprocess
from pserver.transport.stream import SequencedStream, Stream
from pserver.wire_pb2 import (
    Commit,
    Done,
    Frame,
    GroupHparams,
    Hello,
    InstallRequest,
    JoinReply,
    JoinRequest,
    Kind,
    LoadRequest,
    SaveRequest,
)
from tests.support.waiting import eventually
from transpiler.distribute import plan_parameters, pserver_program
from transpiler.formats.messages import hparams_to_proto
from transpiler.ir.rules import Rule
from transpiler.plan.plan import Deployment, Lane, Plan
from transpiler.plan.planner import LanePlan

SGD = {"lr": 1.0, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}


class Trainer:
    """One trainer of a job in this thread: it opens streams as a test wants them."""

    def __init__(
        self, job: Job, port: int, plan: Plan, number: int = 0, incarnation: str = "a"
    ) -> None:
        self.job, self.port, self.plan, self.number, self.incarnation = (
            job,
            port,
            plan,
            number,
            incarnation,
        )
        self.reply = self.join()
        if self.reply.install:
            program = pserver_program(Deployment(plan, ("h:1",), server_index=0))
            job.install(InstallRequest(session=self.reply.session, program=program.to_proto()))
            stream = self.open(1)
            self.upload(stream, 0.0)

    def join(self) -> JoinReply:
        return self.job.join(
            JoinRequest(
                protocol=PROTOCOL,
                trainer_id=self.number,
                incarnation=self.incarnation,
                fingerprint=self.plan.fingerprint(),
                manifest=self.plan.manifest(),
                transports=["inprocess"],
            )
        )

    def open(self, number: int) -> SequencedStream:
        stream = SequencedStream(inprocess.connect("h", self.port, timeout_seconds=1.0))
        hello = Hello(session=self.reply.session, trainer_id=self.number, stream=number)
        stream.send(Frame(kind=Kind.HELLO, hello=hello))
        return stream

    def upload(self, stream: Stream, value: float, request: int = 1) -> None:
        for header, payload in frames.frames(
            Kind.VALUE, 0, [("v", torch.full((2,), value)), ("w", torch.full((4,), value))]
        ):
            header.request = request
            stream.send(header, payload)
        stream.send(Frame(kind=Kind.COMMIT, request=request))
        answer(stream)

    def send(
        self, stream: Stream, step: int, gradient: float = -1.0, overflow: bool = False
    ) -> None:
        tensors = [("v", torch.full((2,), gradient)), ("w", torch.full((4,), gradient))]
        for header, payload in frames.frames(Kind.GRADIENT, step, tensors):
            stream.send(header, payload)
        commit = Commit(
            hparams=[GroupHparams(group=0, values=hparams_to_proto(SGD))], overflow=overflow
        )
        stream.send(Frame(kind=Kind.COMMIT, step=step, commit=commit))

    def step(
        self, stream: Stream, step: int, gradient: float = -1.0, overflow: bool = False
    ) -> Done:
        self.send(stream, step, gradient, overflow)
        return answer(stream)


def answer(stream: Stream) -> Done:
    while (received := stream.receive()) is not None:
        if received[0].kind == Kind.DONE:
            return received[0].done
        if received[0].kind == Kind.FAILURE:
            raise from_wire(received[0].failure.error, received[0].failure.message)
    raise Unreachable("the stream ended")


def plan_of(lane: Lane, trainers: int = 1) -> Plan:
    named = [("v", (2,), "float32", 0), ("w", (4,), "float32", 0)]
    return plan_parameters(
        named, [Rule("sgd", SGD)], lanes=LanePlan((("*", lane),)), trainers=trainers, servers=1
    )


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[], tuple[Job, int]]]:
    """Makes servers without sockets: (job, port)."""
    made: list[tuple[Job, inprocess.InprocessListener]] = []

    def make() -> tuple[Job, int]:
        jobs: list[Job] = []
        listener = inprocess.listen(lambda stream: handle(stream, jobs[0], WorkingStreams()))
        jobs.append(Job(ServerConfig(data_dir=str(tmp_path)), {"inprocess": listener.port}))
        made.append((jobs[0], listener))
        return jobs[0], listener.port

    yield make
    for job, listener in made:
        job.lifecycle.drain()
        listener.close(0.0)


ASYNC, SYNC = Lane("async", send_queue_size=1), Lane("sync")


def held(job: Job, name: str = "w") -> float:
    return float(job.installed().slices.values[name].view(-1)[0])


# ---- streams and steps that come again ----


def test_a_later_stream_takes_the_place_of_an_earlier_one(serve) -> None:
    """From its HELLO on the earlier one is broken, and what had been sent of a step over it leaves
    no trace.
    """
    job, port = serve()
    trainer = Trainer(job, port, plan_of(ASYNC))
    earlier = trainer.open(2)
    for header, payload in frames.frames(Kind.GRADIENT, 1, [("v", torch.full((2,), -100.0))]):
        earlier.send(header, payload)
    later = trainer.open(3)

    assert trainer.step(later, 1).version == 1
    with pytest.raises(Unreachable):
        trainer.step(earlier, 2, -100.0)
    assert (held(job, "v"), held(job, "w")) == (1.0, 1.0)


def test_an_earlier_stream_that_comes_after_a_later_one_can_do_nothing(serve) -> None:
    """Its HELLO was slow: it ends, and the later one goes on."""
    job, port = serve()
    trainer = Trainer(job, port, plan_of(ASYNC))
    later = trainer.open(9)
    assert trainer.step(later, 1).version == 1

    with pytest.raises(Unreachable):
        trainer.step(trainer.open(8), 2, -100.0)
    with pytest.raises(Unreachable):
        trainer.step(trainer.open(9), 2, -100.0)
    assert trainer.step(later, 2).version == 2
    assert held(job) == 2.0


def test_an_upload_that_comes_again_after_it_was_loaded_changes_nothing(serve) -> None:
    """Its answer was lost; meanwhile another trainer has stepped."""
    job, port = serve()
    plan = plan_of(ASYNC, 2)
    first, second = Trainer(job, port, plan, 0), Trainer(job, port, plan, 1)
    second.step(second.open(1), 1)

    again = first.open(2)
    first.upload(again, 0.0, request=1)
    assert held(job) == 1.0
    first.upload(again, 5.0, request=2)
    assert held(job) == 5.0


def test_what_came_of_a_step_is_said_again(serve) -> None:
    """An overflow is an overflow for whoever asks again, too."""
    job, port = serve()
    trainer = Trainer(job, port, plan_of(SYNC))
    assert trainer.step(trainer.open(2), 1, overflow=True).overflow

    done = trainer.step(trainer.open(3), 1, overflow=True)
    assert (done.overflow, done.committed, done.version) == (True, 1, 0)
    assert held(job) == 0.0


def test_a_step_that_comes_again_waits_for_the_staleness_bound_too(serve) -> None:
    """It has been applied, but its trainer is too far ahead to be answered: over another stream as
    well.
    """
    job, port = serve()
    plan = plan_of(Lane("async", staleness=1), 2)
    fast, slow = Trainer(job, port, plan, 0), Trainer(job, port, plan, 1)
    stream = fast.open(2)
    fast.step(stream, 1)
    fast.send(stream, 2)
    eventually(lambda: job.installed().version == 2)
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(fast.step, fast.open(3), 2)
        threading.Event().wait(0.1)
        assert not again.done()
        slow.step(slow.open(1), 1)

        assert again.result(timeout=10).version == 2  # up to that step
    assert held(job) == 3.0


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each slice is updated by itself: small ones are not joined."""
    monkeypatch.setattr("pserver.dense.update.JOINT_BYTES", 1)


@pytest.mark.usefixtures("one_by_one")
def test_a_step_that_comes_again_while_it_is_applied_joins_it(serve) -> None:
    """The slice is held, the connection breaks, the step comes again: applied once, answered on the
    new stream.
    """
    job, port = serve()
    trainer = Trainer(job, port, plan_of(ASYNC))
    with ThreadPoolExecutor(1) as pool:
        with job.installed()._locks["w"]:
            trainer.send(trainer.open(2), 1)
            eventually(lambda: held(job, "v") == 1.0)
            again = pool.submit(trainer.step, trainer.open(3), 1)
            threading.Event().wait(0.05)
            assert not again.done()

        assert again.result(timeout=10).version == 1
    assert (held(job, "v"), held(job, "w")) == (1.0, 1.0)


def test_a_sync_step_that_comes_again_while_others_are_awaited_joins_the_round(serve) -> None:
    """Its first coming stays in the round; the mean counts it once."""
    job, port = serve()
    plan = plan_of(SYNC, 2)
    first, second = Trainer(job, port, plan, 0), Trainer(job, port, plan, 1)
    first.send(first.open(2), 1, -4.0)
    eventually(lambda: len(job.installed().lanes[0].staged) == 1)
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(first.step, first.open(3), 1, -4.0)
        second.step(second.open(1), 1, -2.0)

        assert again.result(timeout=10).committed == 2
    assert held(job) == 3.0


# ---- marks ----


def test_marks_do_not_grow_with_steps(serve) -> None:
    """One for each trainer and lane."""
    job, port = serve()
    trainer = Trainer(job, port, plan_of(ASYNC))
    stream = trainer.open(2)
    for step in range(1, 50):
        trainer.step(stream, step)

    assert list(job.member(trainer.reply.session).watermarks) == [0]


def test_marks_are_saved_with_the_table_and_loaded_for_the_same_start_of_a_process(serve) -> None:
    """On another server: the trainer that runs on is known, and its last step, sent again, is not
    applied again.
    """
    job, port = serve()
    trainer = Trainer(job, port, plan_of(ASYNC))
    stream = trainer.open(2)
    for step in (1, 2, 3):
        trainer.step(stream, step)
    job.save(SaveRequest(session=trainer.reply.session, path="x"))

    other, there = serve()
    again = Trainer(other, there, plan_of(ASYNC))
    other.load(LoadRequest(session=again.reply.session, path="x"))
    assert list(again.join().steps) == [3]
    stream = again.open(2)
    assert again.step(stream, 3).version == 3
    assert again.step(stream, 4).version == 4
    assert held(other) == 4.0


def test_a_trainer_that_was_started_anew_counts_from_1(serve) -> None:
    """Its incarnation is another: saved marks are not its own.

    The one whose they are may come later.
    """
    job, port = serve()
    plan = plan_of(ASYNC, 2)
    pair = [Trainer(job, port, plan, number) for number in (0, 1)]
    for trainer in pair:
        trainer.step(trainer.open(2), 1)
    job.save(SaveRequest(session=pair[0].reply.session, path="x"))

    other, there = serve()
    anew = Trainer(other, there, plan, 0, incarnation="b")
    other.load(LoadRequest(session=anew.reply.session, path="x"))
    assert list(anew.join().steps) == [0]
    assert list(Trainer(other, there, plan, 1).join().steps) == [1]


def test_loading_never_takes_marks_back(serve) -> None:
    """A trainer that runs on goes on with its own numbers; the values are those of the file."""
    job, port = serve()
    trainer = Trainer(job, port, plan_of(ASYNC))
    stream = trainer.open(2)
    trainer.step(stream, 1)
    job.save(SaveRequest(session=trainer.reply.session, path="x"))
    trainer.step(stream, 2)
    job.load(LoadRequest(session=trainer.reply.session, path="x"))

    assert trainer.step(stream, 2).version == 2
    assert held(job) == 1.0
    assert trainer.step(stream, 3).version == 3
    assert held(job) == 2.0


@pytest.mark.usefixtures("one_by_one")
def test_a_save_has_values_and_marks_of_one_moment(serve) -> None:
    """A step that has changed one slice and not yet the other is waited for."""
    job, port = serve()
    trainer = Trainer(job, port, plan_of(ASYNC))
    with ThreadPoolExecutor(1) as pool:
        with job.installed()._locks["w"]:
            trainer.send(trainer.open(2), 1)
            eventually(lambda: held(job, "v") == 1.0)
            saving = pool.submit(job.save, SaveRequest(session=trainer.reply.session, path="x"))
            threading.Event().wait(0.05)
            assert not saving.done()
        saving.result(timeout=10)

    other, there = serve()
    again = Trainer(other, there, plan_of(ASYNC))
    other.load(LoadRequest(session=again.reply.session, path="x"))
    assert (held(other, "v"), held(other, "w"), *again.join().steps) == (1.0, 1.0, 1)


@pytest.mark.usefixtures("one_by_one")
def test_an_update_that_fails_ends_the_job(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows what the slice holds: a step that comes again is told so, and does not wait for
    ever.
    """
    job, port = serve()
    trainer = Trainer(job, port, plan_of(ASYNC))

    def fail(*arguments: object, **named: object) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(type(job.installed().slices.updates["w"]), "update", fail)
    for number in (2, 3):
        with pytest.raises(
            PServerError, match="could not update: RuntimeError: out of order|server failed"
        ):
            trainer.step(trainer.open(number), 1)
