"""Promises of enrolment: a code counts once, for a time, and only where it was made."""

from __future__ import annotations

import io
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

import pserver.security.enrolment
from pserver.__main__ import main
from pserver.config import split_endpoint
from pserver.errors import PServerError, Refused, TimedOut, Unreachable, Untrusted
from pserver.security.certificates import bearer_in_pem
from pserver.security.enrolment import MOST_OPEN, WRONG_CODES, Enrolment, redeem
from pserver.security.key_folder import HOST_ROLES, KeyFolder
from pserver.security.keys import Keys

SECONDS = 30.0


@pytest.fixture
def folder(tmp_path: Path) -> KeyFolder:
    return KeyFolder.create(tmp_path / "keys")


@pytest.fixture
def enrolment(folder: KeyFolder) -> Iterator[Enrolment]:
    with Enrolment(folder, "c", HOST_ROLES, "127.0.0.1:0") as waiting:
        yield waiting


@pytest.fixture
def waiting(enrolment: Enrolment) -> Iterator[Future[None]]:
    """The operator's wait, in a thread."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(enrolment.wait, SECONDS)


def wrong(code: str, at: int) -> str:
    """The code with another letter at that place behind the slash."""
    head, _, text = code.partition("/")
    letter = "A" if text[at] != "A" else "B"
    return f"{head}/{text[:at]}{letter}{text[at + 1 :]}"


def test_a_code_gives_a_host_its_keys(
    folder: KeyFolder, enrolment: Enrolment, waiting: Future[None], tmp_path: Path
) -> None:
    """The private keys are made there and stay there; the operator can renew and revoke them."""
    own = tmp_path / "own"

    assert redeem(enrolment.code, own) == "c"
    waiting.result(SECONDS)

    assert Keys(own, ("trainer",)).bearer.host == "c"
    assert sorted(file.name for file in own.glob("*.key")) == ["server.key", "trainer.key"]
    assert not list((folder.path / "c").glob("*.key"))
    key = load_pem_private_key((own / "server.key").read_bytes(), None).public_key()
    renewed = folder.renew(["c"])
    assert {each.role for each in renewed} == {"server", "trainer"}
    pem = (folder.path / "c" / "server.pem").read_bytes()
    assert x509.load_pem_x509_certificate(pem).public_key() == key
    assert folder.revoke("c", ["trainer"]) == ["trainer"]
    assert (folder.path / "c" / "server.pem").exists()


def test_a_code_counts_once(enrolment: Enrolment, waiting: Future[None], tmp_path: Path) -> None:
    """Whoever reads it afterwards has nothing."""
    redeem(enrolment.code, tmp_path / "own")
    waiting.result(SECONDS)
    enrolment.__exit__()

    with pytest.raises(Unreachable, match="a code can be used once"):
        redeem(enrolment.code, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_code_counts_for_a_time(enrolment: Enrolment) -> None:
    """Then the waiting ends, and says so."""
    with pytest.raises(TimedOut, match="no longer valid"):
        enrolment.wait(0.05)


def test_codes_cannot_be_guessed(
    enrolment: Enrolment, waiting: Future[None], tmp_path: Path
) -> None:
    """A wrong secret gets nothing, and a few of them end the waiting."""
    for _ in range(WRONG_CODES):
        with pytest.raises(Refused, match="the code is wrong"):
            redeem(wrong(enrolment.code, 2), tmp_path / "own")

    with pytest.raises(Refused, match="wrong codes"):
        waiting.result(SECONDS)


def test_the_right_code_is_not_valid_after_too_many_wrong_ones(
    enrolment: Enrolment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor for a peer that has connected before."""
    asked = {"secret": enrolment._secret.hex()}
    answers: list[Any] = []
    monkeypatch.setattr("pserver.security.enrolment._receive", lambda connection: asked)
    monkeypatch.setattr(
        "pserver.security.enrolment._send", lambda c, answer: answers.append(answer)
    )
    enrolment._wrong = WRONG_CODES

    enrolment._serve(cast(Any, None))

    assert answers == [{"error": "the code is wrong"}]


