"""Control calls: every error crosses the wire as itself, every wait ends, and the standard services
answer.
"""

from __future__ import annotations

import io
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from rich.console import Console

from pserver import errors
from pserver import wire_pb2 as wire
from pserver.control import control_server
from pserver.control.calls import CALLS
from pserver.control.control_client import ControlClient
from pserver.control.control_server import ControlServer
from pserver.control.rpc_errors import about
from pserver.errors import (
    Busy,
    Draining,
    FingerprintMismatch,
    PServerError,
    Refused,
    TimedOut,
    TrainerLost,
    Unreachable,
)
from pserver.launcher.cluster import free_port
from pserver.launcher.status import ask_each, show
from pserver.telemetry.logs import LimitedLog
from pserver.transport import grpc_stream
from tests.faults.faults import CallInjector, CallPoint, FaultyControl

SECONDS = 10.0


class FakeJob:
    """Answers every call with an empty reply, or as the test says."""

    def __init__(self) -> None:
        self.seen: list[Message] = []
        self.answers: dict[str, Callable[[Any], Message]] = {}

    def __getattr__(self, name: str) -> Any:
        reply = {method: kind for method, _, kind in CALLS.values()}[name]

        def answer(request: Message) -> Message:
            self.seen.append(request)
            return self.answers.get(name, lambda _: reply())(request)

        return answer


@pytest.fixture
def job() -> FakeJob:
    """What the server serves."""
    return FakeJob()


@pytest.fixture
def server(job: FakeJob) -> Iterator[ControlServer]:
    """A running control service."""
    server = ControlServer("127.0.0.1", 0, insecure=True)
    server.start(job, None)
    yield server
    server.stop(0.0)


@pytest.fixture
def client(server: ControlServer) -> Iterator[ControlClient]:
    """A client of it."""
    client = ControlClient(f"127.0.0.1:{server.port}", SECONDS)
    yield client
    client.close()


def fail(error: Exception) -> Callable[[Any], Message]:
    """An answer that raises."""

    def answer(request: Any) -> Message:
        raise error

    return answer


@pytest.mark.parametrize("method", [method for method, _, _ in CALLS.values()])
def test_every_call_reaches_the_job(client: ControlClient, job: FakeJob, method: str) -> None:
    """Each of the service's calls arrives at the job's method of its name, and the reply comes
    back.
    """
    request, reply = {name: (sent, got) for name, sent, got in CALLS.values()}[method]
    got = getattr(client, method)(request())

    assert type(got) is reply
    assert job.seen == [request()]


def test_the_calls_are_the_protocols_own() -> None:
    """The table of calls is the service of wire.proto, but for the exchange of tensors and the
    challenge that goes before a call.
    """
    service = wire.DESCRIPTOR.services_by_name["ParameterServer"]
    declared = {
        call.name: (call.input_type.name, call.output_type.name) for call in service.methods
    }
    assert declared.pop("Exchange") == ("Frame", "Frame")
    assert declared.pop("Challenge") == ("ChallengeRequest", "ChallengeReply")

    assert {
        name: (request.__name__, reply.__name__) for name, (_, request, reply) in CALLS.items()
    } == declared


