"""What a stranger can take from a server: a little, for seconds; and no trainer notices."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import grpc
import pytest

from pserver.config import PREFERRED_TRANSPORTS, PROTOCOL, ServerConfig, split_endpoint
from pserver.control.control_client import ControlClient
from pserver.errors import GarbledStream, PServerError, Refused
from pserver.service.server import Server
from pserver.transport import grpc_port, grpc_stream
from pserver.transport.registry import connect
from pserver.transport.tcp import PREFIX, Greeting, Welcome
from pserver.wire_pb2 import (
    AnnounceRequest,
    Frame,
    HeartbeatRequest,
    Hello,
    JoinRequest,
    Kind,
    LeaseEpoch,
    LeaseRequest,
    ObserveRequest,
    Part,
)
from tests.support.one_parameter import SECONDS, Trainer, plan_of
from tests.support.waiting import eventually

FLOOD = 600  # more than a pool of threads ever had
STRANGER = "127.0.1.1"  # no path of another test listens there: ports are taken for a minute


@contextmanager
def served(**settings: object) -> Iterator[tuple[Server, Trainer]]:
    """A server with a running job."""
    with Server(ServerConfig(**settings)) as server:  # type: ignore[arg-type]
        trainer = Trainer(server.endpoint)
        trainer.step(1, 1.0)
        yield server, trainer
        trainer.step(2, 1.0)
        trainer.client.leave()
        assert server.job.failure is None


def beats(server: Server, trainer: Trainer) -> bool:
    """Whether a heartbeat over a new connection is answered."""
    control = ControlClient(server.endpoint, SECONDS)
    control.heartbeat(HeartbeatRequest(session=trainer.client._reply.session))
    control.close()
    return True


# ---- threads ----


def idle_calls(server: Server, method: str, count: int) -> Iterator[grpc.Channel]:
    """Calls whose message never comes."""
    release = threading.Event()

    def nothing() -> Iterator[bytes]:
        release.wait(SECONDS)
        yield from ()

    each = grpc_port.CALLS_OF_CONNECTION  # more would wait for one another
    for _ in range(0, count, each):
        channel = grpc.insecure_channel(server.endpoint, options=grpc_port.CLIENT_OPTIONS)
        # a connection that has a call may stay
        channel.unary_unary(f"/{grpc_stream.SERVICE}/Status")(b"", timeout=SECONDS)
        calls = [channel.stream_stream(method)(nothing()) for _ in range(each)]
        yield channel
        del calls
    release.set()


@pytest.mark.parametrize("call", ["Exchange", "Heartbeat", "Status", "Install"])
def test_idle_calls_take_no_heartbeats_thread(call: str) -> None:
    """Hundreds of calls that never send a message: heartbeats and steps go on, and whoever joins
    is answered.
    """
    with served() as (server, trainer), ExitStack() as stack:
        for channel in idle_calls(server, f"/{grpc_stream.SERVICE}/{call}", FLOOD):
            stack.callback(channel.close)
        assert beats(server, trainer)
        control = ControlClient(server.endpoint, SECONDS)
        control.wait_ready(SECONDS)
        with pytest.raises(Refused):  # it is asked, and has an answer
            control.join(JoinRequest())
        control.close()


def threads_of_streams() -> int:
    return sum(thread.name.startswith(("exchange", "grpc ex")) for thread in threading.enumerate())


@pytest.mark.parametrize("transport", PREFERRED_TRANSPORTS)
def test_streams_without_hello_are_few(transport: str) -> None:
    """Of hundreds of them the latest stay, for a while."""
    with served(transport=transport) as (server, trainer), ExitStack() as stack:
        before, port = threads_of_streams(), server.job.transports[transport]
        for _ in range(300):
            with suppress(PServerError):
                stream = connect(transport, "127.0.0.1", port, timeout_seconds=SECONDS)
                stack.callback(stream.cancel)
        most = 2 * server.config.limits.strangers + 8  # and some that come or go
        eventually(lambda: threads_of_streams() - before <= most)
        assert beats(server, trainer)


# ---- time ----


@pytest.mark.parametrize("transport", PREFERRED_TRANSPORTS)
def test_a_stream_says_hello_or_ends(transport: str) -> None:
    """Within the timeout for it; a trainer's stream that is idle for longer stays open."""
    with served(transport=transport, hello_timeout_seconds=0.3) as (server, trainer):
        port = server.job.transports[transport]
        stream = connect(transport, "127.0.0.1", port, timeout_seconds=SECONDS)
        with suppress(PServerError):
            assert stream.receive() is None
        stream.cancel()
        assert trainer.channel.reconnects == 0


