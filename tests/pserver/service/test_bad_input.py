"""What a real server does with bytes and calls that should not be: a clear error, nothing
half-done, and the next job is fine.

Every test that has a ``stranger`` ends with a good job on the same server, equal to plain torch to
the bit.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pyarrow as pa
import pyarrow.flight as fl
import pytest
import torch
from torch import nn

from pserver.config import ServerConfig
from pserver.control import ControlClient
from pserver.errors import (
    Busy,
    CorruptFrame,
    FingerprintMismatch,
    PServerError,
    Refused,
    TimedOut,
    Unreachable,
    from_wire,
)
from pserver.service.server import Server
from pserver.transport import codec
from pserver.transport.registry import TRANSPORTS
from pserver.transport.stream import Stream
from pserver.wire_pb2 import (
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
)
from trainer import fleet
from transpiler.distribute import plan_parameters, pserver_program
from transpiler.formats.plan_message import hparams_to_proto
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
            protocol=1, trainer_id=self.number, incarnation="stranger", transports=[self.transport]
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
        for header, payload in codec.frames(Kind.VALUE, 0, values.items()):
            stream.send(header, payload)
        ask(stream, Frame(kind=Kind.COMMIT))
        return stream

    def leave(self) -> None:
        for stream in self.streams:
            stream.cancel()
        self.control.leave(LeaveRequest(session=self.reply.session))
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
        codec.scatter(header, payload, lambda part: values.setdefault(part.name, codec.blank(part)))
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
        stream._writer.write_metadata(pa.py_buffer(data))


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


@pytest.fixture(params=["flight", "grpc"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PSERVER_TRANSPORT", request.param)
    return str(request.param)


@pytest.fixture
def stranger(servers: Servers, transport: str) -> Iterator[Stranger]:
    one = Stranger(servers(1), transport)
    yield one
    one.leave()
    good_job(servers(1))


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


# ---- bytes that are no frames ----


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_another_flight_call_is_refused(servers: Servers, stranger: Stranger) -> None:
    """Flight's data port knows one exchange and nothing else."""
    if stranger.transport != "flight":
        pytest.skip("only Flight has a data port")
    with fl.FlightClient(f"grpc+tcp://127.0.0.1:{stranger.port}") as client:
        for attempt in (
            lambda: client.get_flight_info(fl.FlightDescriptor.for_path("x")),
            lambda: client.do_get(fl.Ticket(b"x")).read_all(),
            lambda: client.do_exchange(fl.FlightDescriptor.for_command(b"other"))[1].read_chunk(),
        ):
            with pytest.raises((fl.FlightError, pa.ArrowException, NotImplementedError)):
                attempt()


# ---- frames out of place ----


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Kind.PULL, Kind.COMMIT, Kind.BYE, 99])
def test_a_stream_without_hello_is_refused(stranger: Stranger, kind: Any) -> None:
    """Whatever else comes first."""
    with pytest.raises(Refused, match="expected HELLO as the first frame"):
        ask(stranger.connect(), Frame(kind=kind))


@pytest.mark.slow
def test_a_session_that_nobody_holds_is_refused(servers: Servers, stranger: Stranger) -> None:
    """Stale, invented, or another trainer's: on a stream and in a heartbeat."""
    for session in ("", "0" * 32, "\u00e9"):
        with pytest.raises(Refused, match="session is not known here"):
            answer(stranger.hello(session=session))
        with pytest.raises(Refused, match="session is not known here"):
            stranger.control.heartbeat(HeartbeatRequest(session=session))
    with pytest.raises(Refused, match="belongs to trainer 0, not to trainer 5"):
        answer(stranger.hello(trainer_id=5))


@pytest.mark.slow
def test_a_lane_that_the_plan_does_not_have_is_refused(stranger: Stranger) -> None:
    """HELLO says which lane the stream is for."""
    stranger.installed()
    stream = stranger.hello(lane=7)
    stream.send(gradient(), [b"\0" * 24])

    with pytest.raises(Refused, match="lane"):
        answer(stream)
    assert_untouched(stranger)


