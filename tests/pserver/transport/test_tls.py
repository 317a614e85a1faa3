"""TLS: whoever has no certificate that counts is refused in words, at both ends, at once."""

from __future__ import annotations

import logging
import shutil
import socket
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from queue import Queue

import pytest

from pserver.errors import PServerError, Unreachable, Untrusted
from pserver.security import keys
from pserver.security.certificates import DAYS, bearer_in_pem, certificate_bytes, key_bytes, new_key
from pserver.security.key_folder import KeyFolder, write_private
from pserver.security.keys import Keys
from pserver.transport import grpc_stream, tcp
from pserver.transport.stream import LANDED, Stream
from pserver.wire_pb2 import GRADIENT, VALUE, Frame
from tests.support.cluster_keys import foreign_folder, key_folder, keys_of
from tests.support.streams import SECONDS, echo, finish
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("no_thread_stays")
MAKES = {"tcp": tcp, "grpc": grpc_stream}
ONE_SIDED = "only one of the two ends has keys"


def copied(path: Path) -> KeyFolder:
    """A copy of the cluster's folder, to be changed."""
    shutil.copytree(key_folder(), path)
    return KeyFolder.open(path)


def issued(path: Path, role: str, days_ago: int = 0, file: str = "") -> Keys:
    """Keys of that role, in the files of another, or with a certificate of the past."""
    folder, key = copied(path), new_key()
    then = datetime.now(UTC) - timedelta(days=days_ago)
    certificate = folder.authority.issue(key.public_key(), role, ["a"], then, DAYS)
    write_private(path / "a" / f"{file or role}.key", key_bytes(key))
    write_private(path / "a" / f"{file or role}.pem", certificate_bytes(certificate))
    return Keys(path / "a", (role,))