def every_error() -> list[type[PServerError]]:
    """The whole tree."""
    return sorted(errors._tree(PServerError).values(), key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", every_error())
def test_every_error_crosses_the_wire_as_itself(
    client: ControlClient, job: FakeJob, kind: type[PServerError]
) -> None:
    """What the job raises, the caller gets: class and sentence, with the endpoint in front."""
    job.answers["save"] = fail(kind("slice 'w' is not here: 3 > 2, \u00e9"))
    with pytest.raises(PServerError) as caught:
        client.save(wire.SaveRequest(path="x"))

    assert type(caught.value) is kind
    assert str(caught.value) == f"{client.endpoint}: slice 'w' is not here: 3 > 2, \u00e9"
    assert len(job.seen) == 1


def test_an_error_has_a_grpc_status_for_clients_in_other_languages(
    server: ControlServer, job: FakeJob
) -> None:
    """A plain gRPC client sees the status code, the sentence, and the error's name in the trailing
    metadata.
    """
    job.answers["join"] = fail(Busy("the server has another job"))
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        call = channel.unary_unary("/pserver.ParameterServer/Join")
        with pytest.raises(grpc.RpcError) as caught:
            call(b"", timeout=SECONDS)

    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert caught.value.details() == "the server has another job"
    assert ("pserver-error", "Busy") in [tuple(pair) for pair in caught.value.trailing_metadata()]


def test_a_value_error_is_a_refusal(client: ControlClient, job: FakeJob) -> None:
    """What the caller wrote wrongly is Refused, with the server's own sentence."""
    job.answers["meet"] = fail(ValueError("expected a name, got ''"))
    with pytest.raises(Refused, match="expected a name, got ''"):
        client.meet(wire.MeetRequest())


def test_a_server_that_asks_until_a_job_begins_is_logged_once(
    server: ControlServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over however many connections; another process of it, and another server, too.  Other calls
    are logged each.
    """
    monkeypatch.setattr(control_server, "of_anybody", LimitedLog(control_server.log))
    with caplog.at_level(logging.DEBUG, control_server.log.name):
        for index, incarnation in ((1, "a"), (1, "b"), (2, "a")):
            for _ in range(3):
                control = ControlClient(f"127.0.0.1:{server.port}", SECONDS)
                for _ in range(4):
                    control.follow(wire.FollowRequest(server_index=index, incarnation=incarnation))
                control.close()
        for _ in range(2):
            control = ControlClient(f"127.0.0.1:{server.port}", SECONDS)
            control.reset()
            control.close()
    said = [each.getMessage().partition(",")[0] for each in caplog.records]

    assert [each for each in said if each in ("Follow", "Reset")] == ["Follow"] * 3 + ["Reset"] * 2
    shown = [each.getMessage() for each in caplog.records if each.levelno >= logging.INFO]
    assert not any("Follow" in each for each in shown)


def test_a_mistake_of_ours_is_logged_and_not_told(
    client: ControlClient, job: FakeJob, caplog: pytest.LogCaptureFixture
) -> None:
    """An unexpected exception leaves its traceback in the server's log; the caller gets one
    sentence without it.
    """
    job.answers["status"] = fail(KeyError("internal detail"))
    with pytest.raises(
        PServerError, match="the server failed with KeyError; its log says where"
    ) as caught:
        client.status()

    assert "internal detail" not in str(caught.value)
    assert "internal detail" in caplog.text and "Traceback" in caplog.text


def test_a_very_long_message_arrives_shortened(client: ControlClient, job: FakeJob) -> None:
    """A sentence beyond what gRPC's metadata can hold keeps its name and its beginning."""
    job.answers["join"] = fail(FingerprintMismatch("differs in " + "x" * 100_000))
    with pytest.raises(FingerprintMismatch, match=r"differs in x+ \.\.\.$"):
        client.join(wire.JoinRequest())


def test_an_error_of_a_newer_server_is_the_root_class(
    client: ControlClient, job: FakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that this version does not know is a PServerError that still has its sentence."""
    job.answers["leave"] = fail(Refused("something new"))
    monkeypatch.setattr(errors, "_tree", lambda root: {})  # this client knows no name
    with pytest.raises(PServerError, match="something new") as caught:
        client.leave(wire.LeaveRequest())

    assert type(caught.value) is PServerError


def test_a_call_ends_at_its_deadline(client: ControlClient, job: FakeJob) -> None:
    """A server that takes too long is TimedOut, naming the endpoint and the call."""
    release = threading.Event()
    job.answers["heartbeat"] = lambda _: (
        wire.HeartbeatReply() if release.wait(SECONDS) else wire.HeartbeatReply()
    )
    started = time.monotonic()
    with pytest.raises(TimedOut, match=f"{client.endpoint} has not answered Heartbeat"):
        client.heartbeat(wire.HeartbeatRequest(), timeout=0.3)
    release.set()

    assert time.monotonic() - started < 2.0


def test_calls_are_tried_again_until_the_server_is_there(job: FakeJob) -> None:
    """A call to a server that comes up late succeeds, within its deadline."""
    port = free_port()
    client = ControlClient(f"127.0.0.1:{port}", SECONDS)
    with futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.status)
        with pytest.raises(futures.TimeoutError):
            answer.result(timeout=0.3)
        server = ControlServer("127.0.0.1", port)
        server.start(job, None)
        assert isinstance(answer.result(timeout=SECONDS), wire.StatusReply)
    client.close()
    server.stop(0.0)


@pytest.mark.parametrize(
    ("method", "request_"),
    [("install", wire.InstallRequest()), ("shrink", wire.ShrinkRequest())],
    ids=["install", "shrink"],
)
def test_a_long_call_is_not_tried_again_once_the_job_has_failed(
    method: str, request_: Message
) -> None:
    """Its timeout is long; what has ended the job meanwhile is raised before another try."""

    def failed() -> None:
        raise TrainerLost("trainer 1 ended before it joined")

    client = ControlClient("127.0.0.1:1", SECONDS)
    with pytest.raises(TrainerLost, match="trainer 1 ended"):
        getattr(client, method)(request_, timeout=6 * SECONDS, meanwhile=failed)
    client.close()


def test_a_dead_server_is_unreachable_at_the_deadline(job: FakeJob) -> None:
    """Retries end at the deadline, with the endpoint in the message; a heartbeat is tried once."""
    client = ControlClient("127.0.0.1:1", 0.5)
    started = time.monotonic()
    with pytest.raises((Unreachable, TimedOut), match="127.0.0.1:1"):
        client.join(wire.JoinRequest())
    assert 0.2 < time.monotonic() - started < 3.0
    with pytest.raises((Unreachable, TimedOut), match="127.0.0.1:1"):
        client.heartbeat(wire.HeartbeatRequest())
    client.close()
    with pytest.raises(Unreachable, match="closed"):
        client.status()


def test_a_draining_server_is_not_asked_again(client: ControlClient, job: FakeJob) -> None:
    """Draining is an answer, not an outage: it is raised at once although its status is
    UNAVAILABLE.
    """
    job.answers["join"] = fail(Draining("the server is shutting down"))
    with pytest.raises(Draining):
        client.join(wire.JoinRequest())

    assert len(job.seen) == 1


def test_wait_ready_waits_for_a_late_server(job: FakeJob, caplog: pytest.LogCaptureFixture) -> None:
    """Waiting ends when the server serves."""
    port = free_port()
    client = ControlClient(f"127.0.0.1:{port}", SECONDS)
    with futures.ThreadPoolExecutor(1) as pool:
        ready = pool.submit(client.wait_ready, SECONDS)
        with pytest.raises(futures.TimeoutError):
            ready.result(timeout=0.3)
        server = ControlServer("127.0.0.1", port)
        server.start(job, None)
        assert ready.result(timeout=SECONDS) is None
    client.close()
    server.stop(0.0)


def test_wait_ready_says_whom_it_waits_for_and_gives_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A long wait logs one line with the endpoint, and ends at the deadline with an error that has
    it too.
    """
    monkeypatch.setattr("pserver.polling.NOTICE_SECONDS", 0.2)
    client = ControlClient("127.0.0.1:1", SECONDS)
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(Unreachable, match="127.0.0.1:1: no server there within 0.8 s"),
    ):
        client.wait_ready(0.8)
    client.close()

    assert [
        record.getMessage() for record in caplog.records if "127.0.0.1:1" in record.getMessage()
    ] == ["127.0.0.1:1: waiting for the server (for up to 0.8 s)"]


def test_a_wait_for_a_server_ends_with_what_ends_the_job() -> None:
    """Another server has said that the job failed: nobody waits on for this one."""
    client = ControlClient("127.0.0.1:1", SECONDS, "server 1 at 127.0.0.1:1")

    def failed() -> None:
        raise TrainerLost("trainer 0 is lost")

    with pytest.raises(TrainerLost, match="trainer 0 is lost"):
        client.wait_ready(SECONDS, failed)
    with pytest.raises(Unreachable, match=r"^server 1 at 127.0.0.1:1: connection refused"):
        client.leave(wire.LeaveRequest())
    client.close()


def test_a_goodbye_to_a_dead_server_is_tried_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken connection is dialled again, and nobody waits for a server that is gone."""
    dialled = []
    monkeypatch.setattr(
        "pserver.transport.grpc_port.DialledChannel.dial",
        lambda self, seconds: dialled.append(seconds) or fail(Unreachable("127.0.0.1:1: gone"))(0),
    )
    client = ControlClient("127.0.0.1:1", SECONDS)
    with pytest.raises(Unreachable, match="gone"):
        client.leave(wire.LeaveRequest())
    client.close()

    assert len(dialled) == 2


def test_a_goodbye_over_connections_that_break_is_said_again(
    server: ControlServer, job: FakeJob
) -> None:
    """While the server can be dialled: the others would wait for the heartbeat timeout."""
    lost = CallInjector([CallPoint("lost", "Leave", nth) for nth in (1, 2, 3)])
    client = FaultyControl(lost, f"127.0.0.1:{server.port}", SECONDS)
    client.leave(wire.LeaveRequest())
    client.close()

    assert lost.done["lost", "call", "Leave"] == 3 and len(job.seen) == 1


def test_health_and_reflection_answer(server: ControlServer, client: ControlClient) -> None:
    """Standard tools can ask whether the server serves, and what its service is; draining says
    no.
    """
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        for service in ("", grpc_stream.SERVICE):
            reply = check(health_pb2.HealthCheckRequest(service=service), timeout=SECONDS)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        listing = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=SECONDS
        )
        names = [service.name for service in next(listing).list_services_response.service]
        server.drain()
        after = check(health_pb2.HealthCheckRequest(service=grpc_stream.SERVICE), timeout=SECONDS)

    assert grpc_stream.SERVICE in names
    assert after.status == health_pb2.HealthCheckResponse.NOT_SERVING
    with pytest.raises(Unreachable, match="it is up, but shutting down"):
        client.wait_ready(1.5)


def test_a_port_in_use_is_one_sentence(server: ControlServer) -> None:
    """Two control services on one port are an error that names it."""
    with pytest.raises(
        OSError, match=f"^cannot listen on 127.0.0.1:{server.port}: Address already in use$"
    ):
        ControlServer("127.0.0.1", server.port)


def test_many_waiting_calls_do_not_keep_others_out(client: ControlClient, job: FakeJob) -> None:
    """While 100 calls wait in the job, another is answered."""
    release = threading.Event()
    job.answers["meet"] = lambda _: wire.MeetReply(over=release.wait(SECONDS))
    with futures.ThreadPoolExecutor(100) as pool:
        waiting = [pool.submit(client.meet, wire.MeetRequest()) for _ in range(100)]
        assert isinstance(client.status(timeout=5.0), wire.StatusReply)
        release.set()
        assert all(call.result(timeout=SECONDS).over for call in waiting)


def test_a_refused_connection_is_called_that() -> None:
    """By a wait for a server, by a call and by ``pserver status``; the endpoint is named once."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        endpoint = f"127.0.0.1:{bound.getsockname()[1]}"
    client = ControlClient(endpoint, 0.5)
    said = []
    for call in (lambda: client.wait_ready(0.3), lambda: client.status(wire.StatusRequest())):
        with pytest.raises(Unreachable) as raised:
            call()
        said.append(str(raised.value))
    shown = io.StringIO()

    assert show(ask_each([endpoint]), Console(file=shown, width=160)) == 1
    said.append(shown.getvalue().splitlines()[-1])
    for words in said:
        assert "connection refused: no process listens there" in words
        assert words.count(endpoint) == 1 and "health check" not in words


def test_a_server_that_names_itself_is_not_named_twice() -> None:
    """What a server says about its endpoint stands as it is."""
    assert about("a:1", "no such table") == "a:1: no such table"
    assert about("a:1", "a:1: no such table") == "a:1: no such table"