@pytest.mark.parametrize("said", [b"", b"pst"], ids=["nothing", "the beginning"])
def test_a_connection_greets_or_ends(said: bytes) -> None:
    """On the port of the tensors, within the timeout for it."""
    with served(hello_timeout_seconds=0.3) as (server, _):
        for name in ("tcp", "grpc"):
            address = ("127.0.0.1", server.job.transports[name])
            with socket.create_connection(address, timeout=SECONDS) as connection:
                connection.sendall(said)
                with suppress(ConnectionError):
                    while connection.recv(1000):
                        pass


@pytest.mark.parametrize("said", [b"", b"PRI * HTTP/2.0\r\n\r\n"], ids=["nothing", "a preface"])
def test_held_connections_of_a_stranger_keep_no_trainer_out(said: bytes) -> None:
    """More than the control port takes, all of them held: they end one another, and a new
    connection is answered.
    """
    with served(max_connections=64) as (server, trainer), ExitStack() as stack:
        host, port = split_endpoint(server.endpoint)
        for _ in range(300):
            held = stack.enter_context(closing(socket.socket()))
            held.bind((STRANGER, 0))
            held.settimeout(SECONDS)
            held.connect((host, port))
            held.sendall(said)
        assert beats(server, trainer)


def test_a_call_without_its_message_ends() -> None:
    """Within the timeout for it."""
    with served(hello_timeout_seconds=0.3) as (server, _):
        calls = idle_calls(server, f"/{grpc_stream.SERVICE}/Heartbeat", 1)
        with next(calls):
            waiting = server._control._threads._waiting["beats"]
            eventually(lambda: waiting.ended >= grpc_port.CALLS_OF_CONNECTION)


# ---- lengths ----


def peak() -> int:
    """The most memory that this process has had, in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def test_a_length_before_hello_takes_no_memory() -> None:
    """A prefix that says 64 MB is refused before anything is read."""
    with served() as (server, _):
        before = peak()
        for sizes in ((2**26, 0), (2, 2**26), (2**32 - 1, 0)):
            address = ("127.0.0.1", server.job.transports["tcp"])
            with socket.create_connection(address, timeout=SECONDS) as connection:
                Greeting().send(connection)
                Welcome.receive(connection)
                connection.sendall(PREFIX.pack(*sizes) + b"\x08\x01")
                answer = connection.recv(2**16)
                assert b"expected a header of 1 to 4096" in answer
        assert peak() - before < 2**25


@pytest.mark.parametrize("transport", PREFERRED_TRANSPORTS)
def test_a_first_frame_is_small(transport: str) -> None:
    """A header of millions of parts takes forty times its size when it is read: not before HELLO;
    and even behind it a header has a limit.
    """
    with served(transport=transport) as (server, trainer):
        before, port = peak(), server.job.transports[transport]
        for frame in (Frame(kind=Kind.HELLO, parts=[Part()] * 10_000), Frame(kind=Kind.HELLO)):
            stream = connect(transport, "127.0.0.1", port, timeout_seconds=SECONDS)
            stream.send(frame, [] if frame.parts else [bytes(10_000)])
            received = stream.receive()
            assert received is not None and received[0].failure.error == GarbledStream.__name__
            stream.cancel()
        assert peak() - before < 2**25


def test_a_message_of_a_call_is_as_large_as_the_call_needs() -> None:
    """A heartbeat of a MB is none, and a manifest of 10 MB is refused by the setting's name."""
    with served() as (server, _):
        control = ControlClient(server.endpoint, SECONDS)
        with pytest.raises(Refused, match="Heartbeat: expected a message of up to 65536 bytes"):
            control.heartbeat(HeartbeatRequest(session="x" * 2**20))
        with pytest.raises(Refused, match="refuses Join: .*larger than max.*--max-program"):
            control.join(JoinRequest(manifest={"w": "x" * 10 * 2**20}))
        control.close()


