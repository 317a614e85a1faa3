"""The keys of one process: read from a folder, and again when a file there changes.

So a renewed certificate and a longer list of revoked ones take effect without a restart: for every
connection that is made afterwards, and the list for open connections as well.

[Note: asked before gRPC]  gRPC's Python library shows a client neither the server's certificate nor
why a handshake has failed, and cannot look at a list of revoked ones.  So every connection over it
begins with one that is made here (:func:`ask`): it checks the server's certificate as all others
are checked, and gRPC is then given that very certificate as the only one to trust.
"""

from __future__ import annotations

import fcntl
import ipaddress
import json
import logging
import os
import re
import shutil
import socket
import ssl
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Lock
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pserver.errors import Untrusted
from pserver.polling import poll

# ---- certificates ----
#
# Certificates: an authority, and what it signs.  Pure: no files, no sockets.
#
# A certificate names the hosts of its key, and its role as a URI among the alternative names::
#
#   DNS:a  DNS:localhost  IP:127.0.0.1  IP:::1  URI:pserver:role/trainer
#
# Only a server's may stand at a listening port (extended key usage): a trainer's key can't pass for
# a server.  Keys are ECDSA P-256, which gRPC's library takes at either end.


ROLES = ("server", "trainer", "operator")
CLIENTS = ("trainer", "operator")
ROLE_URI = "pserver:role/"
HERE = ("localhost", "127.0.0.1", "::1")  # every host's own names
AUTHORITY_DAYS = 3650
DAYS = 365  # of a certificate, by default
WARN_DAYS = 30  # before its end a certificate is warned of
SKEW = timedelta(minutes=5)  # between the clocks of hosts
NOBODY = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "pserver authority")])

PrivateKey = ec.EllipticCurvePrivateKey


def new_key() -> PrivateKey:
    """A new private key."""
    return ec.generate_private_key(ec.SECP256R1())


