"""An exception inside anything that a server begins: nothing waits for its end, on the same job or
on the next one.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

import pserver.job.background_saves
import pserver.lane.updates
import pserver.service.tensors
from pserver.checkpoint.checkpoint import Writer
from pserver.config import PROTOCOL, ServerConfig
from pserver.dense.slices import SliceCopies, SliceStore
from pserver.errors import Busy, Refused, TimedOut, Unprepared, from_wire
from pserver.job.job import Job, JobIdentity
from pserver.job.program import InstalledProgram
from pserver.lane.independent import IndependentSteps
from pserver.lane.lane import LaneExecutor
from pserver.lane.leases import JobLeases
from pserver.lane.recording import LogRecording
from pserver.lane.tables import LockedCut, LockedTable
from pserver.lane.together import JointSteps
from pserver.lane.updates import LaneState
from pserver.lane.values import AsyncSlices
from pserver.membership.decisions import Decisions
from pserver.membership.members import Membership
from pserver.service.handler import handle
from pserver.service.streams import WorkingStreams
from pserver.table.snapshots import TableCut
from pserver.table.table import SparseTable
from pserver.telemetry.metrics import LaneSteps
from pserver.transport import frames, inprocess
from pserver.wire_pb2 import (
    Commit,
    Frame,
    GroupHparams,
    Hello,
    InstallRequest,
    JoinRequest,
    Kind,
    LeaveRequest,
    LoadRequest,
    ObserveRequest,
    SaveRequest,
    ShrinkRequest,
)
from tests.support.load import patiently
from tests.support.waiting import eventually
from transpiler.distribute import plan_parameters, pserver_program
from transpiler.formats.messages import hparams_to_proto
from transpiler.ir.rules import Rule
from transpiler.ir.tables import Segment, Table
from transpiler.plan.plan import Deployment, Plan

SECONDS = 10.0
HPARAMS = {"lr": 0.5, "momentum": 0.5, "dampening": 0.0, "weight_decay": 0.0}
STATE = "w@momentum_buffer"


class Injected(Exception):
    """The failure that a test puts where nobody expects one."""


# where it is put, of all that a server begins: joining, installing, uploads, steps, pauses, cuts,
# saves, calls of the job's log, loads, records
PLACES: list[tuple[Any, str]] = [
    (Job, "_add"),
    (Job, "_member_of"),
    (Membership, "add"),
    (JobIdentity, "check"),
    (Job, "_installed_program"),
    (Job, "_record"),
    (Job, "_write_ahead"),
    (Decisions, "join"),
    (Job, "loaded"),
    (Job, "check_loads"),
    (SliceStore, "destination"),
    (SliceStore, "loaded"),
    (InstalledProgram, "record_values"),
    (InstalledProgram, "restore_table"),
    (InstalledProgram, "load_rows"),
    (InstalledProgram, "discard_snapshots"),
    (SparseTable, "load"),
    (LogRecording, "begins"),
    (Decisions, "staged"),
    (LaneState, "prepare"),
    (LaneSteps, "updated"),
    (LockedTable, "update"),
    (pserver.lane.updates, "UpdateTask"),
    (pserver.service.tensors, "done_of"),
    (SliceCopies, "copy"),
    (LockedTable, "cut"),
    (LockedCut, "__init__"),
    (TableCut, "_other_chunks"),
    (JobLeases, "plain"),
    (Decisions, "ready"),
    (LaneExecutor, "has_applied"),
    (pserver.job.background_saves, "trim_memory"),
    (threading.Thread, "start"),
    (LockedCut, "chunks"),
    (Writer, "drain"),
    (Writer, "commit"),
    (InstalledProgram, "shrink"),
    (LogRecording, "shrunk"),
    (LockedTable, "shrink"),
    (Membership, "load_watermarks"),
    (json, "dumps"),
]
SYNC: list[tuple[Any, str]] = [(JointSteps, "update"), (JointSteps, "_applied")]
ASYNC: list[tuple[Any, str]] = [
    (IndependentSteps, "update"),
    (IndependentSteps, "_applied"),
    (AsyncSlices, "read"),
]


def plan_of(mode: str) -> Plan:
    named = [
        ("w", (2, 3), "float32", 0),
        ("b", (3,), "float32", 0),
        ("mean", (3,), "float32", None),
    ]
    tables = [Table("emb", 2, (Segment(0, 2, 1),))]
    rules = [Rule("sgd", HPARAMS, {}), Rule("sgd", {**HPARAMS, "momentum": 0.0}, {})]
    return plan_parameters(named, rules, mode=mode, trainers=1, servers=1, tables=tables)


class Scripted:
    """A trainer that does all that a server serves, once; an observer and an operator beside it.

    Attributes:
        session: of the trainer; "" before it has joined.
    """

    def __init__(self, job: Job, port: int, mode: str, incarnation: str) -> None:
        self.job, self.port, self.plan = job, port, plan_of(mode)
        self.incarnation, self.session = incarnation, ""
        self.numbers = self.streams = 0  # of requests, and of streams

    def run(self) -> None:
        """All of it."""
        installs, step = self.join()
        if installs:
            program = pserver_program(Deployment(self.plan, ("h:1",), server_index=0))
            self.job.install(InstallRequest(session=self.session, program=program.to_proto()))
        dense, rows = self.hello(), self.hello(tables=True)
        self.load(dense)
        self.load_rows(rows)
        self.step(dense, step + 1)
        self.pause()
        self.call(lambda n: self.job.shrink(ShrinkRequest(session=self.session, number=n)))
        self.save()
        self.job.save(SaveRequest(session=self.session, path="whole"))
        self.job.load(LoadRequest(session=self.session, path="whole"))
        self.step(dense, step + 2)
        for stream in (dense, rows):
            stream.send(Frame(kind=Kind.BYE))

    def call(self, call: Callable[[int], Any]) -> Any:
        self.numbers += 1
        return call(self.numbers)

    def join(self) -> tuple[bool, int]:
        request = JoinRequest(
            protocol=PROTOCOL,
            incarnation=self.incarnation,
            fingerprint=self.plan.fingerprint(),
            manifest=self.plan.manifest(),
            transports=["inprocess"],
        )
        reply = self.job.join(request)
        assert reply.ready
        self.session = reply.session
        return reply.install, next(iter(reply.steps), 0)

    def leave(self, failure: str = "") -> None:
        if self.session:
            request = LeaveRequest(session=self.session, failure=failure, success=not failure)
            self.job.leave(request)

    def hello(self, tables: bool = False) -> inprocess.InprocessStream:
        stream = inprocess.connect("127.0.0.1", self.port, timeout_seconds=SECONDS)
        self.streams += 1  # without a number one that is served late would replace a later one
        hello = Hello(session=self.session, stream=self.streams, tables=tables)
        stream.send(Frame(kind=Kind.HELLO, hello=hello))
        return stream

    def ask(self, stream: Any, header: Frame) -> None:
        stream.send(header)
        while (received := stream.receive()) is not None:
            if received[0].kind == Kind.DONE:
                return
            if received[0].kind == Kind.FAILURE:
                raise from_wire(received[0].failure.error, received[0].failure.message)
        raise TimedOut("the stream ended without an answer")

    def load(self, stream: Any) -> None:
        self.numbers += 1
        values = dict(w=torch.ones(2, 3), b=torch.ones(3), mean=torch.ones(3))
        values[STATE] = torch.full((2, 3), 0.25)
        for header, payload in frames.frames(Kind.VALUE, 0, values.items()):
            header.request = self.numbers
            stream.send(header, payload)
        self.ask(stream, Frame(kind=Kind.COMMIT, request=self.numbers))

    def load_rows(self, stream: Any, value: float = 1.0) -> None:
        self.numbers += 1
        rows = {"emb@ids": torch.arange(3), "emb@values": torch.full((3, 2), value)}
        for header, payload in frames.frames(Kind.VALUE, 0, rows.items()):
            stream.send(header, payload)
        self.ask(stream, Frame(kind=Kind.COMMIT, request=self.numbers))

    def step(self, stream: Any, step: int) -> None:
        ones = dict(w=torch.ones(2, 3), b=torch.ones(3))
        rows = {"emb@ids": torch.arange(3), "emb@rows": torch.ones(3, 2)}
        for kind, tensors in ((Kind.GRADIENT, ones), (Kind.ROWS, rows)):
            for header, payload in frames.frames(kind, step, tensors.items()):
                stream.send(header, payload)
        numbers = [HPARAMS, {**HPARAMS, "momentum": 0.0}]
        commit = Commit(
            hparams=[
                GroupHparams(group=group, values=hparams_to_proto(values))
                for group, values in enumerate(numbers)
            ]
        )
        self.ask(stream, Frame(kind=Kind.COMMIT, step=step, commit=commit))

    def pause(self) -> None:
        observed = self.job.observe(ObserveRequest(transports=["inprocess"]))
        for pausing in (True, False):
            self.job.observe(ObserveRequest(session=observed.session, pause=pausing))
        self.job.observe(ObserveRequest(session=observed.session, end=True))

    def save(self) -> None:
        self.numbers += 1
        request = SaveRequest(
            session=self.session, path="beside", background=True, number=self.numbers
        )
        eventually(lambda: self.job.save(request).done)
        assert self.job.save(request).failure == ""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Job, int]]:
    made: list[Job] = []
    listener = inprocess.listen(lambda stream: handle(stream, made[0], WorkingStreams()))
    config = ServerConfig(data_dir=str(tmp_path / "data"), record_log=str(tmp_path / "log"))
    made.append(Job(config, {"inprocess": listener.port}))
    yield made[0], listener.port
    made[0].lifecycle.drain()
    made[0].end_recording(SECONDS)
    listener.close(0.0)


def in_time(call: Callable[[], object]) -> Exception | None:
    """The error of a call, which may not stand still."""
    result = Future[object]()

    def run() -> None:
        try:
            result.set_result(call())
        except Exception as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    error = patiently(result.exception, SECONDS)
    assert error is None or isinstance(error, Exception)
    return error


def named(place: tuple[Any, str]) -> str:
    return f"{place[0].__name__.rpartition('.')[2]}.{place[1]}"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("mode", "place"),
    [("sync", each) for each in PLACES + SYNC] + [("async", each) for each in PLACES + ASYNC],
    ids=lambda each: each if isinstance(each, str) else named(each),
)
def test_what_has_begun_and_fails_leaves_nothing_to_wait_for(
    served, monkeypatch: pytest.MonkeyPatch, mode: str, place: tuple[Any, str]
) -> None:
    """The trainer does it all again: that works, or the job has failed.  Then a whole job of
    another one works on the same server.
    """
    job, port = served
    owner, name = place
    real, failed = getattr(owner, name), threading.Event()

    def fails(*args: Any, **kwargs: Any) -> Any:
        if failed.is_set() or not began.is_set():
            return real(*args, **kwargs)
        failed.set()
        raise Injected(f"{named(place)}")

    began = threading.Event()
    monkeypatch.setattr(owner, name, fails)
    first = Scripted(job, port, mode, "first")
    if owner is threading.Thread:  # not those of this test
        monkeypatch.setattr(first, "save", lambda: (began.set(), Scripted.save(first)))
    else:
        began.set()
    in_time(first.run)
    assert failed.is_set(), "nothing here calls it"
    error = in_time(first.run)
    assert error is None or job.failure is not None, error
    first.leave("" if error is None else "it has failed")

    second = Scripted(job, port, mode, "second")
    assert in_time(second.run) is None
    second.leave()
    assert job.lifecycle.word == "empty"


def test_an_upload_ends_before_anything_is_installed_and_later_streams_go_on(served) -> None:
    """The refusal leaves nothing for which the trainer's next stream would wait."""
    job, port = served
    trainer = Scripted(job, port, "sync", "first")
    trainer.join()
    with pytest.raises(Unprepared):
        trainer.ask(trainer.hello(), Frame(kind=Kind.COMMIT))

    later = trainer.hello()
    later.send(Frame(kind=Kind.PROBE))
    assert in_time(later.receive) is None
    assert in_time(trainer.run) is None


