"""Every call and every kind of frame of wire.proto over TLS, with no certificate, one of another
cluster, a trainer's and an operator's: as the table of permissions says.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from google.protobuf.message import Message

from pserver.config import ServerConfig
from pserver.control.calls import CALLS
from pserver.control.control_client import ControlClient
from pserver.control.control_server import ControlServer
from pserver.errors import NotAllowed, PServerError, Untrusted
from pserver.security import access
from pserver.security.access import Access
from pserver.security.keys import Keys
from pserver.security.tokens import Role
from pserver.service.server import Server
from pserver.transport.registry import TRANSPORTS
from pserver.wire_pb2 import Frame, Hello, Kind
from tests.support.cluster_keys import foreign_folder, key_folder, keys_of
from tests.support.every_call import REQUESTS, AnyJob
from tests.support.keyholders import answers
from tests.support.one_parameter import SECONDS, Trainer

HOLDERS = {
    "no certificate": (None, Role.NOBODY),
    "another cluster's": (keys_of("operator", foreign_folder()), Role.NOBODY),
    "a trainer's": (keys_of("trainer"), Role.TRAINER),
    "an operator's": (keys_of("operator"), Role.OPERATOR),
}


@pytest.fixture(scope="module")
def control() -> Iterator[str]:
    """The endpoint of a control service that asks for certificates."""
    server = ControlServer("127.0.0.1", 0, Access(keys=keys_of("server")))
    server.start(AnyJob(), None)  # type: ignore[arg-type]  # by name
    yield f"127.0.0.1:{server.port}"
    server.stop(0.0)


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[Server, Trainer]]:
    """A server that asks for certificates, and its only trainer."""
    with Server(ServerConfig(transport="tcp", keys=str(key_folder() / "a"))) as server:
        trainer = Trainer(server.endpoint, access=Access(keys=keys_of("trainer")))
        yield server, trainer
        trainer.client.leave()


@pytest.fixture(scope="module")
def callers(control: str) -> Iterator[dict[str, ControlClient]]:
    """A client of each holder."""
    clients = {
        holder: ControlClient(control, SECONDS, access=Access(keys=keys))
        for holder, (keys, _) in HOLDERS.items()
    }
    yield clients
    for client in clients.values():
        client.close()


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize(
    ("name", "request_"),
    REQUESTS,
    ids=[f"{name}{'' if not r.ByteSize() else '+'}" for name, r in REQUESTS],
)
def test_a_call_is_taken_as_the_table_says(
    callers: dict[str, ControlClient], name: str, request_: Message, holder: str
) -> None:
    """Without a certificate of the cluster there is no connection; otherwise its role decides."""
    role = HOLDERS[holder][1]

    def call() -> None:
        callers[holder]._call(name, request_, CALLS[name][2], None, tries=2)

    if role is Role.NOBODY:
        with pytest.raises(Untrusted):
            call()
    elif role < access.role_for_call(name, request_):
        with pytest.raises(NotAllowed):
            call()
    else:
        call()


def first_frames(keys: Keys | None, server: Server, session: str, kind: str) -> list[Frame]:
    """What a server says to a stream that begins with HELLO and a frame of this kind.

    Raises:
        PServerError: there is no connection.
    """
    port = server.job.transports["tcp"]
    stream = TRANSPORTS["tcp"].connect("127.0.0.1", port, timeout_seconds=SECONDS, keys=keys)
    hello = Frame(kind=Kind.HELLO, hello=Hello(session=session, tables=True))
    return answers(stream, [hello, Frame(kind=Kind.Value(kind))])


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("kind", Kind.keys())
def test_a_frame_is_taken_as_the_table_says(
    running: tuple[Server, Trainer], kind: str, holder: str
) -> None:
    """A stranger's is not read."""
    (server, trainer), (keys, role) = running, HOLDERS[holder]
    session = trainer.client._reply.session
    try:
        said = first_frames(keys, server, session, kind)
    except PServerError:
        said = []
    refused = any(f.kind == Kind.FAILURE and f.failure.error == "NotAllowed" for f in said)

    if role is Role.NOBODY:
        assert not said
    else:
        assert refused is (role < access.role_for_frame(kind)), said
