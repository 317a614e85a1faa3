"""What a stranger could do to a server while everybody could: each is refused to him without a key
and with another job's, and where it is no trainer's business, with a trainer's; the job goes on.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from google.protobuf.message import Message
from rich.console import Console

from pserver import wire_pb2 as wire
from pserver.config import PROTOCOL, ServerConfig, split_endpoint
from pserver.control.control_client import ControlClient
from pserver.errors import Busy, NotAllowed, Refused
from pserver.launcher.status import ask_each, show
from pserver.security import tokens
from pserver.security.access import Access
from pserver.security.tokens import Role, Secret
from pserver.service.server import Server
from pserver.transport.registry import TRANSPORTS
from pserver.wire_pb2 import Frame, Hello, Kind
from tests.support.keyholders import Caller, answers, key_of, say_hello
from tests.support.one_parameter import SECONDS, Trainer, plan_of

STRANGERS = ("no key", "another job's")
NOT_OPERATORS = (*STRANGERS, "a trainer's")


@pytest.fixture
def secret() -> Secret:
    """The job's."""
    return Secret.make()


@pytest.fixture
def server(secret: Secret, tmp_path: Path) -> Iterator[Server]:
    """An empty server of the job."""
    path = tmp_path / "operator.token"
    tokens.write(path, secret)
    (tmp_path / "data").mkdir()
    config = ServerConfig(token_file=str(path), data_dir=str(tmp_path / "data"))
    with Server(config) as one:
        yield one


@pytest.fixture
def trainer(server: Server, secret: Secret) -> Iterator[Trainer]:
    """Its only trainer, over tcp."""
    one = joined(server, secret)
    yield one
    one.client.leave()


def joined(server: Server, secret: Secret, trainers: int = 1) -> Trainer:
    access = Access(secret.of(Role.TRAINER))
    return Trainer(server.endpoint, trainers=trainers, transports=("tcp",), access=access)


def join_request(number: int, trainers: int, fingerprint: str = "") -> wire.JoinRequest:
    plan = plan_of(trainers)
    return wire.JoinRequest(
        protocol=PROTOCOL,
        trainer_id=number,
        incarnation="stranger",
        fingerprint=fingerprint or plan.fingerprint(),
        manifest=plan.manifest(),
        transports=["tcp"],
    )


def refused(server: Server, secret: Secret, key: str, name: str, request: Message) -> None:
    with Caller(server.endpoint, key_of(key, secret)) as caller, pytest.raises(NotAllowed):
        caller.call(name, request)


def assert_it_trains(trainer: Trainer, step: int = 1) -> None:
    before = trainer.value.clone()
    trainer.step(step, 1.0)

    assert torch.equal(trainer.value, before - 0.5)


@pytest.mark.parametrize("key", NOT_OPERATORS)
def test_nobody_but_an_operator_ends_the_server(
    server: Server, trainer: Trainer, secret: Secret, key: str
) -> None:
    """Drain, and Reset."""
    refused(server, secret, key, "Drain", wire.DrainRequest())
    refused(server, secret, key, "Reset", wire.ResetRequest())
    assert not server.draining
    assert_it_trains(trainer)


def test_an_operator_ends_the_server_and_the_log_says_so(
    server: Server, secret: Secret, caplog: pytest.LogCaptureFixture
) -> None:
    """With the name of his key."""
    control = ControlClient(server.endpoint, SECONDS, access=Access(secret))
    with caplog.at_level("INFO"):
        control.drain()
    control.close()

    assert server.draining
    assert "Drain, with the job's secret, as its operator, from 127.0.0.1:" in caplog.text
    assert secret.key.hex() not in caplog.text


@pytest.mark.parametrize("key", STRANGERS)
def test_a_free_place_is_nobody_elses(server: Server, secret: Secret, key: str) -> None:
    """Nor are the parameters that one reads there: it stays free for the trainer that is meant."""
    first = joined(server, secret, trainers=2)
    refused(server, secret, key, "Join", join_request(1, 2))
    with pytest.raises(NotAllowed):
        Trainer(
            server.endpoint,
            1,
            2,
            ("tcp",),
            Access(key_of(key, secret)),
        )
    second = Trainer(server.endpoint, 1, 2, ("tcp",), Access(secret.of(Role.TRAINER)))
    for one in (first, second):
        one.client.leave()


