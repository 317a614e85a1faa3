"""Keys for a new host, by a code that can be used once.

::

    operator                                         the new host
    a certificate of its own; waits at HOST:PORT
    HOST:PORT/CODE      ---- by any other way --->   makes its keys
                        <---- TLS ----------------   is that the certificate of the code?
                        <-------------------------   the code's secret, a request for each key
    signs, ends         ------------------------->   certificates, authority, revoked keys

Private keys never leave their host.  The code holds a secret, and the fingerprint of the
certificate with which the operator waits: a process between the two has neither.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import secrets
import socket
import ssl
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from pserver.config import split_endpoint
from pserver.errors import Refused, TimedOut, Unreachable, Untrusted
from pserver.security.certificates import Authority, certificate_bytes, key_bytes, new_key
from pserver.security.key_folder import KeyFolder, check_host, write_private
from pserver.security.keys import AUTHORITY_FILE, REVOKED
from transpiler.files import bounded_json

SECRET_BYTES, FINGERPRINT_BYTES = 16, 16
WRONG_CODES = 5  # then the code counts no more
TALK_SECONDS = 5.0  # for a peer to say what it wants
WAKE_SECONDS = 0.1
MOST_OPEN = 32  # peers; of more the oldest is sent away
MOST_MINUTES = 24 * 60.0
MOST_BYTES = 2**16  # of a message


class Enrolment:
    """The operator's end: waits for one host.  It is a context manager, which ends the waiting.

    Example::

        with Enrolment(folder, "c", ("server", "trainer"), "10.0.0.1:0") as enrolment:
            print(enrolment.code)
            enrolment.wait(600.0)

    Args:
        folder: the operator's, which gets the certificates.
        host: the name of the new one.
        roles: of its keys.
        listen: HOST:PORT, as the new host can reach it; port 0 is any free one.

    Attributes:
        code: for the new host; print it, never log it.

    Raises:
        OSError: it cannot listen there.
        ValueError: the host's name is invalid, or it has keys already.
    """

    def __init__(self, folder: KeyFolder, host: str, roles: Sequence[str], listen: str) -> None:
        check_host(host)
        if (folder.path / host).exists():
            raise ValueError(f"{host} has keys already; `pserver keys revoke` drops them")
        self._folder, self._host, self._roles = folder, host, tuple(roles)
        self._done, self._wrong = threading.Event(), 0
        self._once = threading.Lock()  # a code counts once
        self._open: deque[socket.socket] = deque()
        self._secret = secrets.token_bytes(SECRET_BYTES)
        own = Authority.new(datetime.now(UTC), days=2)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        with tempfile.TemporaryDirectory() as private:  # ssl takes files alone
            key, certificate = Path(private, "key"), Path(private, "pem")
            write_private(key, key_bytes(own.key))
            write_private(certificate, certificate_bytes(own.certificate))
            self._context.load_cert_chain(certificate, key)
        at, port = split_endpoint(listen)
        self._socket = socket.create_server((at, port), family=_family(at, port))
        shown = _fingerprint(own.certificate.public_bytes(Encoding.DER))
        text = base64.b32encode(self._secret + shown).decode().rstrip("=")
        self.code = f"{at}:{self._socket.getsockname()[1]}/{text}"

    def __enter__(self) -> Enrolment:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def wait(self, seconds: float) -> None:
        """Returns when the host has its keys.  Each peer has a thread, so that none of them keeps
        the host waiting.

        Raises:
            TimedOut: no host used the code within that time.
            Refused: too many peers sent a wrong code.
        """
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self._done.is_set():
                return
            if self._wrong >= WRONG_CODES and not self._has_counted():
                raise Refused(f"received {self._wrong} wrong codes: this one is no longer valid")
            self._socket.settimeout(min(left, WAKE_SECONDS))
            with suppress(OSError):
                connection, _ = self._socket.accept()
                oldest = self._open.popleft() if len(self._open) >= MOST_OPEN else None
                self._open.append(connection)
                if oldest is not None:
                    _end(oldest)
                threading.Thread(target=self._meet, args=(connection,), daemon=True).start()
        if self._has_counted():
            return
        raise TimedOut(f"no host used the code within {seconds:g} s; it is no longer valid")

    def _has_counted(self) -> bool:
        """Ends the validity of the code; returns whether the host has got its keys by then."""
        with self._once:
            counted = self._done.is_set()
            self._done.set()
        return counted

    def _meet(self, connection: socket.socket) -> None:
        """Serves one peer, from its handshake on; it has TALK_SECONDS in all."""
        ends = threading.Timer(TALK_SECONDS, _end, (connection,))
        ends.daemon = True
        ends.start()
        try:
            connection.settimeout(TALK_SECONDS)
            # the socket stays the timer's: it ends the conversation under it
            with (
                connection,
                self._context.wrap_socket(connection.dup(), server_side=True) as secured,
            ):
                self._serve(secured)
        except (OSError, ValueError, LookupError, TypeError):  # a stranger's words
            return
        finally:
            ends.cancel()

    def _serve(self, connection: ssl.SSLSocket) -> None:
        """Answers one peer.  After too many wrong codes the right one is not valid any more."""
        asked = _receive(connection)
        with self._once:
            right = hmac.compare_digest(bytes.fromhex(str(asked.get("secret"))), self._secret)
            self._wrong += not right
            right = right and self._wrong < WRONG_CODES
        if not right:
            _send(connection, {"error": "the code is wrong"})
            return
        requests = {role: _requested(asked, role) for role in self._roles}
        with self._once:
            if self._done.is_set():
                raise OSError("the code has been used")
            files = {
                f"{role}.pem": self._folder.sign(self._host, role, key).decode()
                for role, key in requests.items()
            }
            public = {name: content.decode() for name, content in self._folder.public().items()}
            _send(connection, {"host": self._host, "files": files | public})
            self._done.set()


def redeem(code: str, directory: Path, timeout_seconds: float = 20.0) -> str:
    """The new host's end: makes keys, and gets certificates for them.

    Args:
        code: from the operator.
        directory: where the keys are written; it has none yet.

    Returns:
        The name that the operator has given to this host.

    Raises:
        ValueError: the code is invalid, or the folder has keys.
        Untrusted: the peer there is not the one that made the code.
        Unreachable: no process waits there any more.
        Refused: the code is not, or no longer, right.
    """
    host, port, secret, fingerprint = _parsed(code)
    if list(directory.glob("*.key")):
        raise ValueError(f"{directory}: expected a folder without keys")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the code's is the one
    keys = {role: new_key() for role in ("server", "trainer", "operator")}
    try:
        with (
            socket.create_connection((host, port), timeout_seconds) as connection,
            context.wrap_socket(connection) as secured,
        ):
            shown = secured.getpeercert(binary_form=True) or b""
            if not hmac.compare_digest(_fingerprint(shown), fingerprint):
                raise Untrusted(f"{host}:{port} is not where this code was made")
            requests = {role: _request(key) for role, key in keys.items()}
            _send(secured, {"secret": secret.hex(), "keys": requests})
            answer = _receive(secured)
    except OSError as error:
        raise Unreachable(
            f"{host}:{port} does not answer ({error.strerror or error}): a code can be used once, "
            "for a time"
        ) from error
    if "error" in answer:
        raise Refused(f"{host}:{port}: {answer['error']}")
    _write(answer, keys, directory)
    return str(answer["host"])


def _write(
    answer: Mapping[str, Any], keys: Mapping[str, ec.EllipticCurvePrivateKey], directory: Path
) -> None:
    files: dict[str, str] = answer["files"]
    for role, key in keys.items():
        if f"{role}.pem" in files:
            write_private(directory / f"{role}.key", key_bytes(key))
            write_private(directory / f"{role}.pem", files[f"{role}.pem"].encode())
    for name in (AUTHORITY_FILE, REVOKED):
        write_private(directory / name, files[name].encode())


def _parsed(code: str) -> tuple[str, int, bytes, bytes]:
    endpoint, _, text = code.strip().rpartition("/")
    try:
        host, port = split_endpoint(endpoint)
        both = base64.b32decode(text + "=" * (-len(text) % 8))
    except (ValueError, binascii.Error):
        both = b""
    if len(both) != SECRET_BYTES + FINGERPRINT_BYTES:
        raise ValueError("expected a code HOST:PORT/LETTERS of `pserver keys enrol`")
    return host, port, both[:SECRET_BYTES], both[SECRET_BYTES:]


def _request(key: ec.EllipticCurvePrivateKey) -> str:
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM).decode()


def _requested(asked: Mapping[str, Any], role: str) -> ec.EllipticCurvePublicKey:
    """Raises ValueError if the requesting host does not have the key."""
    request = x509.load_pem_x509_csr(str(asked["keys"][role]).encode())
    key = request.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or not request.is_signature_valid:
        raise ValueError("expected a request that its own key has signed")
    return key


def _fingerprint(der: bytes) -> bytes:
    return hashlib.sha256(der).digest()[:FINGERPRINT_BYTES]


def _send(connection: ssl.SSLSocket, message: Mapping[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: ssl.SSLSocket) -> dict[str, Any]:
    """Raises OSError or ValueError if no message arrives."""
    got = b""
    while not got.endswith(b"\n"):
        more = connection.recv(MOST_BYTES)
        got += more
        if not more or len(got) > MOST_BYTES:
            raise OSError("the peer has ended the connection")
    found = bounded_json.loads(got)
    if not isinstance(found, dict):
        raise ValueError("expected a message")
    return found


def _end(connection: socket.socket) -> None:
    with suppress(OSError):  # it has ended already
        connection.shutdown(socket.SHUT_RDWR)


def _family(host: str, port: int) -> socket.AddressFamily:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
