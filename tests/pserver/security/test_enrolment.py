"""Promises of enrolment: a code counts once, for a time, and only where it was made."""

from __future__ import annotations

import io
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from pserver.__main__ import main
from pserver.errors import PServerError, Refused, TimedOut, Unreachable, Untrusted
from pserver.security.certificates import Bearer
from pserver.security.enrolment import WRONG_CODES, Enrolment, redeem
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

    with pytest.raises(Unreachable, match="a code counts once"):
        redeem(enrolment.code, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_code_counts_for_a_time(enrolment: Enrolment) -> None:
    """Then the waiting ends, and says so."""
    with pytest.raises(TimedOut, match="counts no more"):
        enrolment.wait(0.05)


def test_codes_cannot_be_guessed(
    enrolment: Enrolment, waiting: Future[None], tmp_path: Path
) -> None:
    """A wrong secret gets nothing, and a few of them end the waiting."""
    for _ in range(WRONG_CODES):
        with pytest.raises(Refused, match="the code is wrong"):
            redeem(wrong(enrolment.code, 2), tmp_path / "own")

    with pytest.raises(Refused, match="wrong codes came"):
        waiting.result(SECONDS)


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
    assert Bearer.of_pem((folder.path / "a" / "server.pem").read_bytes()).host == "a"
