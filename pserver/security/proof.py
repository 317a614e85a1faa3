"""What is proved: that one holds a job's secret, for one call, here and now.

A code is HMAC-SHA256, with the key of the role that is named, over these parts, each behind its
length (four bytes, little-endian)::

    "pserver 1"                 the protocol
    "server" or "client"        who proves
    "trainer" or "operator"     which key
    "6174"                      the server's control port
    32 bytes                    the client's nonce
    32 bytes                    the server's nonce
    "Join", "HELLO", ...        client: what is asked; server: nothing
    32 bytes                    client: SHA-256 of the request; server: nothing

[Note: what the port is for]  All servers of a job have one secret.  A stranger who takes the port
of a server that is gone could pass the client's nonce on to a live one, and its answer back.  The
live server's code is over its own port, which is not the one that the client has dialled.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass

from pserver.security.role import Role
from pserver.security.secret import Secret

PROTOCOL = b"pserver 1"
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Challenge:
    """What both codes of one exchange are over.

    Attributes:
        role: whose key proves.
        port: the server's control port.
        client_nonce, server_nonce: 32 bytes each.
    """

    role: Role
    port: int
    client_nonce: bytes
    server_nonce: bytes


@dataclass(frozen=True, slots=True)
class Proof:
    """What a client shows with a call, or with HELLO.

    Attributes:
        role: the word of the key's role.
        client_nonce, server_nonce: of the challenge.
        code: over all of it.
    """

    role: str
    client_nonce: bytes
    server_nonce: bytes
    code: bytes


def server_code(secret: Secret, challenge: Challenge) -> bytes:
    """By which a client sees that the server holds the job's secret.

    Args:
        secret: of the challenge's role.
    """
    return _code(secret, b"server", challenge, b"", b"")


def client_code(secret: Secret, challenge: Challenge, name: str, request: bytes) -> bytes:
    """By which a server sees that a request comes from a holder of the role's key.

    Args:
        secret: of the challenge's role.
        name: of the call, or "HELLO".
        request: its bytes on the wire; of HELLO what :func:`hello_bytes` makes.
    """
    digest = hashlib.sha256(request).digest()
    return _code(secret, b"client", challenge, name.encode(), digest)


def hello_bytes(session: str, trainer_id: int, lane: int, stream: int, tables: bool) -> bytes:
    """What is proved of HELLO: its fields, as text, with a line end behind each."""
    fields = session, trainer_id, lane, stream, int(tables)
    return "".join(f"{field}\n" for field in fields).encode()


def _code(secret: Secret, end: bytes, challenge: Challenge, name: bytes, digest: bytes) -> bytes:
    parts = (
        PROTOCOL,
        end,
        challenge.role.word.encode(),
        str(challenge.port).encode(),
        challenge.client_nonce,
        challenge.server_nonce,
        name,
        digest,
    )
    said = b"".join(_LENGTH.pack(len(part)) + part for part in parts)
    return hmac.new(secret.key, said, hashlib.sha256).digest()