@pytest.mark.slow
def test_a_step_before_the_program_is_refused(stranger: Stranger) -> None:
    """A server that has not been installed takes no gradients and no values, and gives none."""
    for header, payload in (
        (gradient(), b"\0" * 24),
        (Frame(kind=Kind.PULL), b""),
        (commit(), b""),
    ):
        with pytest.raises(PServerError, match="not been installed"):
            ask(stranger.hello(), header, payload)


FRAMES = {
    "dtype": (gradient(dtype="float64"), b"\0" * 24, "'w': expected dtype float32, got 'float64'"),
    "no dtype": (
        gradient(dtype="float33"),
        b"\0" * 24,
        "'w': expected dtype float32, got 'float33'",
    ),
    "shape": (gradient(shape=(3, 2)), b"\0" * 24, r"'w': expected shape \[2, 3\], got \[3, 2\]"),
    "huge shape": (gradient(shape=(2**62, 2**62)), b"\0" * 24, r"'w': expected shape \[2, 3\]"),
    "beyond the end": (
        gradient(offset=4),
        b"\0" * 24,
        "'w': expected whole elements.*within 24, got bytes 4 to 28",
    ),
    "far beyond the end": (gradient(offset=2**63), b"\0" * 24, "'w': expected whole elements"),
    "inside an element": (gradient(offset=2, size=4), b"\0" * 4, "'w': expected whole elements"),
    "a gap": (
        gradient(offset=12, size=12),
        b"\0" * 12,
        "'w': expected bytes from 0 on, got them from 12",
    ),
    "too few bytes": (
        gradient(),
        b"\0" * 12,
        "expected 24 bytes of payload as the parts say, got 12",
    ),
    "too many bytes": (
        gradient(size=12),
        b"\0" * 24,
        "expected 12 bytes of payload as the parts say, got 24",
    ),
    "elsewhere": (gradient(name="v.block1"), b"\0" * 24, "'v.block1'.*belongs elsewhere"),
    "not updated": (
        gradient(name="mean", shape=(3,), size=12),
        b"\0" * 12,
        "'mean'.*belongs elsewhere",
    ),
    "not committed": (
        commit(absent=()),
        b"",
        "step 1: expected 24 bytes of the gradient of 'w', got 0",
    ),
    "absent elsewhere": (
        commit(absent=("w", "b", "x")),
        b"",
        "'x', absent in step 1, is not updated",
    ),
    "no numbers": (
        Frame(kind=Kind.COMMIT, step=1, commit=Commit(absent=["w", "b"])),
        b"",
        "no hyper-parameters for group 0",
    ),
    "step ahead": (commit(absent=("w", "b"), step=7), b"", "expected step 1, got step 7"),
    "a server's frame": (
        Frame(kind=Kind.DONE),
        b"",
        "expected GRADIENT, COMMIT, VALUE, PULL or BYE, got DONE",
    ),
    "an unknown kind": (Frame(kind=99), b"", "expected GRADIENT.*got kind 99"),  # type: ignore[arg-type]
    "an unknown value": (
        Frame(kind=Kind.VALUE, parts=[Part(name="x", dtype="float32", shape=[1], size=4)]),
        b"\0" * 4,
        "no variable 'x'",
    ),
    "an unknown pull": (Frame(kind=Kind.PULL, parts=[Part(name="x")]), b"", "no variable 'x'"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", FRAMES)
def test_a_frame_that_contradicts_the_plan_is_refused_and_nothing_changes(
    stranger: Stranger, what: str
) -> None:
    """The peer is told what was expected and what came; the step that it was part of is not
    applied, not even in part.
    """
    header, payload, words = FRAMES[what]
    stream = stranger.installed()

    with pytest.raises(PServerError, match=words):
        ask(stream, header, payload)
    assert_untouched(stranger)


@pytest.mark.slow
def test_half_a_gradient_twice_is_not_a_gradient(stranger: Stranger) -> None:
    """The bytes add up, the parts do not."""
    stream = stranger.installed()
    stream.send(gradient(size=12), [b"\0" * 12])

    with pytest.raises(CorruptFrame, match="'w': expected bytes from 12 on, got them from 0"):
        ask(stream, gradient(size=12), b"\0" * 12)
    assert_untouched(stranger)


@pytest.mark.slow
def test_half_a_gradient_and_then_silence_leaves_no_trace(stranger: Stranger) -> None:
    """The connection is cut in the middle of a step; the same step, sent whole over another stream,
    is applied once.
    """
    stream = stranger.installed()
    stream.send(gradient(size=12), [b"\1" * 12])
    stream.cancel()

    assert_untouched(stranger)


@pytest.mark.slow
def test_gradients_of_two_steps_do_not_mix(stranger: Stranger) -> None:
    """A second step's gradient before the first one's COMMIT."""
    stream = stranger.installed()
    stream.send(gradient(), [b"\0" * 24])
    later = gradient("b", (3,), 0, 12)
    later.step = 2

    with pytest.raises(CorruptFrame, match="gradients of step 2 among those of step 1"):
        ask(stream, later, b"\0" * 12)
    assert_untouched(stranger)


# ---- programs and jobs ----


@pytest.mark.slow
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


@pytest.mark.slow
def test_another_program_is_told_in_what_it_differs(servers: Servers, transport: str) -> None:
    """One different learning rate."""
    first = Stranger(servers(1), transport, plan_of(trainers=2))
    first.installed()
    try:
        with pytest.raises(FingerprintMismatch, match=r"group 0: lr: 0\.25 \(trainer 0 has 0\.5\)"):
            Stranger(servers(1), transport, plan_of(trainers=2, lr=0.25), number=1)
        with pytest.raises(Refused, match="below 2, got 2"):
            Stranger(servers(1), transport, plan_of(trainers=2), number=2)
        with pytest.raises(Refused, match="protocol version 1, got 9"):
            first.control.join(first.request(protocol=9))
    finally:
        first.leave()
    good_job(servers(1))


@pytest.mark.slow
def test_a_second_job_is_told_that_the_server_is_busy(servers: Servers, stranger: Stranger) -> None:
    """The first is not disturbed."""
    stranger.installed()
    with pytest.raises(Busy, match=servers(1)):
        good_job(servers(1))
    fleet.finish()
    assert_untouched(stranger)


def test_a_transport_that_the_server_does_not_offer_is_refused(transport: str) -> None:
    """The error says what it offers."""
    other = {"flight": "grpc", "grpc": "flight"}[transport]
    with (
        Server(ServerConfig(transport=other)) as server,
        pytest.raises(Refused, match=rf"the server has \['{other}'\]"),
    ):
        good_job(server.endpoint)


# ---- servers that are not there ----


@pytest.mark.slow
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


@pytest.mark.slow
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


# ---- sizes ----


def test_an_empty_parameter_passes(servers: Servers, transport: str) -> None:
    """Zero elements, beside others and with optimizer state, over either transport."""
    model = nn.ParameterDict(
        {"none": nn.Parameter(torch.zeros(0, 3)), "one": nn.Parameter(torch.ones(2))}
    )
    fleet.init(fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=[servers(1)]))
    fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(
        torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    )
    for _ in range(2):
        optimizer.zero_grad()
        (model["none"].sum() + model["one"].sum()).backward()
        optimizer.step()

    assert model["none"].shape == (0, 3) and torch.equal(
        model["one"], torch.full((2,), 1 - 0.5 - 0.5 * 1.9)
    )


LARGE = 3 * 2**30  # bytes: more than a protobuf message holds, more than 32 bits count
NEEDS = 15 * 2**30  # the parameter and its gradient, each on both sides, and room


def available() -> int:
    """Main memory that nobody uses, in bytes."""
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text().splitlines() if meminfo.exists() else []
    return next(
        (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), 0
    )


@pytest.mark.slow
def test_a_parameter_of_3_gb_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploaded, stepped and received whole, in one slice: every element has taken its step."""
    if available() < NEEDS:
        pytest.skip(
            f"needs {NEEDS / 2**30:.0f} GiB of free memory, there are {available() / 2**30:.1f}"
        )
    monkeypatch.setenv("PSERVER_TRANSPORT", "flight")
    elements = LARGE // 4
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(elements))})
    with Server(ServerConfig()) as server:
        fleet.init(fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=[server.endpoint]))
        fleet.distributed_model(model)
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        model["w"].grad = torch.full((elements,), 0.25)
        model["w"].grad[-1] = 0.5
        optimizer.step()
        fleet.finish()

    assert bool((model["w"][:-1] == 0.75).all()) and model["w"][-1] == 0.5
