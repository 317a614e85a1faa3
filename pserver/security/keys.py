"""The keys of one process: read from a folder, and again when a file there changes.

So a renewed certificate and a longer list of revoked ones take effect without a restart: for every
connection that is made afterwards, and the list for open connections as well.

[Note: asked before gRPC]  gRPC's Python library shows a client neither the server's certificate nor
why a handshake has failed, and cannot look at a list of revoked ones.  So every connection over it
begins with one that is made here (:func:`ask`): it checks the server's certificate as all others
are checked, and gRPC is then given that very certificate as the only one to trust.
"""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock

from pserver.errors import Untrusted
from pserver.security.bearer import ROLES, Bearer
from pserver.security.tls_connection import TlsConnection

# ---- keys ----


REVOKED = "revoked.pem"
AUTHORITY_FILE = "authority.pem"

log = logging.getLogger(__name__)

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
    from pserver.security import certificates

    authority, key, certificate, listed = (file.read_bytes() for file in files)
    if files[1].stat().st_mode & 0o077:
        log.warning("%s: other users may read this private key: chmod 600", files[1])
    if not certificates.is_signed(certificate, authority):
        raise ValueError(f"{files[2]} and {files[0]} are from different authorities")
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
    revoked = certificates.revoked_serials(listed, authority)
    bearer = certificates.bearer_in_pem(certificate)
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


def accept(connection: socket.socket, keys: Keys, *roles: str) -> tuple[TlsConnection, Bearer]:
    """The accepting end's handshake, within the socket's timeout.

    Args:
        roles: which the peer may have.

    Returns:
        The connection, and the bearer at its other end.

    Raises:
        Untrusted: the peer has no certificate that is valid here, or does not speak TLS.
        OSError: the connection broke.
    """
    with _in_words():
        secured = TlsConnection(connection, keys.server_context(), None)
    return secured, keys.check(bearer_of(secured.tls), *roles)


def accept_for_http(
    connection: socket.socket, keys: Keys, *roles: str
) -> tuple[ssl.SSLSocket, Bearer]:
    """The same with Python's own socket, which its HTTP server wants."""
    with _in_words():
        secured = keys.server_context().wrap_socket(connection, server_side=True)
    try:
        return secured, keys.check(bearer_of(secured), *roles)
    except Untrusted:
        secured.close()
        raise


def dial(connection: socket.socket, keys: Keys, host: str) -> TlsConnection:
    """The connecting end's handshake, within the socket's timeout.

    Args:
        host: that the server's certificate must name.

    Raises:
        Untrusted: what listens there is no server of ours, or does not speak TLS.
        OSError: the connection broke.
    """
    context = _own(keys)
    with _in_words():
        secured = TlsConnection(connection, context, host)
    keys.check(bearer_of(secured.tls), "server")
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
    with connection:
        secured = dial(connection, keys, host)
        certificate = ssl.DER_cert_to_PEM_cert(_certificate(secured.tls)).encode()
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


@contextmanager
def _in_words() -> Iterator[None]:
    """Tells why a handshake fails.

    Raises:
        Untrusted, ConnectionResetError: in place of what ssl raises.
    """
    try:
        yield
    except (ssl.SSLEOFError, ConnectionResetError, BrokenPipeError) as error:
        raise ConnectionResetError(
            "the peer ended the connection in the TLS handshake: it has no keys, or does not take "
            "these"
        ) from error
    except ssl.SSLError as error:
        raise Untrusted(reason_of(error)) from error


def bearer_of(secured: ssl.SSLSocket | ssl.SSLObject) -> Bearer:
    """The peer of a connection, after its handshake."""
    return bearer_in(ssl.DER_cert_to_PEM_cert(_certificate(secured)).encode())


def bearer_in(pem: bytes) -> Bearer:
    """The bearer that a certificate in PEM names, unchecked.

    Raises:
        ValueError: it is none.
    """
    from pserver.security import certificates

    return certificates.bearer_in_pem(pem)


def _certificate(secured: ssl.SSLSocket | ssl.SSLObject) -> bytes:
    der = secured.getpeercert(binary_form=True)
    assert der is not None, "both ends ask for one"
    return der
