"""Promises of servers with keys: TLS on every port, roles by certificate, revoking at work."""

from __future__ import annotations

import io
import logging
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

from pserver.__main__ import main
from pserver.client.observer import Observer
from pserver.config import PREFERRED_TRANSPORTS, ServerConfig
from pserver.control.control_client import ControlClient
from pserver.errors import NotAllowed, Untrusted
from pserver.launcher import status
from pserver.launcher.readiness import obstacle
from pserver.security import tokens
from pserver.security.access import OPEN, Access
from pserver.security.key_folder import KeyFolder
from pserver.security.tokens import Role, Secret
from pserver.service.server import Server
from tests.support.cluster_keys import foreign_folder, key_folder, keys_of
from tests.support.one_parameter import Trainer
from tests.support.waiting import eventually
from trainer.environment.environment import Connection

SECONDS = 20.0
ONE_SIDED = "only one of the two ends has keys"


def access_of(role: str, folder: Path | None = None) -> Access:
    return Access(keys=keys_of(role, folder))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One with keys."""
    config = ServerConfig(keys=str(key_folder() / "a"), heartbeat_timeout_seconds=SECONDS)
    with Server(config) as running:
        yield running


@pytest.mark.parametrize("transport", PREFERRED_TRANSPORTS)
def test_a_job_runs_over_tls(server: Server, transport: str) -> None:
    """Over each transport, and as without keys; an operator reads it meanwhile."""
    trainer = Trainer(server.endpoint, transports=(transport,), access=access_of("trainer"))

    assert trainer.client.transport == transport
    trainer.step(1, 1.0)

    assert torch.equal(trainer.value, torch.full((1000,), 0.5))
    observer = Observer(server.endpoint, access_of("operator"))
    assert torch.equal(observer.read(["w"])["w"], trainer.value)
    observer.close()
    trainer.client.leave()


def test_the_readiness_line_says_so(server: Server) -> None:
    """Whoever reads the log knows who may come."""
    assert str(server).endswith(", with keys")


def test_a_certificate_is_a_role(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """A trainer's key can't reset; an operator's can, and the log has the key's name."""
    caplog.set_level(logging.INFO)
    trainer = ControlClient(server.endpoint, SECONDS, access=access_of("trainer"))
    operator = ControlClient(server.endpoint, SECONDS, access=access_of("operator"))

    with pytest.raises(NotAllowed, match="Reset needs the operator's key, got the trainer's"):
        trainer.reset()
    assert trainer.status().state
    operator.reset()

    assert any("Reset, with the key of operator operator" in line for line in caplog.messages)
    trainer.close()
    operator.close()


@pytest.mark.parametrize(
    ("access", "words"),
    [
        (lambda: OPEN, ONE_SIDED),
        (lambda: access_of("trainer", foreign_folder()), "of another authority"),
    ],
)
@pytest.mark.parametrize("waits", [True, False])
def test_a_stranger_is_told_at_once(
    server: Server, access: object, words: str, waits: bool
) -> None:
    """By the calls that wait for a server, too: nothing will change by waiting."""
    assert callable(access)
    client = ControlClient(server.endpoint, SECONDS, access=access())
    began = time.monotonic()

    with pytest.raises(Untrusted, match=words):
        if waits:
            client.wait_ready(SECONDS)
        else:
            client.status(timeout=3.0)
    assert time.monotonic() - began < SECONDS / 2
    client.close()


def test_a_client_with_keys_does_not_use_a_server_without() -> None:
    """Nothing goes there in clear text."""
    with Server(ServerConfig()) as plain:
        client = ControlClient(plain.endpoint, SECONDS, access=access_of("trainer"))
        with pytest.raises(Untrusted, match=ONE_SIDED):
            client.wait_ready(SECONDS)
        client.close()


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_a_key_that_is_revoked_ends_what_it_has_begun(tmp_path: Path, transport: str) -> None:
    """Its streams within moments, its calls at once; another's go on."""
    shutil.copytree(key_folder(), tmp_path / "keys")
    folder = KeyFolder.open(tmp_path / "keys")
    folder.add("b")
    own, other = (Access(keys=keys_of("trainer", folder.path)) for _ in range(2))
    with Server(ServerConfig(keys=str(folder.path / "b"))) as running:
        trainer = Trainer(running.endpoint, transports=(transport,), access=own)
        streams = running._streams
        assert len(streams._open) == 1
        # the list reaches the server's folder alone
        folder.revoke("a", ["trainer"])

        eventually(lambda: not streams._open)
        client = ControlClient(running.endpoint, SECONDS, access=other)
        with pytest.raises(Untrusted, match="the certificate of trainer a is revoked"):
            client.status()
        client.close()
        operator = ControlClient(running.endpoint, SECONDS, access=access_of("operator"))
        assert operator.status().state
        operator.close()
        trainer.client.leave()