def key_bytes(key: PrivateKey) -> bytes:
    """A private key as PEM, without a password."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def certificate_bytes(certificate: x509.Certificate) -> bytes:
    """A certificate as PEM."""
    return certificate.public_bytes(serialization.Encoding.PEM)


@dataclass(frozen=True, slots=True)
class Bearer:
    """The holder of a key, as its certificate names it.

    Attributes:
        role: "server", "trainer" or "operator"; "" in a certificate that is not ours.
        host: the one that the key was made for.
        serial: of the certificate.
        since, until: its validity.
    """

    role: str
    host: str
    serial: int
    since: datetime
    until: datetime

    @classmethod
    def of(cls, certificate: x509.Certificate) -> Bearer:
        """The bearer in this certificate, unchecked."""
        uris: list[str] = []
        for extension in certificate.extensions:
            if isinstance(extension.value, x509.SubjectAlternativeName):
                uris = extension.value.get_values_for_type(x509.UniformResourceIdentifier)
        roles = [uri.removeprefix(ROLE_URI) for uri in uris if uri.startswith(ROLE_URI)]
        role = roles[0] if len(roles) == 1 and roles[0] in ROLES else ""
        names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        host = str(names[0].value).partition(" ")[2] if names else ""
        dates = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        return cls(role, host, certificate.serial_number, *dates)

    @classmethod
    def of_pem(cls, pem: bytes) -> Bearer:
        """The bearer in a certificate in PEM.

        Raises:
            ValueError: it is none.
        """
        return cls.of(x509.load_pem_x509_certificate(pem))

    def __str__(self) -> str:
        """``"trainer a"``, for messages."""
        return f"{self.role or 'nobody'} {self.host}".rstrip()

    def days_left(self, now: datetime) -> int:
        """Whole days until it expires; negative afterwards."""
        return (self.until - now).days

    def warning(self, now: datetime) -> str:
        """One sentence where the end is near, otherwise ""."""
        days = self.days_left(now)
        if days >= WARN_DAYS:
            return ""
        when = "has expired" if self.until <= now else f"expires in {max(days, 0)} days"
        return f"the certificate of {self} {when} ({self.until:%Y-%m-%d}): `pserver keys renew`"


@dataclass(frozen=True, slots=True)
class Authority:
    """A key that signs the others, and its certificate.

    Example::

        authority = Authority.new(now)
        certificate = authority.issue(new_key().public_key(), "trainer", ["a"], now)
    """

    key: PrivateKey
    certificate: x509.Certificate

    @classmethod
    def new(cls, now: datetime, days: int = AUTHORITY_DAYS) -> Authority:
        """A new authority."""
        key = new_key()
        signs = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        builder = (
            _builder(NOBODY, key.public_key(), now, days)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(signs, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        )
        return cls(key, builder.sign(key, hashes.SHA256()))

    @classmethod
    def from_pem(cls, key: bytes, certificate: bytes) -> Authority:
        """The authority that these two files hold.

        Raises:
            ValueError: they hold something else.
        """
        loaded = serialization.load_pem_private_key(key, None)
        if not isinstance(loaded, ec.EllipticCurvePrivateKey):
            raise ValueError("expected an elliptic-curve key of the authority, got another")
        return cls(loaded, x509.load_pem_x509_certificate(certificate))

    def issue(
        self,
        key: ec.EllipticCurvePublicKey,
        role: str,
        names: Collection[str],
        now: datetime,
        days: int = DAYS,
    ) -> x509.Certificate:
        """A certificate for a public key.

        Args:
            role: one of ``ROLES``.
            names: of the host, names or addresses; the first one is its name in messages.
            days: until it expires.

        Raises:
            ValueError: there is no such role, or a name is not a host's.
        """
        if role not in ROLES:
            raise ValueError(f"expected one of the roles {', '.join(ROLES)}, got {role!r}")
        first = next(iter(names))
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{role} {first}"[:64])])
        hosts = [general_name(name) for name in dict.fromkeys((*names, *HERE))]
        alternative = [*hosts, x509.UniformResourceIdentifier(ROLE_URI + role)]
        use = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if role == "server":
            use.insert(0, ExtendedKeyUsageOID.SERVER_AUTH)
        builder = (
            _builder(subject, key, now, min(days, self._days_left(now)))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(alternative), critical=False)
            .add_extension(x509.ExtendedKeyUsage(use), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), False
            )
        )
        return builder.sign(self.key, hashes.SHA256())

    def revocations(self, serials: Iterable[int], now: datetime) -> bytes:
        """The signed list of revoked certificates, as PEM.

        Processes accept it however old it is.
        """
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(NOBODY)
            .last_update(now - SKEW)
            .next_update(now + timedelta(days=AUTHORITY_DAYS))
        )
        for serial in sorted(set(serials)):
            entry = x509.RevokedCertificateBuilder().serial_number(serial)
            builder = builder.add_revoked_certificate(entry.revocation_date(now).build())
        signed = builder.sign(self.key, hashes.SHA256())
        return signed.public_bytes(serialization.Encoding.PEM)

    def _days_left(self, now: datetime) -> int:
        return (self.certificate.not_valid_after_utc - now).days


def revoked_serials(pem: bytes, authority: bytes) -> frozenset[int]:
    """The serial numbers on a list that the authority has signed.

    Args:
        pem: the list.
        authority: its certificate, as PEM.

    Raises:
        ValueError: it is not such a list, or another authority has signed it.
    """
    found = x509.load_pem_x509_crl(pem)
    key = x509.load_pem_x509_certificate(authority).public_key()
    try:
        signed = isinstance(key, ec.EllipticCurvePublicKey) and found.is_signature_valid(key)
    except InvalidSignature:
        signed = False
    if not signed:
        raise ValueError("expected a list of revoked keys that the authority has signed")
    return frozenset(each.serial_number for each in found)


def _builder(
    subject: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(NOBODY)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + timedelta(days=days))
    )


def general_name(name: str) -> x509.GeneralName:
    """A host's name or address in the form of certificates.

    Raises:
        ValueError: it is neither an address nor a name.
    """
    try:
        return x509.IPAddress(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        pass
    if not re.fullmatch(r"[A-Za-z0-9_]+([.-]+[A-Za-z0-9_]+)*", name):
        raise ValueError(f"expected the name or the address of a host, got {name!r}")
    return x509.DNSName(name)


# ---- key folder ----
#
# The operator's folder of keys: its files, and the actions on them.
#
# ::
#
#   DIR/authority/authority.key authority.pem issued     stays with the operator
#   DIR/operator/operator.key operator.pem ...           for the command line
#   DIR/HOST/server.key server.pem trainer.key trainer.pem authority.pem revoked.pem
#                                                        is copied to that host
#
# Every file has the mode 0600, every folder 0700.  A file appears whole or not at all, so that who
# reads it meanwhile has the old one or the new one.  ``issued`` lists every certificate, so that
# all of a key can be revoked.
#
# Two commands at once would each write ``issued`` or ``revoked.pem`` without what the other has
# added: a certificate that cannot be revoked, or one that counts again.  So whoever changes the
# folder holds a lock of the kernel's on ``authority/lock``.


AUTHORITY, OPERATOR = "authority", "operator"  # folders that are no host's
HOST_ROLES = ("server", "trainer")
REVOKED = "revoked.pem"
AUTHORITY_FILE = "authority.pem"
LOCK_SECONDS = 30.0  # a command holds the lock for the time of some files

log = logging.getLogger(__name__)


def write_private(path: Path, content: bytes) -> None:
    """Writes a file of mode 0600, whole or not at all; makes its folder, of mode 0700."""
    from transpiler.files.named_errors import naming

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
                found.append(Bearer.of_pem(self._sign(host, file.stem, key, days)))
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
        from transpiler.files import bounded_json

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
        bearer = Bearer.of(certificate)
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


# ---- keys ----


Stamp = tuple[tuple[int, int, int], ...]  # of each file: its time, size and inode


@dataclass(frozen=True, slots=True)
class _KeyFiles:
    """The contents of the files, at one moment."""

    stamp: Stamp
    authority: bytes
    key: bytes
    certificate: bytes
    revoked: frozenset[int]
    bearer: Bearer
    server: ssl.SSLContext
    client: ssl.SSLContext


class Keys:
    """The keys of one process.  Any thread may use it.

    Example::

        keys = Keys("keys/a", ("trainer",))

    Args:
        directory: the folder of one host, or the operator's: see :class:`KeyFolder`.
        roles: this process's; the first one that has a key there counts.

    Raises:
        ValueError: a file is missing, or holds something else.
    """

    def __init__(self, directory: str | Path, roles: Sequence[str]) -> None:
        self.directory = Path(directory)
        found = [role for role in roles if (self.directory / f"{role}.key").is_file()]
        if not found:
            files = " or ".join(f"{role}.key" for role in roles)
            raise ValueError(f"expected a folder with the file {files}, got {self.directory}")
        self._files = [
            self.directory / name
            for name in (AUTHORITY_FILE, f"{found[0]}.key", f"{found[0]}.pem", REVOKED)
        ]
        self._lock = Lock()  # guards the two below
        self._failed: Stamp = ()  # what could not be read
        try:
            self._read = _load(self._files, _stamp(self._files))
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.directory}: {_why(error)}") from error
        if self.bearer.role != found[0]:
            raise ValueError(f"{self._files[2]}: expected {found[0]}, got {self.bearer.role!r}")
        if warning := self.bearer.warning(datetime.now(UTC)):
            log.warning("%s", warning)

    def _present(self) -> _KeyFiles:
        """The present contents of the files; the previous ones, while they are being changed."""
        with self._lock:
            try:
                stamp = _stamp(self._files)
                if stamp not in (self._read.stamp, self._failed):
                    self._failed = stamp
                    self._read = _load(self._files, stamp)
                    log.info("%s: the keys have changed; using the new ones", self.directory)
            except (OSError, ValueError) as error:
                # one of several files is new, or some are gone: once for each state
                log.warning("%s: still using the previous keys: %s", self.directory, _why(error))
            return self._read

    @property
    def bearer(self) -> Bearer:
        """The bearer of this process's key."""
        return self._present().bearer

    @property
    def authority(self) -> bytes:
        """The authority's certificate, as PEM."""
        return self._present().authority

    @property
    def pair(self) -> tuple[bytes, bytes]:
        """This process's private key and its certificate, as PEM."""
        present = self._present()
        return present.key, present.certificate

    @property
    def revoked(self) -> frozenset[int]:
        """The serial numbers of revoked certificates."""
        return self._present().revoked

    def server_context(self) -> ssl.SSLContext:
        """The context for accepted connections: TLS 1.3, with a certificate of the peer."""
        return self._present().server

    def client_context(self) -> ssl.SSLContext:
        """The context for opened connections: TLS 1.3, to a host that the certificate names."""
        return self._present().client

    def check(self, bearer: Bearer, *roles: str) -> Bearer:
        """Returns a peer, whose certificate the authority has signed, if the certificate is valid
        now.

        Args:
            roles: that it may have.

        Raises:
            Untrusted: it is revoked, not valid yet or any more, or has another role.
        """
        if bearer.serial in self.revoked:
            raise Untrusted(f"the certificate of {bearer} is revoked")
        if bearer.until <= (now := datetime.now(UTC)):
            raise Untrusted(f"the certificate of {bearer} has expired ({bearer.until:%Y-%m-%d})")
        if now < bearer.since:
            raise Untrusted(
                f"the certificate of {bearer} is valid from {bearer.since:%Y-%m-%d %H:%M} UTC on, "
                f"and here it is {now:%Y-%m-%d %H:%M} UTC: are the hosts' clocks right?"
            )
        if bearer.role not in roles:
            raise Untrusted(f"expected a certificate of {' or '.join(roles)}, got one of {bearer}")
        return bearer


