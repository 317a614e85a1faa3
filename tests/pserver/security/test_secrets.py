"""Promises about secrets and the files that hold them."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import pytest

from pserver.cli.settings import access_of
from pserver.config import ServerConfig
from pserver.security import tokens
from pserver.security.access import OPEN, Access
from pserver.security.tokens import Role, Secret
from pserver.service.server import Server


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Of a user with a directory of his own for sockets and the like."""
    return {"XDG_RUNTIME_DIR": str(tmp_path)}


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    """Role and key, in a file that is this user's alone."""
    secret, path = Secret.make(), tmp_path / "a.token"
    tokens.write(path, secret)

    assert tokens.read(str(path)) == secret
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        tokens.write(path, secret)


def test_servers_know_the_trainers_key_and_trainers_not_the_operators() -> None:
    """One is made of the other, the same in every process; the way back is shut."""
    operator = Secret.make()
    trainer = operator.of(Role.TRAINER)

    assert trainer == Secret.parse(operator.text).of(Role.TRAINER)
    assert trainer.key != operator.key
    with pytest.raises(ValueError, match="expected an operator's key, got a trainer's"):
        trainer.of(Role.OPERATOR)


def test_no_text_shows_a_secret() -> None:
    """Neither a secret's own nor that of what holds it."""
    access = Access(Secret.make())
    assert access.secret is not None
    for text in (repr(access), str(access.secret), f"{access.secret!r}"):
        assert access.secret.key.hex() not in text and repr(access.secret.key) not in text


@pytest.mark.parametrize(
    "text", ["", "operator", "operator:00", "king:" + "0" * 64, "trainer:" + "x" * 64, "0" * 64]
)
def test_a_file_without_a_secret_is_named_and_not_repeated(tmp_path: Path, text: str) -> None:
    """What is in it might be another secret."""
    path = tmp_path / "a.token"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"the token file {path}: expected operator: or") as caught:
        Access.of_file(str(path))

    assert len(text) < 10 or text not in str(caught.value)


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    """Its name and the system's reason."""
    with pytest.raises(ValueError, match=f"{tmp_path}/none: No such file"):
        Access.of_file(f"{tmp_path}/none")
    assert Access.of_file("") is OPEN and Access.of_file(None) is OPEN


def test_a_file_that_others_may_read_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is read all the same: in a container such files have other modes."""
    path = tmp_path / "a.token"
    path.write_text(Secret.make().text)
    path.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        Access.of_file(str(path))

    assert f"{path} holds a secret, and other users may read it" in caplog.text


def test_a_command_finds_the_key_by_the_servers_port(environ: dict[str, str]) -> None:
    """Where launch of the same user has left it, and for an address of this host only; what the
    user names counts more.
    """
    secret, other = Secret.make(), Secret.make()
    place = tokens.folder(environ)
    held = tokens.LockedFiles(place)
    held.file(tokens.name_of(6174), secret)
    held.file("other.token", other)
    named = {**environ, "PSERVER_TOKEN_FILE": str(place / "other.token")}

    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert access_of("127.0.0.1:6174", environ).secret == secret
    assert access_of("127.0.0.1:6175", environ) is OPEN
    assert access_of("192.0.2.1:6174", environ) is OPEN
    assert access_of("127.0.0.1:6175", named).secret == other
    assert access_of("127.0.0.1:6174", {**environ, "PSERVER_TOKEN_FILE": ""}) is OPEN
    held.remove()


def test_what_a_killed_launch_has_left_is_nobodys(environ: dict[str, str]) -> None:
    """Its locks went with it: commands pass its files by, and the next launch removes them, and
    nothing of a launch that runs.
    """
    place = tokens.folder(environ)
    dead, alive = tokens.LockedFiles(place), tokens.LockedFiles(place)
    for held, port in ((dead, 1), (alive, 2)):
        tokens.write(held.directory() / "operator.token", Secret.make())
        held.file(tokens.name_of(port), Secret.make())
    for descriptor, _ in dead._held:  # as the system does
        os.close(descriptor)

    assert tokens.published(1, environ) is None
    assert tokens.published(2, environ) == place / "2.token"
    assert len(list(place.iterdir())) == 4
    tokens.LockedFiles(place)
    assert len(list(place.iterdir())) == 2 and (place / "2.token").is_file()
    alive.remove()
    assert list(place.iterdir()) == []


def test_a_pipe_is_read_when_something_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a shell makes one; one that nobody writes to is an error after some seconds, and no wait
    for ever.
    """
    monkeypatch.setattr(tokens, "PIPE_SECONDS", 0.2)
    path, secret = tmp_path / "pipe", Secret.make()
    os.mkfifo(path, 0o600)
    with pytest.raises(ValueError, match=f"the token file {path}: "):
        tokens.read(str(path))
    with open(os.open(path, os.O_RDWR), "w") as pipe:
        pipe.write(secret.text + "\n")
        pipe.flush()
        assert tokens.read(str(path)) == secret


@pytest.mark.parametrize("mode", [0o755, 0o770])
def test_a_directory_of_others_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    """Nothing is written into it, and nothing in it is believed."""
    place = tmp_path / f"pserver-{os.geteuid()}"
    monkeypatch.setattr(tokens.tempfile, "gettempdir", lambda: str(tmp_path))
    place.mkdir()
    place.chmod(mode)
    (place / "6174.token").write_text(Secret.make().text)
    used = tokens.folder({})

    assert used != place and used.stat().st_mode & 0o777 == 0o700
    assert tokens.published(6174, {}) is None


def test_a_link_is_no_directory_and_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user may have put it there."""
    monkeypatch.setattr(tokens.tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    place = tmp_path / f"pserver-{os.geteuid()}"
    place.symlink_to(tmp_path / "elsewhere")
    used = tokens.folder({})

    assert used != place and not used.is_symlink()
    place.unlink()
    (tmp_path / "far.token").write_text(Secret.make().text)
    (tokens.folder({}) / "6174.token").symlink_to(tmp_path / "far.token")

    assert tokens.published(6174, {}) is None


def test_another_users_runtime_directory_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After ``su`` the variable may still name it: then the temporary directory serves."""
    monkeypatch.setattr(tokens.tempfile, "gettempdir", lambda: str(tmp_path))
    environ = {"XDG_RUNTIME_DIR": str(tmp_path / "gone")}

    assert tokens.folder(environ) == tmp_path / f"pserver-{os.geteuid()}"


def test_a_server_takes_the_operators_file_only(tmp_path: Path) -> None:
    """With a trainer's it could tell no operator from anybody."""
    path = tmp_path / "trainer.token"
    tokens.write(path, Secret.make().of(Role.TRAINER))
    with pytest.raises(ValueError, match="a server needs the operator's token file"):
        Server(ServerConfig(token_file=str(path))).start()