def outcome(
    name: str, server: Keys | None, client: Keys | None, host: str = "127.0.0.1"
) -> PServerError | None:
    """How one frame and its answer went."""
    listener = MAKES[name].listen(echo, "0.0.0.0", keys=server)
    try:
        stream = MAKES[name].connect(host, listener.port, timeout_seconds=2.0, keys=client)
        stream.send(Frame(kind=VALUE, step=7))
        assert stream.receive() is not None
        finish(stream)
    except PServerError as error:
        return error
    finally:
        listener.close(1.0)
    return None


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize("role", ["trainer", "operator"])
def test_keys_of_one_authority_know_each_other(name: str, role: str) -> None:
    """Either client's role."""
    assert outcome(name, keys_of("server"), keys_of(role)) is None


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize(
    ("server", "client", "words"),
    [
        pytest.param(
            lambda _: keys_of("server"),
            lambda _: keys_of("trainer", foreign_folder()),
            "its certificate is of another authority",
            id="another authority",
        ),
        pytest.param(
            lambda path: issued(path, "server", days_ago=400),
            lambda _: keys_of("trainer"),
            "certificate has expired",
            id="an expired server",
        ),
        pytest.param(
            lambda _: keys_of("server"),
            lambda _: None,
            ONE_SIDED,
            id="a client without keys",
        ),
    ],
)
def test_who_is_not_to_be_trusted_is_told_apart(
    name: str,
    server: Callable[[Path], Keys],
    client: Callable[[Path], Keys | None],
    words: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The client says what is wrong; the server logs no traceback."""
    caplog.set_level(logging.INFO)

    error = outcome(name, server(tmp_path / "s"), client(tmp_path / "c"))

    assert isinstance(error, Untrusted) and words in str(error)
    assert all(record.exc_info is None for record in caplog.records)


@pytest.mark.parametrize("name", MAKES)
def test_a_client_whose_certificate_has_expired_is_refused(name: str, tmp_path: Path) -> None:
    """By a server whose clock says so; the client is never let in."""
    error = outcome(name, keys_of("server"), issued(tmp_path / "c", "trainer", days_ago=400))

    assert isinstance(error, Untrusted) and "the certificate of trainer a has expired" in str(error)


@pytest.mark.parametrize("name", MAKES)
def test_a_client_with_keys_finds_a_server_without(name: str) -> None:
    """It does not go on in clear text."""
    error = outcome(name, None, keys_of("trainer"))

    assert isinstance(error, (Untrusted, Unreachable))
    assert ONE_SIDED in str(error) or "it has no keys" in str(error)


@pytest.mark.parametrize("name", MAKES)
def test_a_trainers_key_does_not_make_a_server(name: str, tmp_path: Path) -> None:
    """Whoever has stolen one can't stand between the others and a server."""
    folder = copied(tmp_path / "keys").path / "a"
    for end in ("key", "pem"):
        shutil.copyfile(folder / f"trainer.{end}", folder / f"server.{end}")
    error = outcome(name, Keys(tmp_path / "keys" / "a", ("trainer",)), keys_of("trainer"))

    assert isinstance(error, Untrusted) and "purpose" in str(error)


@pytest.mark.parametrize("name", MAKES)
def test_a_certificate_is_for_its_host(name: str) -> None:
    """A server's key counts at the host that it was made for, not at another's address."""
    error = outcome(name, keys_of("server"), keys_of("trainer"), host="127.0.0.2")

    assert isinstance(error, Untrusted) and "127.0.0.2" in str(error)


@pytest.mark.parametrize("name", MAKES)
def test_a_revoked_server_is_not_talked_to(name: str, tmp_path: Path) -> None:
    """From the moment that the client's list names it, without a restart."""
    folder = copied(tmp_path / "keys")
    client = Keys(folder.path / "a", ("trainer",))
    assert outcome(name, keys_of("server"), client) is None

    folder.revoke("a", ["server"])

    error = outcome(name, keys_of("server"), client)
    assert isinstance(error, Untrusted) and "server a is revoked" in str(error)


def test_a_revoked_client_opens_no_stream(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """From the moment that the server's list names it; its log says whose key came."""
    caplog.set_level(logging.INFO)
    folder = copied(tmp_path / "keys")
    server = Keys(folder.path / "a", ("server",))
    folder.revoke("a", ["trainer"])

    error = outcome("tcp", server, keys_of("trainer"))

    assert isinstance(error, PServerError)
    said = "the certificate of trainer a is revoked"
    eventually(lambda: any(said in line for line in caplog.messages))


def test_a_renewed_key_counts_without_a_restart(tmp_path: Path) -> None:
    """Of a listening server: the next connection sees it."""
    for name in MAKES:
        folder = copied(tmp_path / name)
        server = Keys(folder.path / "a", ("server",))
        listener = MAKES[name].listen(echo, "127.0.0.1", keys=server)
        before = _server_serial(name, listener.port)
        folder.renew(["a"])

        assert _server_serial(name, listener.port) == server.bearer.serial != before
        listener.close(1.0)


def _server_serial(name: str, port: int) -> int:
    """Of the certificate that a server shows."""
    if name == "grpc":
        with socket.create_connection(("127.0.0.1", port), SECONDS) as connection:
            return bearer_in_pem(keys.ask(connection, keys_of("trainer"), "127.0.0.1")).serial
    stream = tcp.connect("127.0.0.1", port, timeout_seconds=SECONDS, keys=keys_of("trainer"))
    finish(stream)
    assert stream.bearer is not None
    return stream.bearer.serial


@pytest.mark.parametrize("connections", [1, 3])
def test_each_direction_has_connections_of_its_own(connections: int) -> None:
    """As Python's ssl can't send and receive on one at the same time; payloads land in place."""
    seen: Queue[Stream] = Queue()

    def handle(stream: Stream) -> None:
        seen.put(stream)
        echo(stream)

    listener = tcp.listen(handle, connections=connections, keys=keys_of("server"))
    stream = tcp.connect(
        "127.0.0.1", listener.port, timeout_seconds=SECONDS, keys=keys_of("trainer")
    )
    body = bytes(range(256)) * 2**12
    place = bytearray(len(body))
    for step in range(7):
        stream.send(Frame(kind=GRADIENT, step=step), [body])
        got = stream.receive(lambda _, __: [memoryview(place)])
        assert got is not None and got[0].step == step and got[1] is LANDED and place == body
    theirs = seen.get(timeout=SECONDS).bearer
    assert theirs is not None and (theirs.role, theirs.host) == ("trainer", "a")
    assert len(stream._sockets) == 2 * connections
    assert finish(stream) == []
    listener.close(1.0)
