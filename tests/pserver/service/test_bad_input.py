"""What a real server does with bytes, programs and calls that should not be: a clear error, nothing
half-done, and the next job is fine.

Every test that has a ``stranger`` ends with a good job on the same server, equal to plain torch to
the bit.
"""

from __future__ import annotations

import os
import socket
import time

import grpc
import pytest
import torch
from torch import nn

from pserver.config import ServerConfig
from pserver.errors import (
    Busy,
    CorruptFrame,
    FingerprintMismatch,
    Refused,
    TimedOut,
    Unreachable,
)
from pserver.service.server import Server
from pserver.wire_pb2 import (
    InstallRequest,
)
from tests.support.stranger import (
    DEADLINE,
    Servers,
    Stranger,
    answer,
    assert_untouched,
    good_job,
    gradient,
    plan_of,
    send_bytes,
)
from trainer import fleet
from transpiler.distribute import pserver_program
from transpiler.plan.plan import Deployment

# ---- bytes that are no frames ----


@pytest.mark.parametrize(
    "garbage",
    [b"\xff" * 40, b"GET / HTTP/1.1\r\n\r\n", b"\x7a\xff\xff\xff\xff\x7f"],
    ids=["ff", "http", "size"],
)
def test_garbage_instead_of_hello_is_refused(stranger: Stranger, garbage: bytes) -> None:
    """The first frame is none: CorruptFrame, told to the peer."""
    stream = stranger.connect()
    send_bytes(stream, garbage)

    with pytest.raises(CorruptFrame):
        answer(stream)


@pytest.mark.parametrize("garbage", [b"\xff" * 40, b"\x08\x03\x10"], ids=["ff", "cut short"])
def test_garbage_in_the_middle_of_a_step_leaves_no_trace(
    stranger: Stranger, garbage: bytes
) -> None:
    """The stream ends with CorruptFrame; what came before it is forgotten."""
    stream = stranger.installed()
    stream.send(gradient(), [b"\1" * 24])
    send_bytes(stream, garbage)

    with pytest.raises(CorruptFrame):
        answer(stream)
    assert_untouched(stranger)


def test_bytes_that_are_no_protocol_at_all_do_not_disturb_a_port(stranger: Stranger) -> None:
    """A port scanner, or a browser, on the control port and on the data port."""
    _, _, control = stranger.control.endpoint.rpartition(":")
    for port in (int(control), stranger.port):
        for data in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", os.urandom(2000), b""):
            with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE) as client:
                client.sendall(data)
    stranger.installed()
    assert_untouched(stranger)


def test_a_control_call_that_is_no_message_is_refused(stranger: Stranger) -> None:
    """Garbage as a Join: an error for the caller."""
    with grpc.insecure_channel(stranger.control.endpoint) as channel:
        call = channel.unary_unary("/pserver.ParameterServer/Join")
        with pytest.raises(grpc.RpcError):
            call(b"\xff" * 30, timeout=DEADLINE)


# ---- programs and jobs ----


def test_a_program_with_an_unknown_op_or_argument_is_refused(stranger: Stranger) -> None:
    """Only allow-listed ops with arguments of the right types; afterwards the right program is
    taken.
    """
    good = pserver_program(Deployment(stranger.plan, ("h:1",), server_index=0)).to_proto()
    for number, name in enumerate(("os.system", "aten.mm")):
        message = type(good)()
        message.CopyFrom(good)
        message.blocks[1].ops[0].type = name
        with pytest.raises(Refused, match=name):
            stranger.control.install(
                InstallRequest(session=stranger.reply.session, program=message)
            )
        assert number < 2
    stranger.installed()
    assert_untouched(stranger)


def test_a_program_of_another_plan_is_refused(stranger: Stranger) -> None:
    """What is installed is what the trainers have agreed on by joining."""
    other = pserver_program(Deployment(plan_of(lr=0.25), ("h:1",), server_index=0)).to_proto()
    with pytest.raises(FingerprintMismatch):
        stranger.control.install(InstallRequest(session=stranger.reply.session, program=other))


def test_another_program_is_told_in_what_it_differs(servers: Servers, transport: str) -> None:
    """One different learning rate."""
    first = Stranger(servers(1), transport, plan_of(trainers=2))
    first.installed()
    try:
        with pytest.raises(FingerprintMismatch, match=r"group 0: lr: 0\.25 \(trainer 0 has 0\.5\)"):
            Stranger(servers(1), transport, plan_of(trainers=2, lr=0.25), number=1)
        with pytest.raises(Refused, match="below 2, got 2"):
            Stranger(servers(1), transport, plan_of(trainers=2), number=2)
        with pytest.raises(Refused, match="protocol version 3, got 9"):
            first.control.join(first.request(protocol=9))
    finally:
        first.leave()
    good_job(servers(1))


def test_a_second_job_is_told_that_the_server_is_busy(servers: Servers, stranger: Stranger) -> None:
    """The first is not disturbed."""
    stranger.installed()
    with pytest.raises(Busy, match=servers(1)):
        good_job(servers(1))
    fleet.finish()
    assert_untouched(stranger)


def test_a_transport_that_the_server_does_not_offer_is_refused(transport: str) -> None:
    """The error says what it offers."""
    other = {"tcp": "grpc", "grpc": "tcp"}[transport]
    with (
        Server(ServerConfig(transport=other)) as server,
        pytest.raises(Refused, match=rf"the server has \['{other}'\]"),
    ):
        good_job(server.endpoint)


# ---- servers that are not there ----


@pytest.mark.parametrize("what", ["nobody", "mute"])
def test_an_unreachable_server_is_named_within_the_start_deadline(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Nobody listens there, or something that never answers: Unreachable with HOST:PORT; the other
    server keeps no trace.
    """
    monkeypatch.setenv("PSERVER_START_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        if what == "nobody":
            listener.close()
        began = time.monotonic()
        with pytest.raises(Unreachable, match=endpoint):
            good_job(f"{servers(1)},{endpoint}")
        assert time.monotonic() - began < 5
    fleet.finish()
    good_job(servers(1))


def test_a_server_that_no_trainer_0_installs_is_named(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is up, and nothing happens: TimedOut after the start deadline, which says for whom it was
    waiting.
    """
    monkeypatch.setenv("PSERVER_START_TIMEOUT", "1")
    fleet.init(fleet.UserDefinedRoleMaker(1, worker_num=2, server_endpoints=[servers(1)]))
    model = fleet.distributed_model(nn.Linear(2, 2))
    with pytest.raises(TimedOut, match=rf"{servers(1)}.*trainer 0"):
        fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    fleet.finish()
    good_job(servers(1))