@pytest.mark.parametrize("key", NOT_OPERATORS)
def test_nobody_ends_the_job_in_anothers_name(
    server: Server, trainer: Trainer, secret: Secret, key: str
) -> None:
    """By the announcement of an end that is another process's."""
    ended = wire.AnnounceRequest(trainer_id=0, failure="it has ended")
    refused(server, secret, key, "Announce", ended)
    assert_it_trains(trainer)


@pytest.mark.parametrize("key", STRANGERS)
def test_a_sniffed_session_ends_no_job(
    server: Server, trainer: Trainer, secret: Secret, key: str
) -> None:
    """By Leave, by Finish, by a later stream that breaks the trainer's own."""
    session = trainer.client._reply.session
    refused(server, secret, key, "Leave", wire.LeaveRequest(session=session, failure="over"))
    refused(server, secret, key, "Finish", wire.FinishRequest(session=session))
    said = said_to(server, secret, key, Hello(session=session, stream=99))

    assert said[-1].failure.error == "NotAllowed"
    assert_it_trains(trainer)


def said_to(server: Server, secret: Secret, key: str, hello: Hello) -> list[Frame]:
    """What a server says to a stream over tcp that begins with this HELLO."""
    ports = server.job.transports["tcp"], split_endpoint(server.endpoint)[1]
    stream = TRANSPORTS["tcp"].connect("127.0.0.1", ports[0], timeout_seconds=SECONDS)
    say_hello(stream, key_of(key, secret), ports[1], hello)
    return answers(stream, ())


@pytest.mark.parametrize("key", STRANGERS)
def test_a_failed_jobs_values_are_wiped_by_nobody_else(
    server: Server, secret: Secret, key: str
) -> None:
    """By joining with the same fingerprint; with another one a trainer's key does it neither."""
    trainer = joined(server, secret)
    assert_it_trains(trainer)
    trainer.client.leave("it has failed")
    refused(server, secret, key, "Join", join_request(0, 1))
    with Caller(server.endpoint, secret.of(Role.TRAINER)) as caller, pytest.raises(Busy):
        caller.call("Join", join_request(0, 1, fingerprint="another"))

    assert server.job.kept_seconds and server.job.program is not None
    assert torch.equal(server.job.program.slices.values["w"], torch.full((1000,), 0.5))


@pytest.mark.parametrize("key", NOT_OPERATORS)
def test_a_sniffed_session_writes_no_file(
    server: Server, trainer: Trainer, secret: Secret, key: str, tmp_path: Path
) -> None:
    """Not where he likes; an operator does."""
    session = trainer.client._reply.session
    wanted = wire.SaveRequest(session=session, path="elsewhere")
    refused(server, secret, key, "Save", wanted)
    assert list((tmp_path / "data").iterdir()) == []
    with Caller(server.endpoint, secret) as operator:
        operator.call("Save", wanted)
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["elsewhere"]


def test_a_trainer_saves_where_the_server_keeps_files(
    server: Server, trainer: Trainer, secret: Secret, tmp_path: Path
) -> None:
    """Without a path of its own."""
    session = trainer.client._reply.session
    with Caller(server.endpoint, secret.of(Role.TRAINER)) as caller:
        caller.call("Save", wire.SaveRequest(session=session))
        caller.call("Load", wire.LoadRequest(session=session))

    assert [path.name for path in (tmp_path / "data").iterdir()] == ["server-0"]
    assert_it_trains(trainer)


def test_a_trainer_has_parts_written_below_where_the_server_keeps_files(
    server: Server, trainer: Trainer, secret: Secret, tmp_path: Path
) -> None:
    """In the background, and nowhere else."""
    session = trainer.client._reply.session
    with Caller(server.endpoint, secret.of(Role.TRAINER)) as caller:
        for path, number in (("step-1", 1), ("../x", 2)):
            request = wire.SaveRequest(session=session, path=path, number=number, background=True)
            with nullcontext() if number == 1 else pytest.raises(Refused, match="below the data"):
                caller.call("Save", request)
    assert server.job.saves.wait(SECONDS)

    assert [path.name for path in tmp_path.glob("data/*/*")] == ["server-0"]
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("key", STRANGERS)
def test_names_are_read_by_nobody_else(
    server: Server, trainer: Trainer, secret: Secret, key: str
) -> None:
    """By Status; and an observer reads values with an operator's key only."""
    refused(server, secret, key, "Status", wire.StatusRequest(variables=True))
    refused(server, secret, key, "Observe", wire.ObserveRequest(transports=["tcp"]))
    refused(server, secret, "a trainer's", "Observe", wire.ObserveRequest(transports=["tcp"]))


