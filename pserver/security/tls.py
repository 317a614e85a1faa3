"""TLS on a connected socket, and what went wrong in words.

[Note: asked before gRPC]  gRPC's Python library shows a client neither the server's certificate nor
why a handshake has failed, and cannot look at a list of revoked ones.  So every connection over it
begins with one that is made here (:func:`ask`): it checks the server's certificate as all others
are checked, and gRPC is then given that very certificate as the only one to trust.
"""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress

from cryptography import x509

from pserver.errors import Untrusted
from pserver.security.certificates import ROLES, Bearer, certificate_bytes
from pserver.security.keys import Keys

ONE_SIDED = "only one of the two ends has keys (--keys, PSERVER_KEYS)"
PROBE_SECONDS = 1.0
ALERT = b"\x15\x03"  # how TLS says no, to whoever does not speak it
HELLO = b"\x16\x03"  # how a TLS client begins

# what OpenSSL says of the peer's word, in ours
SAID = {
    "CERTIFICATE_REQUIRED": "it wants a certificate",
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
        The connection, and who is at its other end.

    Raises:
        Untrusted: the peer has no certificate that counts here, or does not speak TLS.
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
    """After a failure: returns unless that was because this end alone has no keys.

    Raises:
        Untrusted: it was.
    """
    if keys is None and speaks_tls(host, port):
        raise Untrusted(f"{host}:{port}: the other end speaks TLS: {ONE_SIDED}")


def speaks_tls(host: str, port: int) -> bool:
    """Whether a TLS server listens there, whoever it is: for messages."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with suppress(OSError), socket.create_connection((host, port), PROBE_SECONDS) as connection:
        with context.wrap_socket(connection) as secured:
            return secured.version() is not None
    return False


def reason_of(error: ssl.SSLError) -> str:
    """Why a handshake has failed, in words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        text = (error.verify_message or str(error)).rstrip(".")
        if "issuer certificate" in text or "self-signed" in text or "signature" in text:
            return "its certificate is of another authority"
        return f"its certificate does not count: {text}"
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
    """Raises Untrusted if the peer will not take our certificate: it may end without a word."""
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
    """Who is at the other end of a connection, after its handshake."""
    assert isinstance(secured, ssl.SSLSocket), "after the handshake"
    return Bearer.of(_certificate(secured))


def _certificate(secured: ssl.SSLSocket) -> x509.Certificate:
    der = secured.getpeercert(binary_form=True)
    assert der is not None, "both ends ask for one"
    return x509.load_der_x509_certificate(der)