# ---- numbers and names ----


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"trainers": "1000000000"}, "1000000000 trainers.*takes 1 to 1024 .--max-trainers"),
        ({"trainers": "9" * 10_000}, "does not say the number of trainers"),
        ({"trainers": "-1"}, "-1 trainers"),
        ({}, ""),
    ],
    ids=["many", "no number", "negative", "names"],
)
def test_a_job_beyond_the_limits_does_not_begin(changed: dict[str, str], words: str) -> None:
    """The number of trainers, and the length of names."""
    with Server(ServerConfig()) as server:
        control = ControlClient(server.endpoint, SECONDS)
        manifest = {**plan_of().manifest(), **changed}
        request = JoinRequest(protocol=PROTOCOL, manifest=manifest, transports=["tcp"])
        if not changed:
            request.incarnation, words = "x" * 2000, "names of up to 1024 characters"
        with pytest.raises(Refused, match=words):
            control.join(request)
        assert control.status().state == "empty"
        control.close()


def test_a_program_that_does_not_fit_is_refused() -> None:
    """Before its memory is taken, by the name of the setting."""
    with (
        Server(ServerConfig(max_memory=3e-6)) as server,
        pytest.raises(Refused, match="take 0.0 GB here, and this server takes.*--max-memory"),
    ):
        Trainer(server.endpoint)


def test_a_strangers_names_are_not_kept() -> None:
    """Neither in the counts of bytes, before HELLO or behind it, nor as arrays."""
    with served(transport="tcp") as (server, trainer):
        before = server.job.traffic.by_name().keys()
        session = trainer.client._reply.session
        for hello in (Frame(kind=Kind.PULL), hello_of(session, 0), hello_of(session, 0)):
            port = server.job.transports["tcp"]
            stream = connect("tcp", "127.0.0.1", port, timeout_seconds=SECONDS)
            if hello.kind == Kind.PULL:
                hello.parts.add(name="invented")
            stream.send(hello)
            part = Part(name="invented", dtype="float32", shape=[1], size=4)
            with suppress(PServerError):
                stream.send(Frame(kind=Kind.ROWS, step=2, parts=[part]), [bytes(4)])
                while (received := stream.receive()) is not None:
                    assert received[0].kind in (Kind.FAILURE, Kind.PROBE)
            stream.cancel()
        assert server.job.traffic.by_name().keys() == before


def test_the_names_of_an_epoch_are_short() -> None:
    """The lease table keeps them."""
    with served() as (server, trainer):
        for epoch in (LeaseEpoch(loader="x" * 2000), LeaseEpoch(seed="x" * 2000)):
            session = trainer.client._reply.session
            with pytest.raises(Refused, match="names of up to 1024 characters, got one of 2000"):
                server.job.lease(LeaseRequest(session=session, number=1, epoch=epoch))


def hello_of(session: str, lane: int) -> Frame:
    return Frame(kind=Kind.HELLO, hello=Hello(session=session, lane=lane))


def test_a_lane_that_the_manifest_does_not_have_is_refused_before_the_program_is_there() -> None:
    """It would get a watermark."""
    with Server(ServerConfig(transport="tcp")) as server:
        control = ControlClient(server.endpoint, SECONDS)
        request = JoinRequest(protocol=PROTOCOL, manifest=plan_of().manifest(), transports=["tcp"])
        session = control.join(request).session
        stream = connect("tcp", "127.0.0.1", server.job.transports["tcp"], timeout_seconds=SECONDS)
        stream.send(hello_of(session, 7))
        received = stream.receive()
        assert received is not None and "expected a lane below 1, got 7" in str(received[0])
        stream.cancel()
        control.close()


