"""Trainers of one server's job, which drive it frame by frame over the in-process transport."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

import torch

from pserver.config import PROTOCOL
from pserver.errors import (
    from_wire,
)
from pserver.job.job import Job
from pserver.transport import frames, inprocess
from pserver.transport.stream import Stream
from pserver.wire_pb2 import (
    Commit,
    Done,
    Frame,
    GroupHparams,
    Hello,
    InstallRequest,
    JoinRequest,
    Kind,
)
from tests.support.load import result
from transpiler.distribute import plan_parameters, pserver_program
from transpiler.formats.messages import hparams_to_proto
from transpiler.ir.rules import Clip, Rule
from transpiler.plan.plan import Deployment, Lane, Plan
from transpiler.plan.planner import LanePlan, uniform
from transpiler.program import Program

DEADLINE = 20.0
LANES = {
    "stop": Lane("sync", lost_trainer="stop"),
    "go_on": Lane("sync", lost_trainer="go_on"),
    "geo": Lane("geo", k_steps=1),
    "diloco": Lane(
        "diloco",
        k_steps=1,
        outer=Rule("sgd", {"lr": 1.0, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}, {}),
    ),
}


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def plan_of(
    trainers: int = 1,
    mode: str = "sync",
    lr: float = 0.5,
    clip: Clip | None = None,
    lanes: LanePlan | None = None,
) -> Plan:
    rule = Rule("sgd", {"lr": lr, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}, {})
    named = [
        ("w", (2, 3), "float32", 0),
        ("b", (3,), "float32", 0),
        ("mean", (3,), "float32", None),
    ]
    lanes = lanes or (uniform(LANES[mode]) if mode in LANES else None)
    return plan_parameters(
        named, [rule], mode=mode, trainers=trainers, servers=1, clip=clip, lanes=lanes
    )


def program_of(plan: Plan) -> Program:
    return pserver_program(Deployment(plan, ("h:1",), server_index=0))


class Trainer:
    """Just enough of a client: one frame out, the answer back.

    Attributes:
        joined: how the server let it in.
    """

    def __init__(
        self, job: Job, listener: inprocess.InprocessListener, plan: Plan, number: int
    ) -> None:
        self.job, self.plan, self.number = job, plan, number
        self.joined = reply = job.join(self.request())
        self.session = reply.session
        self.stream = self._greeted(listener, 0)
        if reply.install:
            job.install(InstallRequest(session=self.session, program=program_of(plan).to_proto()))
            self.post(
                Kind.VALUE, 0, w=torch.ones(2, 3), b=torch.ones(3), mean=torch.full((3,), 7.0)
            )
            self.ask(Frame(kind=Kind.COMMIT, step=0))

    def of_lane(self, lane: int, listener: inprocess.InprocessListener) -> Trainer:
        """This trainer, with a stream of another lane."""
        other = copy.copy(self)
        other.stream = self._greeted(listener, lane)
        return other

    def _greeted(self, listener: inprocess.InprocessListener, lane: int) -> Stream:
        """A stream whose HELLO the server has read: later it would be a sign of life."""
        stream: Stream = inprocess.connect("127.0.0.1", listener.port, timeout_seconds=DEADLINE)
        hello = Hello(session=self.session, trainer_id=self.number, lane=lane)
        stream.send(Frame(kind=Kind.HELLO, hello=hello))
        stream.send(Frame(kind=Kind.PROBE))
        received = stream.receive()
        assert received is not None and received[0].kind == Kind.PROBE, received
        return stream

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
        for header, payload in frames.frames(kind, step, tensors.items()):
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
            frames.scatter(
                header, payload, lambda part: values.setdefault(part.name, frames.blank(part))
            )
        raise AssertionError("the stream ended")

    def step(
        self,
        step: int,
        *,
        lr: float = 0.5,
        momentum: float = 0.0,
        absent: tuple[str, ...] = (),
        overflow: bool = False,
        written: Mapping[str, int] = MappingProxyType({}),
        steps: int = 1,
        **grads: torch.Tensor,
    ):
        self.post(Kind.GRADIENT, step, **grads)
        rule = {"lr": lr, "momentum": momentum, "dampening": 0.0, "weight_decay": 0.0}
        commit = Commit(
            hparams=[GroupHparams(group=0, values=hparams_to_proto(rule))],
            absent=absent,
            overflow=overflow,
            written=dict(written),
            steps=steps,
        )
        return self.ask(Frame(kind=Kind.COMMIT, step=step, commit=commit))


def together(*calls):  # type: ignore[no-untyped-def]
    """Runs the calls at the same time; their results, in order."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [result(future, 20) for future in [pool.submit(call) for call in calls]]
