"""A program that is longer than one message may be."""

from __future__ import annotations

import random

import pytest
import torch

from pserver import limits
from pserver.client import client
from pserver.config import ServerConfig
from pserver.errors import Refused
from pserver.job import job
from pserver.job.job import ProgramParts
from pserver.limits import Limits
from pserver.service.server import Server
from pserver.wire_pb2 import InstallRequest
from tests.support.one_parameter import Trainer, plan_of
from transpiler.distribute import pserver_program
from transpiler.plan.plan import Deployment


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part has 64 bytes."""
    for module in (limits, job, client):
        monkeypatch.setattr(module, "PART_BYTES", 64)


@pytest.mark.usefixtures("short")
def test_a_long_program_arrives_in_parts() -> None:
    """A job trains as if it had come whole."""
    with Server(ServerConfig()) as server:
        trainer = Trainer(server.endpoint)
        trainer.step(1, 1.0)
        assert torch.equal(trainer.value, torch.full((1000,), 0.5))
        trainer.client.leave()


@pytest.mark.usefixtures("short")
def test_parts_come_in_any_order_and_more_than_once() -> None:
    """The last one that is missing gives the program."""
    program = pserver_program(Deployment(plan_of(), ("a:1",), server_index=0))
    requests = list(client.install_requests("session", program))
    parts, shuffled = ProgramParts(Limits()), requests * 2
    random.Random(3).shuffle(shuffled)
    found, seen = [parts.add(each) for each in shuffled], set[int]()

    assert len(requests) > 5 and requests[0].session == "session"
    for request, message in zip(shuffled, found, strict=True):
        seen.add(request.number)
        assert (message is not None) == (len(seen) == len(requests))
        assert message is None or message == program.to_proto()


def test_a_short_program_is_one_message() -> None:
    """As a peer of an earlier version sends it."""
    program = pserver_program(Deployment(plan_of(), ("a:1",), server_index=0))
    (request,) = client.install_requests("session", program)

    assert request == InstallRequest(session="session", program=program.to_proto())


@pytest.mark.parametrize(
    ("part", "number", "parts", "message"),
    [
        (b"", 1, 1, "expected a program in up to 32 parts .--max-program. of up to 2097152 bytes"),
        (b"", 0, 33, "got part 0 of 33 of 0 bytes"),
        (b"x" * (2**21 + 1), 0, 1, "got part 0 of 1 of 2097153 bytes"),
        (b"\xff\xff", 0, 1, "the parts do not form a program"),
    ],
)
def test_what_is_no_part_is_refused(part: bytes, number: int, parts: int, message: str) -> None:
    """Before anything is kept that is too long."""
    with pytest.raises(Refused, match=message):
        ProgramParts(Limits()).add(InstallRequest(part=part, number=number, parts=parts))