def _stamp(files: Sequence[Path]) -> Stamp:
    found = []
    for file in files:
        try:
            state = file.stat()
        except FileNotFoundError:
            found.append((0, 0, 0))
        else:
            found.append((state.st_mtime_ns, state.st_size, state.st_ino))
    return tuple(found)


def _load(files: Sequence[Path], stamp: Stamp) -> _KeyFiles:
    """Raises OSError or ValueError where the files are missing, or do not belong together."""
    authority, key, certificate, listed = (file.read_bytes() for file in files)
    if files[1].stat().st_mode & 0o077:
        log.warning("%s: other users may read this private key: chmod 600", files[1])
    loaded = x509.load_pem_x509_certificate(certificate)
    try:
        loaded.verify_directly_issued_by(x509.load_pem_x509_certificate(authority))
    except InvalidSignature:
        raise ValueError(f"{files[2]} and {files[0]} are from different authorities") from None
    contexts = []
    for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=authority.decode())
        context.load_cert_chain(files[2], files[1])
        contexts.append(context)
    contexts[0].num_tickets = 0  # every connection shows its certificate
    contexts[1].set_alpn_protocols(["h2"])  # gRPC's servers want this word; ours over TCP don't ask
    revoked, bearer = revoked_serials(listed, authority), Bearer.of(loaded)
    return _KeyFiles(stamp, authority, key, certificate, revoked, bearer, *contexts)