def test_announcements_and_observers_are_bounded() -> None:
    """By number of trainer, by name, and in all."""
    with served(max_trainers=2) as (server, _):
        control = ControlClient(server.endpoint, SECONDS)
        with pytest.raises(Refused, match="a trainer number below 2 .--max-trainers., got 9"):
            control.announce(AnnounceRequest(trainer_id=9, incarnation="a"))
        for index in range(100):
            control.announce(AnnounceRequest(trainer_id=1, incarnation=f"stranger {index}"))
        assert len(server.job._announcements._announced) <= 8
        control.announce(AnnounceRequest(trainer_id=1, incarnation="stranger 99", joined=True))
        for _ in range(server.config.limits.observers):
            control.observe(ObserveRequest(transports=["tcp"]))
        with pytest.raises(Refused, match="16 observers"):
            control.observe(ObserveRequest(transports=["tcp"]))
        control.close()


def test_an_observer_has_one_stream() -> None:
    """A later one replaces it: otherwise whoever may read could take any number of threads."""
    with served() as (server, _):
        control = ControlClient(server.endpoint, SECONDS)
        reply = control.observe(ObserveRequest(transports=["tcp"]))
        streams = []
        for _ in range(3):
            port = server.job.transports["tcp"]
            streams.append(connect("tcp", "127.0.0.1", port, timeout_seconds=SECONDS))
            streams[-1].send(hello_of(reply.session, 0))
            streams[-1].send(Frame(kind=Kind.PROBE))
            received = streams[-1].receive()
            assert received is not None and received[0].kind == Kind.PROBE
        for earlier in streams[:2]:
            with suppress(PServerError):
                assert earlier.receive() is None
        for stream in streams:
            stream.cancel()
        control.observe(ObserveRequest(session=reply.session, end=True))
        control.close()


# ---- the log ----


def garbage(server: Server) -> None:
    """What is no message, to several services."""
    health = "/grpc.health.v1.Health"
    with grpc.insecure_channel(server.endpoint, options=grpc_port.CLIENT_OPTIONS) as channel:
        for method in (f"/{grpc_stream.SERVICE}/Join", f"{health}/Check", f"{health}/Watch"):
            with suppress(grpc.RpcError):
                list(channel.unary_stream(method)(b"\xff" * 2000, timeout=SECONDS))


def short_streams(server: Server) -> None:
    """Frames that are none."""
    with socket.create_connection(("127.0.0.1", server.job.transports["tcp"])) as connection:
        Greeting().send(connection)
        connection.sendall(b"\xff" * 2000)


def short_connections(server: Server) -> None:
    """Greetings that are none."""
    with socket.create_connection(("127.0.0.1", server.job.transports["tcp"])) as connection:
        connection.sendall(b"\xff" * 2000)


@pytest.mark.parametrize("attack", [garbage, short_streams, short_connections])
def test_a_stranger_cannot_fill_the_log(
    attack: Callable[[Server], None], caplog: pytest.LogCaptureFixture
) -> None:
    """A few lines of each kind, none of them long, and no traceback."""
    with served() as (server, trainer), caplog.at_level(logging.INFO):
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(attack, [server] * 100))
        assert beats(server, trainer)

    assert len(caplog.text) < 20_000
    assert "Traceback" not in caplog.text


def test_the_control_port_of_the_settings() -> None:
    """The limits of a server are those of its settings."""
    limits = ServerConfig(max_trainers=5, max_memory=2.0, max_program=16).limits
    assert (limits.trainers, limits.memory_bytes) == (5, 2 * 10**9)
    assert (limits.program_bytes, limits.manifest_bytes) == (2**24, 2**20)
    for wrong in ({"max_trainers": 0}, {"max_program": 100}, {"max_memory": -1.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ServerConfig(**wrong)  # type: ignore[arg-type]
    assert split_endpoint("a:1") == ("a", 1)
