"""A proof as the metadata of a control call."""

from __future__ import annotations

from collections.abc import Iterable

from pserver.errors import Refused
from pserver.security.proof import Proof

ROLE = "pserver-role"
CLIENT_NONCE, SERVER_NONCE = "pserver-client-nonce-bin", "pserver-server-nonce-bin"
CODE = "pserver-proof-bin"

Metadata = tuple[tuple[str, str | bytes], ...]


def to_metadata(proof: Proof) -> Metadata:
    """What travels beside the call's request."""
    return (
        (ROLE, proof.role),
        (CLIENT_NONCE, proof.client_nonce),
        (SERVER_NONCE, proof.server_nonce),
        (CODE, proof.code),
    )


def from_metadata(metadata: Iterable[tuple[str, str | bytes]]) -> Proof | None:
    """The proof that came with a call; None where none did.

    Raises:
        Refused: a part of it is missing.
    """
    found = {
        key: value for key, value in metadata if key in (ROLE, CLIENT_NONCE, SERVER_NONCE, CODE)
    }
    if not found:
        return None
    role = found.get(ROLE)
    nonces_and_code = [found.get(key) for key in (CLIENT_NONCE, SERVER_NONCE, CODE)]
    parts = [each for each in nonces_and_code if isinstance(each, bytes)]
    if not isinstance(role, str) or len(parts) != len(nonces_and_code):
        raise Refused("expected a whole proof in the call's metadata, got a part of one")
    return Proof(role, *parts)