def test_who_sits_on_the_port_learns_nothing(
    enrolment: Enrolment, waiting: Future[None], tmp_path: Path
) -> None:
    """The host says its secret only where the code was made."""
    with pytest.raises(Untrusted, match="is not where this code was made"):
        redeem(wrong(enrolment.code, 30), tmp_path / "own")

    redeem(enrolment.code, tmp_path / "own")
    waiting.result(SECONDS)


@pytest.mark.parametrize("code", ["", "a:1", "a:1/", "a:1/AB", "/ABCDEFGH", "a:1/!!!!"])
def test_what_is_no_code_is_refused(
    code: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In one line, which does not repeat it; it comes on standard input, not in the arguments."""
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{code}\n"))

    assert main(["keys", "redeem", str(tmp_path / "own")]) == 2

    assert "expected a code HOST:PORT/LETTERS" in capsys.readouterr().err


def test_a_folder_with_keys_is_left_alone(folder: KeyFolder) -> None:
    """A second code does not replace them by accident."""
    folder.add("a")

    with pytest.raises((ValueError, PServerError), match="expected a folder without keys"):
        redeem("h:1/" + 52 * "A", folder.path / "a")
    assert bearer_in_pem((folder.path / "a" / "server.pem").read_bytes()).host == "a"


def test_strangers_keep_no_host_waiting(
    enrolment: Enrolment, waiting: Future[None], tmp_path: Path
) -> None:
    """Neither those that say nothing, nor one that says a byte now and then."""
    host, port = split_endpoint(enrolment.code.partition("/")[0])
    silent = [socket.create_connection((host, port), 10) for _ in range(3 * MOST_OPEN)]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection((host, port), 10) as connection,
        context.wrap_socket(connection) as dripping,
    ):
        dripping.sendall(b" ")
        assert redeem(enrolment.code, tmp_path / "own", timeout_seconds=4.0) == "c"
    waiting.result(SECONDS)
    for each in silent:
        each.close()


def test_who_talks_for_long_is_sent_away(
    enrolment: Enrolment, waiting: Future[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often he says a byte."""
    monkeypatch.setattr(pserver.security.enrolment, "TALK_SECONDS", 0.5)
    host, port = split_endpoint(enrolment.code.partition("/")[0])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection((host, port), 10) as connection,
        context.wrap_socket(connection) as dripping,
        pytest.raises(OSError),  # noqa: PT011  # a reset, or TLS's own word for it
    ):
        for _ in range(100):
            dripping.sendall(b" ")
            dripping.settimeout(0.1)
            with suppress(TimeoutError):
                if not dripping.recv(1):
                    raise OSError("the end")
    enrolment._wrong = WRONG_CODES
    with pytest.raises(Refused):
        waiting.result(SECONDS)


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "inf", "1e9"])
def test_a_time_that_is_none_is_refused(
    folder: KeyFolder, minutes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before a code is shown."""
    words = ["keys", "enrol", str(folder.path), "--host", "c", "--listen", "127.0.0.1:0"]

    assert main([*words, "--minutes", minutes]) == 2
    told = capsys.readouterr()
    assert "--minutes: expected a number above 0 and up to 1440, got" in told.err
    assert "code" not in told.out


def test_a_code_that_counts_no_more_gives_no_keys(enrolment: Enrolment, tmp_path: Path) -> None:
    """Nor to a host that was there in time and had not said its word by then."""
    with pytest.raises(TimedOut, match="it is no longer valid"):
        enrolment.wait(0.01)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(redeem, enrolment.code, tmp_path / "own", 10.0)
        connection, _ = enrolment._socket.accept()
        enrolment._meet(connection)
        with pytest.raises(PServerError):
            late.result(SECONDS)
    assert not (tmp_path / "own").exists()
