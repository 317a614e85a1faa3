"""A job in this process, in any of its states, that frames and calls are tried on, without threads
and sockets.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from google.protobuf.message import DecodeError

from pserver.config import PROTOCOL, ServerConfig
from pserver.control.calls import CALLS
from pserver.errors import PServerError
from pserver.job.job import Job
from pserver.job_log.leader import CoordinatorLinks
from pserver.service.handler import handle
from pserver.service.streams import WorkingStreams
from pserver.telemetry.logs import LimitedLog
from pserver.transport import frames as codec
from pserver.transport.stream import LANDED, Buffer, Land
from pserver.wire_pb2 import (
    Commit,
    FinishRequest,
    FollowRequest,
    Frame,
    GroupHparams,
    Hello,
    InstallRequest,
    JoinRequest,
    Kind,
    LeaveRequest,
    ObserveRequest,
)
from tests.fuzz.inputs import CallInput, FrameInput
from transpiler.distribute import plan_parameters, pserver_program
from transpiler.formats.messages import hparams_to_proto
from transpiler.ir.rules import Clip, Rule
from transpiler.ir.tables import Segment, Table
from transpiler.plan.plan import Deployment, Plan

HPARAMS = {"lr": 0.5, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}
STATES = ("empty", "joined", "installed", "serving", "stepped", "finished", "failed")
MODES = ("sync", "async", "clipped")
FOLLOWED = "x"  # the fingerprint of the job that another server follows: inputs hit it at times


class Bug(Exception):
    """The server has failed at an input, where it should have refused it."""


class Found(LimitedLog):
    """A job's log in which an error of ours is a bug."""

    def __init__(self) -> None:
        super().__init__(logging.getLogger("fuzz"))
        self.errors: list[BaseException] = []

    def log(
        self,
        kind: str,
        text: str,
        level: int = logging.WARNING,
        error: BaseException | None = None,
    ) -> None:
        if error is not None:
            self.errors.append(error)


class Script:
    """A stream whose peer sends what is written in a list, and does not listen."""

    transport, peer, bearer = "inprocess", "10.0.0.1:1", None

    def __init__(self, frames: Sequence[FrameInput]) -> None:
        self._frames = list(reversed(frames))
        self.failure = ""

    def send(self, header: Frame, payload: Sequence[Buffer] = ()) -> None:
        if header.kind == Kind.FAILURE:
            self.failure = f"{header.failure.error}: {header.failure.message}"

    def receive(self, land: Land | None = None) -> tuple[Frame, memoryview] | None:
        if not self._frames:
            return None
        frame = self._frames.pop()
        header, payload = codec.parse_header(frame.header), memoryview(frame.payload)
        places = land(header, len(payload)) if land is not None and payload else None
        if places is None:
            return header, payload
        codec.spread(payload, places)
        return header, LANDED

    def offer(self, kind: Kind, segment: object) -> None: ...

    def admit(self) -> None: ...

    def close(self) -> None: ...

    def cancel(self) -> None: ...


def plan_of(mode: str) -> Plan:
    named = [
        ("w", (2, 3), "float32", 0),
        ("b", (3,), "float32", 0),
        ("mean", (3,), "float32", None),
    ]
    return plan_parameters(
        named,
        [Rule("sgd", HPARAMS, {})],
        mode="async" if mode == "async" else "sync",
        trainers=1,
        servers=1,
        clip=Clip("global_norm", 1.0) if mode == "clipped" else None,
        tables=[Table("emb", 4, (Segment(0, 4, 0),))],
    )


PLANS = {mode: plan_of(mode) for mode in MODES}
PROGRAMS = {
    mode: pserver_program(Deployment(plan, ("h:1",), server_index=0)).to_proto()
    for mode, plan in PLANS.items()
}


def _unheard(index: int, said: object) -> None:
    """What links bring, which changes nothing here."""


