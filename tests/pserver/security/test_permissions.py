"""Every call and every kind of frame of wire.proto, with no key, another job's, a trainer's and an
operator's: refused or taken exactly as the table of permissions says.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.message import Message

from pserver import wire_pb2 as wire
from pserver.config import ServerConfig, split_endpoint
from pserver.control.control_server import ControlServer
from pserver.errors import NotAllowed, PServerError
from pserver.security import access, tokens
from pserver.security.access import Access
from pserver.security.tokens import Role, Secret
from pserver.service.server import Server
from pserver.transport.registry import TRANSPORTS
from pserver.wire_pb2 import Frame, Hello, Kind
from tests.support.every_call import MORE, REQUESTS, AnyJob
from tests.support.keyholders import KEYS, Caller, answers, key_of, role_of, say_hello
from tests.support.one_parameter import SECONDS, Trainer

SECRET = Secret.make()
METHODS = {m.name: m for m in wire.DESCRIPTOR.services_by_name["ParameterServer"].methods}


@pytest.fixture(scope="module")
def control() -> Iterator[str]:
    """The endpoint of a control service that asks for a key."""
    server = ControlServer("127.0.0.1", 0, Access(SECRET))
    server.start(AnyJob(), None)  # type: ignore[arg-type]  # by name
    yield f"127.0.0.1:{server.port}"
    server.stop(0.0)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Trainer]]:
    """A server that asks for a key, and its only trainer."""
    path: Path = tmp_path_factory.mktemp("keys") / "operator.token"
    tokens.write(path, SECRET)
    config = ServerConfig(transport="tcp", token_file=str(path))
    with Server(config) as server:
        trainer = Trainer(server.endpoint, access=Access(SECRET.of(Role.TRAINER)))
        yield server, trainer
        trainer.client.leave()


def test_the_table_has_every_call_and_every_kind_of_frame() -> None:
    """A new one without a row is refused to everybody, and fails here."""
    assert set(access.CALLS) == set(METHODS)
    assert set(access.FRAMES) == set(Kind.keys())
    assert set(access.OPERATOR_WHERE) == set(MORE)
    assert access.role_for_call("Another", None) is Role.SERVER
    assert access.role_for_frame("kind 99") is Role.SERVER


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    ("name", "request_"),
    REQUESTS,
    ids=[f"{name}{'' if not r.ByteSize() else '+'}" for name, r in REQUESTS],
)
def test_a_call_is_taken_as_the_table_says(
    control: str, name: str, request_: Message, key: str
) -> None:
    """The role of the key decides, and nothing else."""
    allowed = role_of(key) >= access.role_for_call(name, request_)
    with Caller(control, key_of(key, SECRET)) as caller:
        if allowed:
            caller.call(name, request_)
        else:
            with pytest.raises(NotAllowed):
                caller.call(name, request_)


def first_frames(key: str, hello: Hello, server: Server, kind: str) -> list[Frame]:
    """What a server says to a stream whose first frames are HELLO as far as this key makes it, and
    one of this kind.
    """
    port = split_endpoint(server.endpoint)[1]
    stream = TRANSPORTS["tcp"].connect(
        "127.0.0.1", server.job.transports["tcp"], timeout_seconds=SECONDS
    )
    frame = Frame(kind=Kind.Value(kind))
    if key == "no key":  # nothing comes before it
        return answers(stream, [frame])
    say_hello(stream, key_of(key, SECRET), port, hello)
    return answers(stream, [frame])


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("kind", Kind.keys())
def test_a_frame_is_taken_as_the_table_says(
    running: tuple[Server, Trainer], kind: str, key: str
) -> None:
    """Without a key of the job not even HELLO; what only servers say from nobody."""
    server, trainer = running
    session = trainer.client._reply.session
    # a lane of its own would be refused for another reason: the stream of the tables
    said = first_frames(key, Hello(session=session, tables=True), server, kind)
    refused = [f for f in said if f.kind == Kind.FAILURE and f.failure.error == "NotAllowed"]
    allowed = role_of(key) >= access.role_for_frame(kind) and role_of(key) > Role.NOBODY

    assert bool(refused) is not allowed, said


@pytest.mark.parametrize("key", KEYS)
def test_an_observers_stream_needs_the_key_that_observing_needs(
    running: tuple[Server, Trainer], key: str
) -> None:
    """His session alone opens none."""
    server, trainer = running
    trainer.step(1, 0.0)
    assert server.job.program is not None
    observation = server.job.observations.begin(server.job.program, server.job.now())
    said = first_frames(key, Hello(session=observation.session), server, "PROBE")
    kinds = [frame.kind for frame in said if frame.kind != Kind.HELLO]
    allowed = role_of(key) >= access.CALLS["Observe"]

    assert (Kind.PROBE in kinds) is allowed and (Kind.FAILURE in kinds) is not allowed


def test_a_refusal_comes_from_the_role_and_not_from_the_call(control: str) -> None:
    """The message names both."""
    with (
        Caller(control, SECRET.of(Role.TRAINER)) as caller,
        pytest.raises(PServerError, match="Drain needs the operator's key, got the trainer's"),
    ):
        caller.call("Drain", wire.DrainRequest())