def test_a_first_trainer_that_is_refused_begins_no_job(served) -> None:
    """It has no transport in common: a trainer with another plan finds the server empty."""
    job, port = served
    plan = plan_of("async")
    request = JoinRequest(
        protocol=PROTOCOL, fingerprint=plan.fingerprint(), manifest=plan.manifest()
    )
    with pytest.raises(Refused):
        job.join(request)

    assert job.lifecycle.word == "empty"
    assert in_time(Scripted(job, port, "sync", "second").run) is None


def test_rows_that_a_busy_server_has_refused_count_when_they_come_again(
    served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same request, over another stream: it was not taken, so it is not passed over."""
    job, port = served
    trainer = Scripted(job, port, "sync", "first")
    assert in_time(trainer.run) is None
    real = InstalledProgram.load_rows
    monkeypatch.setattr(InstalledProgram, "load_rows", _busy)
    with pytest.raises(Busy):
        trainer.load_rows(trainer.hello(tables=True), value=5.0)
    monkeypatch.setattr(InstalledProgram, "load_rows", real)
    trainer.numbers -= 1
    trainer.load_rows(trainer.hello(tables=True), value=5.0)

    rows = job.installed().tables["emb"].lookup(torch.arange(3), 0)
    assert torch.equal(rows, torch.full((3, 2), 5.0))


def _busy(*arguments: object) -> None:
    raise Busy("a save is being written")


def test_an_observer_that_has_ended_pauses_nothing(served) -> None:
    """Its call waits for another one's pause, and finds that it is lost by then."""
    job, port = served
    trainer = Scripted(job, port, "sync", "first")
    assert in_time(trainer.run) is None
    first, second = (
        job.observe(ObserveRequest(transports=["inprocess"])).session for _ in range(2)
    )
    job.observe(ObserveRequest(session=first, pause=True))
    waiting = threading.Thread(
        target=lambda: job.observe(ObserveRequest(session=second, pause=True))
    )
    waiting.start()
    eventually(lambda: job.observations.of_session(second, job.now()).wanted)
    job.observe(ObserveRequest(session=second, end=True))
    job.observe(ObserveRequest(session=first, end=True))
    waiting.join(SECONDS)
    assert not waiting.is_alive()
    assert in_time(trainer.run) is None