class Sandbox:
    """A job in one of its states.

    Args:
        state: one of ``STATES``.
        mode: one of ``MODES``.
        scratch: a folder for the files of Save and Load.

    Attributes:
        session: of its trainer; "" before it has joined.
    """

    def __init__(self, state: str, mode: str, scratch: str) -> None:
        self.state, self.mode, self.session = state, mode, ""
        self.job = Job(ServerConfig(data_dir=scratch), {"inprocess": 1}, lambda: 0.0)
        self.log = self.job.log = self.job.lifecycle._log = Found()  # type: ignore[assignment]
        self.links = self.job.links = CoordinatorLinks(_unheard, _unheard, clock=lambda: 0.0)
        self.links.expect(FOLLOWED, 3)
        self._step = 0
        reached = STATES.index(state)
        if reached >= 1:
            self._join()
        if reached >= 2:
            program = PROGRAMS[mode]
            self.job.install(InstallRequest(session=self.session, program=program))
        if reached >= 3:
            self.say(*self._load())
        if reached >= 4:
            self.say(*self.step())
        if state == "finished":
            self.job.finish(FinishRequest(session=self.session))
        if state == "failed":
            self.job.leave(LeaveRequest(session=self.session, failure="no more"))

    def _join(self) -> None:
        plan = PLANS[self.mode]
        request = JoinRequest(
            protocol=PROTOCOL,
            incarnation="good",
            fingerprint=plan.fingerprint(),
            manifest=plan.manifest(),
            transports=["inprocess"],
        )
        self.session = self.job.join(request).session

    def observed(self) -> str:
        """An observer's session, where something may be observed."""
        try:
            return self.job.observe(ObserveRequest(transports=["inprocess"])).session
        except PServerError:
            return ""

    # ---- what a trainer would say ----

    def hello(self) -> FrameInput:
        return _frame(Frame(kind=Kind.HELLO, hello=Hello(session=self.session)))

    def follower_hello(self) -> FrameInput:
        """What another server of the job would say."""
        who = FollowRequest(server_index=1, fingerprint=FOLLOWED, incarnation="another server")
        hello = Hello(
            session=self.links.follow(who), follower=True, server_index=1, fingerprint=FOLLOWED
        )
        return _frame(Frame(kind=Kind.HELLO, hello=hello))

    def _load(self) -> list[FrameInput]:
        values = dict(w=torch.ones(2, 3), b=torch.ones(3), mean=torch.ones(3))
        made = codec.frames(Kind.VALUE, 0, values.items())
        frames = [_frame(header, b"".join(payload)) for header, payload in made]
        return [self.hello(), *frames, _frame(Frame(kind=Kind.COMMIT)), BYE]

    def step(self) -> list[FrameInput]:
        """The next step, with gradients of ones."""
        self._step += 1
        made = codec.frames(
            Kind.GRADIENT, self._step, dict(w=torch.ones(2, 3), b=torch.ones(3)).items()
        )
        frames = [_frame(header, b"".join(payload)) for header, payload in made]
        commit = Commit(hparams=[GroupHparams(group=0, values=hparams_to_proto(HPARAMS))])
        scale = Frame(kind=Kind.SCALE, step=self._step, commit=Commit(scale={"": 0.5}))
        clipped = [_frame(scale)] if self.mode == "clipped" else []
        done = Frame(kind=Kind.COMMIT, step=self._step, commit=commit)
        return [self.hello(), *frames, _frame(done), *clipped, BYE]

    # ---- trying ----

    def say(self, *frames: FrameInput) -> None:
        """A stream that must go well.

        Raises:
            Bug: it did not.
        """
        script = self.try_frames(frames)
        if script.failure:
            raise Bug(f"a good stream was refused: {script.failure}")

    def try_frames(self, frames: Sequence[FrameInput]) -> Script:
        """A stream of frames.

        Raises:
            Bug: the server failed.
        """
        script = Script(frames)
        handle(script, self.job, WorkingStreams())
        self._check()
        return script

    def try_call(self, call: CallInput) -> None:
        """A control call.

        Raises:
            Bug: the server failed.
        """
        method, kind, _ = CALLS[call.name]
        try:
            request: Any = kind.FromString(call.message)
            getattr(self.job, method)(request)
        except (PServerError, ValueError, DecodeError):
            pass
        except Exception as error:
            raise Bug(f"{call.name} failed: {type(error).__name__}: {error}") from error
        self._check()

    def _check(self) -> None:
        for observation in list(self.job.observations._by_session.values()):
            if observation.paused:
                observation.set_pause(False)
        for error in self.log.errors:
            raise Bug(f"{type(error).__name__}: {error}") from error
        failure = self.job.failure
        if failure is not None and "could not update" in str(failure):
            raise Bug(str(failure))

    @property
    def moved(self) -> bool:
        """Whether an input has brought the job into another state."""
        lifecycle = self.job.lifecycle
        words = {"empty": "empty", "joined": "installing", "installed": "installing"}
        expected = words.get(self.state, "failed" if self.state == "failed" else "serving")
        return lifecycle.word != expected

    def values(self) -> dict[str, torch.Tensor]:
        """Copies of what the job holds."""
        if self.job.program is None:
            return {}
        return {name: value.clone() for name, value in self.job.program.slices.values.items()}


def _frame(header: Frame, payload: bytes = b"") -> FrameInput:
    return FrameInput(header.SerializeToString(), payload)


BYE = _frame(Frame(kind=Kind.BYE))
