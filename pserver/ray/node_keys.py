"""The job's secret, and keys for TLS between nodes.

An actor makes the private key of its process itself, and it stays in a file of that node.  The
driver, which is the job's authority for as long as the job runs, gets the public key and answers
with a certificate.  So no private key is on the way, whatever Ray's own connections are like.

Keys are needed where processes are at several addresses.  On one address they use the loopback,
which nobody else reaches.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from pserver.ray.order import Credentials
from pserver.security import tokens
from pserver.security.keys import (
    AUTHORITY_FILE,
    REVOKED,
    Authority,
    PrivateKey,
    certificate_bytes,
    key_bytes,
    write_private,
)
from pserver.security.tokens import Role, Secret

LOOPBACK = "127.0.0.1"
KEYS = "PSERVER_KEYS"


class JobKeys:
    """The secret of one attempt, and the authority that signs its keys.

    Args:
        addresses: of all processes.
        environment: the variables that the user has given: with keys of his own, or with
            PSERVER_INSECURE=1, none are made.
    """

    def __init__(self, addresses: Collection[str], environment: Mapping[str, str]) -> None:
        self._secret = Secret.make()
        self._local = len(set(addresses)) == 1
        self._now = datetime.now(UTC)
        given = environment.get(KEYS) or environment.get("PSERVER_INSECURE") == "1"
        self._authority = None if self._local or given else Authority.new(self._now)

    def host(self, address: str) -> str:
        """Where a server listens on a node of this address."""
        return LOOPBACK if self._local else address

    def credentials(self, kind: str, address: str, public_key: bytes) -> Credentials:
        """What a process gets.

        Args:
            kind: "server" or "trainer".
            public_key: of the key that its actor has made, as PEM.
        """
        role = Role.OPERATOR if kind == "server" else Role.TRAINER
        token = self._secret.of(role).text
        if self._authority is None:
            return Credentials(token)
        key = serialization.load_pem_public_key(public_key)
        assert isinstance(key, ec.EllipticCurvePublicKey), "as the actor makes it"
        signed = self._authority.issue(key, kind, (address,), self._now)
        files = {
            f"{kind}.pem": certificate_bytes(signed),
            AUTHORITY_FILE: certificate_bytes(self._authority.certificate),
            REVOKED: self._authority.revocations((), self._now),
        }
        return Credentials(token, files)


def public_bytes(key: PrivateKey) -> bytes:
    """The public half of a key, as PEM."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_key().public_bytes(serialization.Encoding.PEM, form)


def write_credentials(
    folder: Path, kind: str, credentials: Credentials, key: PrivateKey
) -> dict[str, str]:
    """Writes what a process has into files that only this user can read.

    Args:
        folder: the process's own.

    Returns:
        The variables that name them.
    """
    token = folder / f"{kind}.token"
    tokens.write(token, Secret.parse(credentials.token))
    variables = {"PSERVER_TOKEN_FILE": str(token)}
    if credentials.files:
        keys = folder / "keys"
        write_private(keys / f"{kind}.key", key_bytes(key))
        for name, content in credentials.files.items():
            write_private(keys / name, content)
        variables[KEYS] = str(keys)
    return variables