@pytest.mark.parametrize("key", STRANGERS)
def test_an_idle_server_is_occupied_by_nobody_else(
    server: Server, secret: Secret, key: str
) -> None:
    """The job for which it was started finds it empty."""
    refused(server, secret, key, "Join", join_request(0, 1))
    assert server.job.status(wire.StatusRequest()).state == "empty"
    trainer = joined(server, secret)
    assert_it_trains(trainer)
    trainer.client.leave()


# ---- what was recorded ----


def test_a_recorded_call_is_worth_nothing(server: Server, trainer: Trainer, secret: Secret) -> None:
    """Byte for byte, its proof with it."""
    with Caller(server.endpoint, secret) as caller:
        caller.call("Status", wire.StatusRequest())
        with pytest.raises(NotAllowed, match="used before"):
            caller.repeat(*caller.sent[-1])


@pytest.mark.parametrize("transport", ["tcp", "grpc", "shm"])
def test_a_recorded_hello_is_worth_nothing(
    server: Server, trainer: Trainer, secret: Secret, transport: str
) -> None:
    """The server's nonce is another one each time."""
    session, port = trainer.client._reply.session, split_endpoint(server.endpoint)[1]
    connect, listens = TRANSPORTS[transport].connect, server.job.transports[transport]
    hello = Hello(session=session, tables=True)
    first = connect("127.0.0.1", listens, timeout_seconds=SECONDS)
    recorded = say_hello(first, secret.of(Role.TRAINER), port, hello)
    assert answers(first, ())[-1].kind == Kind.PROBE
    again = connect("127.0.0.1", listens, timeout_seconds=SECONDS)
    said = answers(again, recorded)

    assert said[-1].failure.error == "NotAllowed"
    assert_it_trains(trainer)


# ---- the wrong end ----


def test_a_key_is_asked_for_in_words(server: Server) -> None:
    """Who has none is told how to get one."""
    control, shown = ControlClient(server.endpoint, SECONDS), io.StringIO()
    with pytest.raises(NotAllowed, match=f"^{server.endpoint}: .*set PSERVER_TOKEN_FILE"):
        control.status()
    control.close()

    assert show(ask_each([server.endpoint]), Console(file=shown, width=200)) == 1
    assert "refused" in shown.getvalue() and "unreachable" not in shown.getvalue()


def test_an_open_server_is_refused_by_who_has_a_key(secret: Secret) -> None:
    """It is none of his job's."""
    with Server(ServerConfig()) as server:
        control = ControlClient(server.endpoint, SECONDS, access=Access(secret))
        with pytest.raises(NotAllowed, match=f"{server.endpoint} is open and asks for no key"):
            control.status()
        control.close()


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_a_job_with_a_key_trains_over_every_transport(
    server: Server, secret: Secret, transport: str
) -> None:
    """Streams prove it in their first frames."""
    access = Access(secret.of(Role.TRAINER))
    trainer = Trainer(server.endpoint, transports=(transport,), access=access)
    assert trainer.client.transport == transport
    assert_it_trains(trainer)
    trainer.client.leave()
    assert server.job.failure is None


def test_a_sniffed_session_and_a_wrong_key_are_told_apart(
    server: Server, trainer: Trainer, secret: Secret
) -> None:
    """A trainer's key with a session that is nobody's is refused as before."""
    with (
        Caller(server.endpoint, secret.of(Role.TRAINER)) as caller,
        pytest.raises(Refused) as no,
    ):
        caller.call("Leave", wire.LeaveRequest(session="guessed", success=True))

    assert not isinstance(no.value, NotAllowed)