def _why(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"there is no file {error.filename}"
    if isinstance(error, ssl.SSLError):
        return f"the key and the certificate do not belong together ({error.reason})"
    return str(error)


# ---- tls ----
#
# TLS on a connected socket, and what went wrong in words.


ONE_SIDED = "only one of the two ends has keys (--keys, PSERVER_KEYS)"
PROBE_SECONDS = 1.0
ALERT = b"\x15\x03"  # TLS's refusal of a peer that does not speak it
HELLO = b"\x16\x03"  # how a TLS client begins

# what OpenSSL says of the peer's word, in ours
SAID = {
    "CERTIFICATE_REQUIRED": "it requires a certificate",
    "UNKNOWN_CA": "it does not know the authority of this certificate",
    "CERTIFICATE_EXPIRED": "it says that this certificate has expired",
    "BAD_CERTIFICATE": "it does not take this certificate",
    "UNSUPPORTED_CERTIFICATE": "it takes no certificate of this role",
    "CERTIFICATE_UNKNOWN": "it does not take this certificate",
    "CERTIFICATE_REVOKED": "it says that this certificate is revoked",
    "PROTOCOL_VERSION": "it does not speak TLS 1.3",
}


def accept(connection: socket.socket, keys: Keys, *roles: str) -> tuple[ssl.SSLSocket, Bearer]:
    """The accepting end's handshake, within the socket's timeout.

    Args:
        roles: which the peer may have.

    Returns:
        The connection, and the bearer at its other end.

    Raises:
        Untrusted: the peer has no certificate that is valid here, or does not speak TLS.
        OSError: the connection broke.
    """
    secured = _wrap(connection, keys.server_context(), None)
    return secured, _checked(secured, keys, *roles)


def dial(connection: socket.socket, keys: Keys, host: str) -> ssl.SSLSocket:
    """The connecting end's handshake, within the socket's timeout.

    Args:
        host: that the server's certificate must name.

    Raises:
        Untrusted: what listens there is no server of ours, or does not speak TLS.
        OSError: the connection broke.
    """
    secured = _wrap(connection, _own(keys), host)
    _checked(secured, keys, "server")
    return secured


def ask(connection: socket.socket, keys: Keys, host: str) -> bytes:
    """Makes sure that a gRPC server is ours and takes our certificate, and closes the connection.

    See [Note: asked before gRPC].

    Returns:
        The server's certificate, as PEM.

    Raises:
        Untrusted: one of the two is not so.
        OSError: the connection broke.
    """
    with _wrap(connection, _own(keys), host) as secured:
        _checked(secured, keys, "server")
        certificate = certificate_bytes(_certificate(secured))
        try:
            if secured.recv(1):  # a server's first word means that it takes our certificate
                return certificate
        except ssl.SSLError as error:
            raise Untrusted(reason_of(error)) from error
    raise ConnectionResetError("it ended the connection: it does not take this certificate")


def check_plain(host: str, port: int, keys: Keys | None) -> None:
    """Returns, after a failure, unless its cause is that this end alone has no keys.

    Raises:
        Untrusted: it is.
    """
    if keys is None and speaks_tls(host, port):
        raise Untrusted(f"{host}:{port}: the other end speaks TLS: {ONE_SIDED}")


def speaks_tls(host: str, port: int) -> bool:
    """Whether any TLS server listens there: for messages."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with suppress(OSError), socket.create_connection((host, port), PROBE_SECONDS) as connection:
        with context.wrap_socket(connection) as secured:
            return secured.version() is not None
    return False


def reason_of(error: ssl.SSLError) -> str:
    """The reason of a failed handshake, in words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        text = (error.verify_message or str(error)).rstrip(".")
        if "issuer certificate" in text or "self-signed" in text or "signature" in text:
            return "its certificate is of another authority"
        return f"its certificate is not valid: {text}"
    word = error.reason or ""
    for name, text in SAID.items():
        if word.endswith(f"ALERT_{name}"):
            return text
    if word in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"):
        return f"the other end does not speak TLS: {ONE_SIDED}"
    if word == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "it has shown no certificate (--keys, PSERVER_KEYS)"
    return f"the TLS handshake failed: {word.lower().replace('_', ' ') or error}"


def _own(keys: Keys) -> ssl.SSLContext:
    """Raises Untrusted if the peer will not take our certificate: it may end the connection without
    an error.
    """
    keys.check(keys.bearer, *ROLES)
    return keys.client_context()


def _wrap(connection: socket.socket, context: ssl.SSLContext, host: str | None) -> ssl.SSLSocket:
    try:
        return context.wrap_socket(connection, server_side=host is None, server_hostname=host)
    except (ssl.SSLEOFError, ConnectionResetError, BrokenPipeError) as error:
        raise ConnectionResetError(
            "the peer ended the connection in the TLS handshake: it has no keys, or does not take "
            "these"
        ) from error
    except ssl.SSLError as error:
        raise Untrusted(reason_of(error)) from error


def _checked(secured: ssl.SSLSocket, keys: Keys, *roles: str) -> Bearer:
    try:
        return keys.check(Bearer.of(_certificate(secured)), *roles)
    except Untrusted:
        secured.close()
        raise


def bearer_of(secured: socket.socket) -> Bearer:
    """The peer of a connection, after its handshake."""
    assert isinstance(secured, ssl.SSLSocket), "after the handshake"
    return Bearer.of(_certificate(secured))


def _certificate(secured: ssl.SSLSocket) -> x509.Certificate:
    der = secured.getpeercert(binary_form=True)
    assert der is not None, "both ends ask for one"
    return x509.load_der_x509_certificate(der)
