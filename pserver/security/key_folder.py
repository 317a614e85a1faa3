"""The operator's folder of keys: its files, and the actions on them.

::

  DIR/authority/authority.key authority.pem issued     stays with the operator
  DIR/operator/operator.key operator.pem ...           for the command line
  DIR/HOST/server.key server.pem trainer.key trainer.pem authority.pem revoked.pem
                                                       is copied to that host

Every file has the mode 0600, every folder 0700.  A file appears whole or not at all, so that who
reads it meanwhile has the old one or the new one.  ``issued`` lists every certificate, so that
all of a key can be revoked.

Two commands at once would each write ``issued`` or ``revoked.pem`` without what the other has
added: a certificate that cannot be revoked, or one that counts again.  So whoever changes the
folder holds a lock of the kernel's on ``authority/lock``.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from pserver.polling import poll
from pserver.security.bearer import ROLES, Bearer
from pserver.security.certificates import (
    DAYS,
    Authority,
    bearer_in,
    bearer_in_pem,
    certificate_bytes,
    general_name,
    key_bytes,
    new_key,
    revoked_serials,
)
from pserver.security.keys import AUTHORITY_FILE, REVOKED
from transpiler.files import bounded_json
from transpiler.files.named_errors import naming

AUTHORITY, OPERATOR = "authority", "operator"  # folders that are no host's
HOST_ROLES = ("server", "trainer")
LOCK_SECONDS = 30.0  # a command holds the lock for the time of some files

log = logging.getLogger(__name__)


def write_private(path: Path, content: bytes) -> None:
    """Writes a file of mode 0600, whole or not at all; makes its folder, of mode 0700."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        opened = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with naming(path), open(opened, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Locks the folder against other commands while the block runs; waits for one that has it.

    Raises:
        OSError: another has held it for ``LOCK_SECONDS``.
    """
    file = path / AUTHORITY / "lock"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    file.parent.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        for _ in poll(log, lambda: f"another command changes {path}", LOCK_SECONDS, 0.1):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                continue
        else:
            raise OSError(f"{path}: another command has changed it for {LOCK_SECONDS:g} s")
        yield
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class KeyFolder:
    """The operator's folder.  Several processes may change it at a time.

    Example::

        folder = KeyFolder.create(Path("keys"))
        folder.add("a")

    Raises:
        ValueError: it holds no authority, or another's files.
    """

    path: Path
    authority: Authority

    @classmethod
    def create(cls, path: Path) -> KeyFolder:
        """The folder, with a new authority and an operator's key where it has none yet."""
        at = path / AUTHORITY
        with _alone(path):
            if not (at / "authority.key").exists():
                authority = Authority.new(_now())
                write_private(at / AUTHORITY_FILE, certificate_bytes(authority.certificate))
                write_private(at / REVOKED, authority.revocations((), _now()))
                # last: with it the folder has an authority
                write_private(at / "authority.key", key_bytes(authority.key))
            folder = cls.open(path)
            if not (path / OPERATOR).exists():
                folder._make(OPERATOR, (OPERATOR,), DAYS)
        return folder

    @classmethod
    def open(cls, path: Path) -> KeyFolder:
        """Opens an existing folder."""
        at = path / AUTHORITY
        try:
            key, certificate = (
                (at / "authority.key").read_bytes(),
                (at / AUTHORITY_FILE).read_bytes(),
            )
        except FileNotFoundError as error:
            raise ValueError(
                f"expected a folder of keys at {path}, found no {error.filename}: "
                "`pserver keys init` makes one"
            ) from None
        return cls(path, Authority.from_pem(key, certificate))

    @property
    def hosts(self) -> list[str]:
        """The hosts that have a folder here."""
        others = (AUTHORITY, OPERATOR)
        found = sorted(each.name for each in self.path.iterdir() if each.is_dir())
        return [name for name in found if name not in others and not name.startswith(".")]

    def add(self, host: str, days: int = DAYS) -> bool:
        """Makes the keys of a host that has none yet; returns whether it did.

        Raises:
            ValueError: the name is not a host's.
        """
        check_host(host)
        with _alone(self.path):
            if (self.path / host).exists():
                return False
            self._make(host, HOST_ROLES, days)
        return True

    def sign(self, host: str, role: str, key: ec.EllipticCurvePublicKey, days: int = DAYS) -> bytes:
        """Makes a certificate for a key that this folder does not have, as PEM; files and lists
        it.
        """
        with _alone(self.path):
            return self._sign(host, role, key, days)

    def renew(self, hosts: Sequence[str] = (), days: int = DAYS) -> list[Bearer]:
        """Makes new certificates for the existing keys.

        Args:
            hosts: the hosts; "operator" for the operator; none: all.

        Returns:
            The renewed keys.

        Raises:
            ValueError: a host has no certificate here.
        """
        with _alone(self.path):
            return self._renew(hosts or [OPERATOR, *self.hosts], days)

    def _renew(self, hosts: Sequence[str], days: int) -> list[Bearer]:
        found = []
        for host in hosts:
            files = [self.path / host / f"{role}.pem" for role in ROLES]
            there = [file for file in files if file.exists()]
            if not there:
                raise ValueError(f"expected a host with keys in {self.path}, got {host!r}")
            for file in there:
                key = x509.load_pem_x509_certificate(file.read_bytes()).public_key()
                assert isinstance(key, ec.EllipticCurvePublicKey), "as this folder makes them"
                found.append(bearer_in_pem(self._sign(host, file.stem, key, days)))
        return found

    def revoke(self, host: str, roles: Sequence[str] = ()) -> list[str]:
        """Puts every certificate of a host on the list, and drops the files of its keys.

        The list is written to the folder of each host: every copy of a folder needs the new one.

        Args:
            roles: which keys; none: all of the host.

        Returns:
            The roles whose keys were revoked.

        Raises:
            ValueError: the host has no such key.
        """
        with _alone(self.path):
            return self._revoke(host, roles)

    def _revoke(self, host: str, roles: Sequence[str]) -> list[str]:
        issued = [each for each in self.issued() if each["host"] == host]
        wanted = [each for each in issued if not roles or each["role"] in roles]
        if not wanted:
            asked = " ".join((repr(host), *roles))
            raise ValueError(f"expected a host with such keys in {self.path}, got {asked}")
        serials = self.revoked | {int(each["serial"], 16) for each in wanted}
        listed = self.authority.revocations(serials, _now())
        found = sorted({each["role"] for each in wanted})
        for role in found:
            for end in ("key", "pem"):
                (self.path / host / f"{role}.{end}").unlink(missing_ok=True)
        if not any((self.path / host / f"{role}.pem").exists() for role in ROLES):
            shutil.rmtree(self.path / host, ignore_errors=True)
        for name in (AUTHORITY, OPERATOR, *self.hosts):
            if (self.path / name).is_dir():
                write_private(self.path / name / REVOKED, listed)
        return found

    @property
    def revoked(self) -> frozenset[int]:
        """Serial numbers on the list."""
        at = self.path / AUTHORITY
        return revoked_serials((at / REVOKED).read_bytes(), (at / AUTHORITY_FILE).read_bytes())

    def issued(self) -> list[dict[str, Any]]:
        """Every certificate that was ever made: its host, role, serial number and end."""
        try:
            lines = (self.path / AUTHORITY / "issued").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [bounded_json.loads(line) for line in lines]

    def public(self) -> dict[str, bytes]:
        """The files of a host besides its own keys."""
        at = self.path / AUTHORITY
        return {name: (at / name).read_bytes() for name in (AUTHORITY_FILE, REVOKED)}

    # ---- files; callers hold the folder's lock ----

    def _sign(self, host: str, role: str, key: ec.EllipticCurvePublicKey, days: int) -> bytes:
        certificate = self.authority.issue(key, role, (host,), _now(), days)
        self._file(host, role, certificate)
        self._share(host)
        return certificate_bytes(certificate)

    def _make(self, host: str, roles: Iterable[str], days: int) -> None:
        for role in roles:
            key = new_key()
            certificate = self.authority.issue(key.public_key(), role, (host,), _now(), days)
            write_private(self.path / host / f"{role}.key", key_bytes(key))
            self._file(host, role, certificate)
        self._share(host)

    def _file(self, host: str, role: str, certificate: x509.Certificate) -> None:
        bearer = bearer_in(certificate)
        said = {"host": host, "role": role, "serial": f"{bearer.serial:x}"}
        at = self.path / AUTHORITY / "issued"
        before = at.read_bytes() if at.exists() else b""
        line = json.dumps(said | {"until": bearer.until.isoformat()}) + "\n"
        write_private(at, before + line.encode())
        write_private(self.path / host / f"{role}.pem", certificate_bytes(certificate))

    def _share(self, host: str) -> None:
        for name, content in self.public().items():
            write_private(self.path / host / name, content)


def check_host(host: str) -> None:
    """Returns if a host may have this name here.

    Raises:
        ValueError: it is neither a name nor an address, or the name of a folder of ours.
    """
    if host in (AUTHORITY, OPERATOR):
        raise ValueError(f"expected the name of a host, got {host!r}, which is a folder of ours")
    general_name(host)


def _now() -> datetime:
    return datetime.now(UTC)
