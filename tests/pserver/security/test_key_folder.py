"""Promises of the operator's folder: modes of files, renewing, revoking."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography import x509

from pserver.__main__ import main
from pserver.security.bearer import Bearer
from pserver.security.certificates import bearer_in_pem, revoked_serials
from pserver.security.key_folder import KeyFolder


@pytest.fixture
def folder(tmp_path: Path) -> KeyFolder:
    """Keys of hosts a and b."""
    made = KeyFolder.create(tmp_path / "keys")
    assert made.add("a") and made.add("b")
    return made


def bearer_of(file: Path) -> Bearer:
    return bearer_in_pem(file.read_bytes())


def test_keys_init_makes_a_folder_for_each_host(tmp_path: Path) -> None:
    """Each has what its host needs, the operator's key lies apart, and nobody else reads any."""
    path = tmp_path / "keys"

    assert main(["keys", "init", str(path), "--hosts", "a,10.0.0.2"]) == 0

    for host in ("a", "10.0.0.2"):
        names = {file.name for file in (path / host).iterdir()}
        public = {"authority.pem", "revoked.pem", "server.pem", "trainer.pem"}
        assert names == public | {"server.key", "trainer.key"}
    assert (path / "operator" / "operator.key").exists()
    for file in path.rglob("*"):
        assert file.stat().st_mode & 0o777 == (0o700 if file.is_dir() else 0o600), file


def test_a_second_init_adds_hosts_and_changes_none(folder: KeyFolder) -> None:
    """The authority and the keys that are out there go on to count."""
    before = (folder.path / "a" / "server.pem").read_bytes()

    assert main(["keys", "init", str(folder.path), "--hosts", "a,c"]) == 0

    assert (folder.path / "a" / "server.pem").read_bytes() == before
    assert KeyFolder.open(folder.path).hosts == ["a", "b", "c"]


def test_renewing_keeps_the_keys(folder: KeyFolder) -> None:
    """Only the certificate is new: no secret travels again."""
    file = folder.path / "a" / "trainer.pem"
    before, key = file.read_bytes(), file.with_suffix(".key").read_bytes()

    renewed = folder.renew(["a"], days=500)

    assert {(each.host, each.role) for each in renewed} == {("a", "server"), ("a", "trainer")}
    old, new = (x509.load_pem_x509_certificate(pem) for pem in (before, file.read_bytes()))
    assert old.public_key() == new.public_key() and old.serial_number != new.serial_number
    assert new.not_valid_after_utc > old.not_valid_after_utc
    assert file.with_suffix(".key").read_bytes() == key


def test_revoking_reaches_renewed_certificates_and_every_host(folder: KeyFolder) -> None:
    """Whoever has stolen a key may have any certificate that was ever made for it."""
    before = bearer_of(folder.path / "a" / "trainer.pem").serial
    folder.renew(["a"])
    after = bearer_of(folder.path / "a" / "trainer.pem").serial

    assert folder.revoke("a", ["trainer"]) == ["trainer"]

    assert folder.revoked == {before, after}
    lists = {(folder.path / name / "revoked.pem").read_bytes() for name in ("a", "b", "operator")}
    assert len(lists) == 1
    assert not (folder.path / "a" / "trainer.key").exists()
    assert (folder.path / "a" / "server.key").exists()


def test_commands_at_the_same_time_lose_nothing_of_one_another(folder: KeyFolder) -> None:
    """Each host's certificates are listed, so that they can be revoked; each that was revoked is on
    the list of every host.
    """
    hosts = [f"h{number}" for number in range(8)]

    def opened() -> KeyFolder:
        return KeyFolder.open(folder.path)  # as a command of its own does

    with ThreadPoolExecutor(len(hosts)) as pool:
        assert all(pool.map(lambda host: opened().add(host), hosts))
        assert {each["host"] for each in folder.issued()} >= set(hosts)
        assert len(folder.issued()) == 1 + 2 * (2 + len(hosts))
        assert list(pool.map(lambda host: opened().revoke(host), hosts)) == [
            ["server", "trainer"]
        ] * len(hosts)

    assert len(folder.revoked) == 2 * len(hosts)
    authority = (folder.path / "authority" / "authority.pem").read_bytes()
    for host in ("a", "b"):
        listed = (folder.path / host / "revoked.pem").read_bytes()
        assert revoked_serials(listed, authority) == folder.revoked


def test_a_revoked_host_gets_fresh_keys(folder: KeyFolder) -> None:
    """``init`` makes those of a host without any; the old ones stay on the list."""
    folder.revoke("a")

    assert not (folder.path / "a").exists()
    assert folder.add("a")
    assert bearer_of(folder.path / "a" / "server.pem").serial not in folder.revoked
    assert len(folder.revoked) == 2


@pytest.mark.parametrize(
    ("line", "status", "words"),
    [
        (["init", "{}", "--hosts", "a/b"], 2, "expected the name or the address of a host"),
        (["init", "{}", "--hosts", "operator"], 2, "which is a folder of ours"),
        (["init", "{}", "--hosts", "a", "--days", "0"], 2, "--days: expected 1 or more"),
        (["renew", "{}/nowhere"], 2, "`pserver keys init` makes one"),
        (["renew", "{}", "--hosts", "z"], 2, "expected a host with keys"),
        (["revoke", "{}", "--host", "z"], 2, "expected a host with such keys in"),
        (["revoke", "{}", "--host", "a", "--roles", "root"], 2, "expected some of server,"),
        (["enrol", "{}", "--host", "a"], 2, "has keys already"),
        (["show", "{}/nowhere"], 2, "expected a folder with keys"),
    ],
)
def test_wrong_usage_is_one_line(
    folder: KeyFolder,
    capsys: pytest.CaptureFixture[str],
    line: list[str],
    status: int,
    words: str,
) -> None:
    """It names what is wrong."""
    assert main(["keys", *(each.format(folder.path) for each in line)]) == status

    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


def test_show_lists_what_expires(folder: KeyFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """With a warning where the end is near."""
    folder.renew(["b"], days=3)

    assert main(["keys", "show", str(folder.path)]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "expires in" in line] == [
        line for line in lines if "/b/" in line
    ]
