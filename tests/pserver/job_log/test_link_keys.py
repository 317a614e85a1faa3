"""Promises of who may follow: a server of the job, and nobody else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pserver.control.control_client import ControlClient
from pserver.errors import NotAllowed, PServerError, Untrusted
from pserver.security import tokens
from pserver.security.access import OPEN, Access
from pserver.security.tokens import Role, Secret
from pserver.transport.registry import TRANSPORTS
from pserver.wire_pb2 import FollowRequest, Frame, Hello, Kind
from tests.support.cluster_keys import foreign_folder, key_folder, keys_of
from tests.support.keyholders import answers, say_hello
from tests.support.links import PLAN, SECONDS, Coordinator, Follower

SECRET = Secret.make()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """A coordinator that asks for a secret."""
    path: Path = tmp_path_factory.mktemp("link") / "operator.token"
    tokens.write(path, SECRET)
    with Coordinator(token_file=str(path)) as coordinator:
        yield coordinator


@pytest.fixture(scope="module")
def certified() -> Iterator[Coordinator]:
    """A coordinator that asks for certificates."""
    with Coordinator(keys=str(key_folder() / "a")) as coordinator:
        yield coordinator


def refusal(coordinator: Coordinator, access: Access) -> PServerError:
    """What ends the link of a process with this key."""
    before = coordinator.joined.qsize()  # in other tests
    with Follower(coordinator, access=access, start_timeout_seconds=2.0) as follower:
        error = follower.lost.get(timeout=SECONDS)
        follower.link.send(b"nothing")
    assert coordinator.joined.qsize() == before and coordinator.received.empty()
    return error


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (None, "asks for its job's key"),
        (Secret.make(), "does not prove that it holds this job's secret"),
        (SECRET.of(Role.TRAINER), "Follow needs the operator's key, got the trainer's"),
    ],
    ids=["no key", "another job's", "a trainer's"],
)
def test_without_the_jobs_secret_nobody_follows(
    guarded: Coordinator, key: Secret | None, text: str
) -> None:
    """Strangers, another job's servers and trainers are refused with a reason."""
    error = refusal(guarded, Access(key))

    assert isinstance(error, NotAllowed) and text in str(error)


@pytest.mark.parametrize("access", ["open", "trainer", "operator", "foreign server"])
def test_only_a_server_of_the_cluster_or_its_operator_follows(
    certified: Coordinator, access: str
) -> None:
    """By certificates alone: who may do everything may do that; a trainer's does not count."""
    if access == "operator":
        with Follower(certified, access=Access(keys=keys_of("operator"))) as follower:
            follower.link.send(b"hello")
            assert certified.hear(1) == [(1, b"hello")]
        return
    held = {
        "open": OPEN,
        "trainer": Access(keys=keys_of("trainer")),
        "foreign server": Access(keys=keys_of("server", foreign_folder())),
    }[access]

    assert isinstance(refusal(certified, held), NotAllowed | Untrusted)


@pytest.mark.parametrize("name", ["status", "drain", "reset"])
def test_a_servers_certificate_is_good_for_following_alone(
    certified: Coordinator, name: str
) -> None:
    """Another call with it is refused."""
    client = ControlClient(
        certified.server.endpoint, SECONDS, access=Access(keys=keys_of("server"))
    )
    try:
        with pytest.raises(Untrusted, match="expected a certificate of trainer or operator"):
            getattr(client, name)()
    finally:
        client.close()


@pytest.mark.parametrize("follower", [True, False])
def test_a_servers_certificate_opens_no_other_stream(
    certified: Coordinator, follower: bool
) -> None:
    """Nor a link without the session that Follow gives."""
    job = certified.server.job
    stream = TRANSPORTS["tcp"].connect(
        "127.0.0.1", job.transports["tcp"], timeout_seconds=SECONDS, keys=keys_of("server")
    )
    hello = Hello(session="guessed", follower=follower, server_index=1, fingerprint=PLAN)
    said = answers(stream, [Frame(kind=Kind.HELLO, hello=hello)])

    error = "UnknownSession" if follower else "Untrusted"
    assert [frame.failure.error for frame in said] == [error]


@pytest.mark.parametrize("kind", Kind.keys())
def test_a_link_takes_its_own_frames_and_no_others(guarded: Coordinator, kind: str) -> None:
    """With the operator's key and the session: STAGED, PROBE, BYE; all else ends the stream."""
    session = guarded.links.follow(
        FollowRequest(server_index=2, fingerprint=PLAN, incarnation=f"with {kind}")
    )
    port = guarded.server.job.transports["tcp"]
    stream = TRANSPORTS["tcp"].connect("127.0.0.1", port, timeout_seconds=SECONDS)
    hello = Hello(session=session, follower=True, server_index=2, fingerprint=PLAN, stream=1)
    control = int(guarded.server.endpoint.rpartition(":")[2])
    say_hello(stream, SECRET, control, hello)
    said = [frame.kind for frame in answers(stream, [Frame(kind=kind)])]

    if kind == "BYE":
        assert said == []
    else:
        assert said[-1:] == [Kind.PROBE if kind in ("STAGED", "PROBE") else Kind.FAILURE]
