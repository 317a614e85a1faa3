"""Promises of a process's keys: files that change count without a restart, broken ones never."""

from __future__ import annotations

import shutil
import stat
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pserver.errors import Untrusted
from pserver.security.certificates import bearer_in_pem
from pserver.security.key_folder import KeyFolder
from pserver.security.keys import Keys


@pytest.fixture
def folder(tmp_path: Path) -> KeyFolder:
    made = KeyFolder.create(tmp_path / "keys")
    assert made.add("a")
    return made


def trainer_of(folder: KeyFolder) -> Keys:
    return Keys(folder.path / "a", ("operator", "trainer"))


def test_the_first_role_that_has_a_key_counts(folder: KeyFolder) -> None:
    """The command line is an operator where it has that key, otherwise a trainer."""
    assert trainer_of(folder).bearer.role == "trainer"
    assert Keys(folder.path / "operator", ("operator", "trainer")).bearer.role == "operator"


def test_a_renewed_certificate_counts_at_once(folder: KeyFolder) -> None:
    """And so does a longer list of revoked ones."""
    keys = trainer_of(folder)
    before, context = keys.bearer, keys.server_context()
    assert keys.server_context() is context

    folder.renew(["a"], days=700)
    folder.revoke("a", ["server"])

    assert keys.bearer.until > before.until and keys.bearer.serial != before.serial
    assert len(keys.revoked) == 2
    assert keys.server_context() is not context


def test_files_in_the_middle_of_a_change_do_not_count(
    folder: KeyFolder, caplog: pytest.LogCaptureFixture
) -> None:
    """The keys from before go on; a warning says why, once; then the new ones count."""
    keys = trainer_of(folder)
    before = keys.bearer
    own = folder.path / "a"
    shutil.copyfile(own / "server.key", own / "trainer.key")

    assert [keys.bearer, keys.bearer] == [before, before]
    assert sum("still using the previous keys" in line for line in caplog.messages) == 1

    (own / "trainer.pem").unlink()
    assert [keys.bearer, keys.bearer] == [before, before]
    assert sum("still using the previous keys" in line for line in caplog.messages) == 2
    shutil.copyfile(own / "server.pem", own / "trainer.pem")
    assert keys.bearer.role == "server"


@pytest.mark.parametrize("name", ["authority.pem", "trainer.pem", "revoked.pem"])
def test_what_is_missing_is_named(folder: KeyFolder, name: str) -> None:
    """At the start, where there is nothing to go on with."""
    (folder.path / "a" / name).unlink()

    with pytest.raises(ValueError, match=f"there is no file .*{name}"):
        trainer_of(folder)


def test_a_folder_without_keys_is_refused(tmp_path: Path) -> None:
    """The message names the file that is looked for."""
    with pytest.raises(ValueError, match="expected a folder with the file server.key"):
        Keys(tmp_path, ("server",))


def test_a_certificate_of_another_authority_is_refused(folder: KeyFolder, tmp_path: Path) -> None:
    """Files of two clusters do not mix."""
    other = KeyFolder.create(tmp_path / "other")
    shutil.copyfile(other.path / "authority" / "authority.pem", folder.path / "a" / "authority.pem")

    with pytest.raises(ValueError, match="from different authorities"):
        trainer_of(folder)


def test_who_counts(folder: KeyFolder) -> None:
    """Neither the revoked, nor the expired, nor one in another role."""
    keys = trainer_of(folder)
    server = bearer_in_pem((folder.path / "a" / "server.pem").read_bytes())
    assert keys.check(server, "server") is server

    with pytest.raises(Untrusted, match="expected a certificate of trainer, got one of server a"):
        keys.check(server, "trainer")
    with pytest.raises(Untrusted, match="has expired"):
        keys.check(replace(server, until=datetime.now(UTC) - timedelta(days=1)), "server")
    folder.revoke("a", ["server"])
    with pytest.raises(Untrusted, match="of server a is revoked"):
        keys.check(server, "server")


def test_an_end_that_is_near_is_logged_at_the_start(
    folder: KeyFolder, caplog: pytest.LogCaptureFixture
) -> None:
    """One line, which says what to do."""
    folder.renew(["a"], days=7)

    trainer_of(folder)

    assert any("expires in" in line and "pserver keys renew" in line for line in caplog.messages)


def test_a_certificate_of_tomorrow_does_not_count_yet(folder: KeyFolder) -> None:
    """The message has both times: it is a clock that is wrong."""
    server = bearer_in_pem((folder.path / "a" / "server.pem").read_bytes())
    with pytest.raises(Untrusted, match="of server a is valid from .* UTC on, and here it is"):
        trainer_of(folder).check(
            replace(server, since=datetime.now(UTC) + timedelta(days=1)), "server"
        )


def test_nobody_else_looks_into_a_folder_of_keys(folder: KeyFolder) -> None:
    """Neither into it nor into what is in it."""
    folders = [folder.path, *(each for each in folder.path.iterdir() if each.is_dir())]
    assert [stat.S_IMODE(each.stat().st_mode) for each in folders] == [0o700] * len(folders)
