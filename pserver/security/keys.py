"""The keys of one process: read from a folder, and again when a file there changes.

So a renewed certificate and a longer list of revoked ones count without a restart: for every
connection that is made afterwards, and the list for those that are there as well.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from pserver.errors import Untrusted
from pserver.security.certificates import Bearer, revoked_serials
from pserver.security.key_folder import AUTHORITY_FILE, REVOKED

log = logging.getLogger(__name__)

Stamp = tuple[tuple[int, int, int], ...]  # of each file: its time, size and inode


@dataclass(frozen=True, slots=True)
class _Read:
    """What the files hold, at one moment."""

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
        directory: the folder of one host, or the operator's: see ``key_folder.py``.
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

    def _present(self) -> _Read:
        """What the files hold now; what they held before, where they are being changed."""
        with self._lock:
            try:
                stamp = _stamp(self._files)
                if stamp not in (self._read.stamp, self._failed):
                    self._failed = stamp
                    self._read = _load(self._files, stamp)
                    log.info("%s: the keys have changed, and count from now on", self.directory)
            except (OSError, ValueError) as error:
                # one of several files is new, or some are gone: once for each state
                log.warning("%s: the keys from before count on: %s", self.directory, _why(error))
            return self._read

    @property
    def bearer(self) -> Bearer:
        """Who this process is."""
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
        """The serial numbers of certificates that do not count any more."""
        return self._present().revoked

    def server_context(self) -> ssl.SSLContext:
        """For connections that are accepted: TLS 1.3, with a certificate of the peer."""
        return self._present().server

    def client_context(self) -> ssl.SSLContext:
        """For connections that are opened: TLS 1.3, to a host that the certificate names."""
        return self._present().client

    def check(self, bearer: Bearer, *roles: str) -> Bearer:
        """Returns a peer, whose certificate the authority has signed, if it counts now.

        Args:
            roles: that it may have.

        Raises:
            Untrusted: it is revoked, does not count yet or any more, or has another role.
        """
        if bearer.serial in self.revoked:
            raise Untrusted(f"the certificate of {bearer} is revoked")
        if bearer.until <= (now := datetime.now(UTC)):
            raise Untrusted(f"the certificate of {bearer} has expired ({bearer.until:%Y-%m-%d})")
        if now < bearer.since:
            raise Untrusted(
                f"the certificate of {bearer} counts from {bearer.since:%Y-%m-%d %H:%M} UTC on, "
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


def _load(files: Sequence[Path], stamp: Stamp) -> _Read:
    """Raises OSError or ValueError where the files are missing, or do not belong together."""
    authority, key, certificate, listed = (file.read_bytes() for file in files)
    if files[1].stat().st_mode & 0o077:
        log.warning("%s: other users may read this private key: chmod 600", files[1])
    loaded = x509.load_pem_x509_certificate(certificate)
    try:
        loaded.verify_directly_issued_by(x509.load_pem_x509_certificate(authority))
    except InvalidSignature:
        raise ValueError(f"{files[2]} and {files[0]} are of two authorities") from None
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
    return _Read(stamp, authority, key, certificate, revoked, bearer, *contexts)


def _why(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"there is no file {error.filename}"
    if isinstance(error, ssl.SSLError):
        return f"the key and the certificate do not belong together ({error.reason})"
    return str(error)