def test_with_a_secret_too_both_are_asked_for(tmp_path: Path) -> None:
    """And the lesser role counts."""
    secret = Secret.make()
    tokens.write(tmp_path / "token", secret)
    config = ServerConfig(keys=str(key_folder() / "a"), token_file=str(tmp_path / "token"))
    with Server(config) as running:
        for role, held, allowed in (
            ("operator", secret, True),
            ("trainer", secret, False),
            ("operator", secret.of(Role.TRAINER), False),
            ("operator", None, False),
        ):
            client = ControlClient(running.endpoint, 5.0, access=Access(held, keys_of(role)))
            if allowed:
                client.reset()
            else:
                with pytest.raises(NotAllowed):
                    client.reset()
            client.close()


@pytest.mark.parametrize("endpoint", ["0.0.0.0:0", "10.0.0.1:6174", "a:6174", "[::]:0"])
def test_beyond_loopback_needs_keys_or_a_word(
    endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Servers and trainers alike; the word is a warning, once."""
    for refused in (
        lambda: ServerConfig(endpoint=endpoint),
        lambda: Connection().access_to([endpoint]),
    ):
        with pytest.raises(ValueError, match="beyond this host: expected keys .* or --insecure"):
            refused()
    assert ServerConfig(endpoint=endpoint, insecure=True).insecure
    assert ServerConfig(endpoint=endpoint, keys="a").keys == "a"
    for _ in range(2):
        assert Connection(insecure=True).access_to([endpoint]) is OPEN
    assert sum("is not encrypted" in line for line in caplog.messages) == 1
    keys = Connection(keys=str(key_folder() / "a")).access_to([endpoint]).keys
    assert keys is not None and keys.bearer.role == "trainer"


def test_status_warns_of_an_end_that_is_near(tmp_path: Path) -> None:
    """Of the server's certificate, until it is renewed: the server goes on."""
    shutil.copytree(key_folder(), tmp_path / "keys")
    folder = KeyFolder.open(tmp_path / "keys")
    folder.renew(["a"], days=9)
    said, access = [], access_of("operator")
    with Server(ServerConfig(keys=str(folder.path / "a"))) as running:
        for _ in range(2):
            console = Console(file=io.StringIO(), width=160)
            answers = status.ask_each([running.endpoint], False, lambda _: access)
            assert status.show(answers, console) == 0
            said.append(console.file.getvalue())  # type: ignore[attr-defined]
            folder.renew(["a"])

    assert "the certificate of server a expires in" in said[0] and "expires" not in said[1]


def test_a_probe_has_keys_as_well(server: Server) -> None:
    """``status --ready`` with any key of the cluster; without one it says what is missing."""
    command = ["status", "--ready", server.endpoint]

    assert main([*command, "--keys", str(key_folder() / "a")]) == 0
    assert main(command) == 1
    assert ONE_SIDED in obstacle(server.endpoint)
