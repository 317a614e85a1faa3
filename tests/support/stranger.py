"""A peer that speaks the protocol frame by frame, right or wrong, and what a server must be like
after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pserver.control.control_client import ControlClient
from pserver.errors import (
    from_wire,
)
from pserver.transport import frames
from pserver.transport.registry import TRANSPORTS
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
    LeaveRequest,
    Part,
)
from trainer import fleet
from transpiler.distribute import plan_parameters, pserver_program
from transpiler.formats.messages import hparams_to_proto
from transpiler.ir.rules import Rule
from transpiler.plan.plan import Deployment, Plan

DEADLINE = 20.0


RULE = {"lr": 0.5, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}


Servers = Callable[[int], str]


def plan_of(trainers: int = 1, lr: float = 0.5) -> Plan:
    named = [
        ("w", (2, 3), "float32", 0),
        ("b", (3,), "float32", 0),
        ("mean", (3,), "float32", None),
    ]
    return plan_parameters(
        named, [Rule("sgd", {**RULE, "lr": lr}, {})], mode="sync", trainers=trainers, servers=1
    )


class Stranger:
    """A peer that speaks the protocol frame by frame, right or wrong."""

    def __init__(
        self, endpoint: str, transport: str, plan: Plan | None = None, number: int = 0
    ) -> None:
        self.plan, self.number, self.transport = plan or plan_of(), number, transport
        self.control = ControlClient(endpoint, DEADLINE)
        self.reply = self.control.join(self.request())
        self.port = self.reply.data_port
        self.streams: list[Stream] = []

    def request(self, **changed: Any) -> JoinRequest:
        known = dict(
            protocol=3, trainer_id=self.number, incarnation="stranger", transports=[self.transport]
        )
        return JoinRequest(
            **{
                **known,
                "fingerprint": self.plan.fingerprint(),
                "manifest": self.plan.manifest(),
                **changed,
            }
        )

    def connect(self) -> Stream:
        """A stream that has not said HELLO."""
        self.streams.append(
            TRANSPORTS[self.transport].connect("127.0.0.1", self.port, timeout_seconds=DEADLINE)
        )
        return self.streams[-1]

    def hello(self, **changed: Any) -> Stream:
        stream = self.connect()
        stream.send(
            Frame(
                kind=Kind.HELLO,
                hello=Hello(
                    **{"session": self.reply.session, "trainer_id": self.number, **changed}
                ),
            )
        )
        return stream

    def installed(self) -> Stream:
        """A stream to a server that has this stranger's program and values."""
        program = pserver_program(Deployment(self.plan, ("h:1",), server_index=0))
        self.control.install(InstallRequest(session=self.reply.session, program=program.to_proto()))
        stream = self.hello()
        values = dict(w=torch.ones(2, 3), b=torch.ones(3), mean=torch.full((3,), 7.0))
        for header, payload in frames.frames(Kind.VALUE, 0, values.items()):
            stream.send(header, payload)
        ask(stream, Frame(kind=Kind.COMMIT))
        return stream

    def leave(self) -> None:
        for stream in self.streams:
            stream.cancel()
        self.control.leave(LeaveRequest(session=self.reply.session, success=True))
        self.control.close()


def answer(stream: Stream) -> tuple[Done, dict[str, torch.Tensor]]:
    """What the server says; its FAILURE is raised."""
    values: dict[str, torch.Tensor] = {}
    while (received := stream.receive()) is not None:
        header, payload = received
        if header.kind == Kind.DONE:
            return header.done, values
        if header.kind == Kind.FAILURE:
            raise from_wire(header.failure.error, header.failure.message)
        frames.scatter(
            header, payload, lambda part: values.setdefault(part.name, frames.blank(part))
        )
    raise AssertionError("the stream ended without an answer")


def ask(
    stream: Stream, header: Frame, payload: bytes = b""
) -> tuple[Done, dict[str, torch.Tensor]]:
    stream.send(header, [payload] if payload else [])
    return answer(stream)


def gradient(
    name: str = "w",
    shape: tuple[int, ...] = (2, 3),
    offset: int = 0,
    size: int = 24,
    dtype: str = "float32",
) -> Frame:
    return Frame(
        kind=Kind.GRADIENT,
        step=1,
        parts=[Part(name=name, dtype=dtype, shape=shape, offset=offset, size=size)],
    )


def commit(absent: tuple[str, ...] = ("b",), step: int = 1) -> Frame:
    return Frame(
        kind=Kind.COMMIT,
        step=step,
        commit=Commit(
            hparams=[GroupHparams(group=0, values=hparams_to_proto(RULE))], absent=absent
        ),
    )


def send_bytes(stream: Any, data: bytes) -> None:
    """Bytes where a frame should be, past all that the transport would check."""
    if stream.transport == "grpc":
        stream.outgoing.put(data)
    else:
        stream._sockets[0].send(data, (), 0)


def good_job(endpoints: str) -> None:
    """Three steps of Adam, which equal plain torch to the bit."""
    models = []
    for distributed in (True, False):
        torch.manual_seed(3)
        model = nn.Linear(5, 300)
        optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        if distributed:
            fleet.init(
                fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=endpoints.split(","))
            )
            fleet.distributed_model(model)
            optimizer = fleet.distributed_optimizer(optimizer)
        for number in range(3):
            optimizer.zero_grad()
            model(torch.full((2, 5), number + 1.0)).square().mean().backward()
            optimizer.step()
        if distributed:
            fleet.finish()
        models.append(model)
    for mine, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(mine, theirs)


def assert_untouched(stranger: Stranger) -> None:
    """The stranger's job is as it was before its last step, and a whole step over a new stream is
    applied once.
    """
    stream = stranger.hello()
    _, before = ask(stream, Frame(kind=Kind.PULL))
    assert torch.equal(before["w"], torch.ones(2, 3)) and torch.equal(before["b"], torch.ones(3))
    stream.send(gradient(), [torch.full((2, 3), 2.0).numpy().data.cast("B")])
    done, after = ask(stream, commit())
    assert (done.version, done.committed) == (1, 1)
    assert torch.equal(after["w"], torch.zeros(2, 3)) and torch.equal(after["b"], torch.ones(3))
