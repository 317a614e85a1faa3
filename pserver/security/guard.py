"""The end that answers: whom a server lets in, and what they may ask."""

from __future__ import annotations

import time
from collections.abc import Callable
from hmac import compare_digest

from pserver.errors import NotAllowed, Refused, Untrusted
from pserver.security.access import OPEN, Access
from pserver.security.certificates import CLIENTS, ROLES, Bearer
from pserver.security.nonces import NONCE_BYTES, Nonces
from pserver.security.proof import Challenge, Proof, client_code, server_code
from pserver.security.role import Role
from pserver.security.secret import Secret

NEEDED = (
    "this server asks for its job's key: set PSERVER_TOKEN_FILE to the job's token file, or, for "
    "the commands of `pserver`, be the user who has started the job"
)


class Guard:
    """A server's door.  Any thread may call it.

    Args:
        access: the server's; its secret is an operator's.
        port: the server's control port, which proofs name.
        clock: seconds that never go back.

    Raises:
        ValueError: the secret is a trainer's: with it no operator could be told from anybody.
    """

    def __init__(
        self, access: Access, port: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._keys = access.keys
        self._secrets: dict[str, Secret] = {}
        if access.secret is not None:
            if access.role is not Role.OPERATOR:
                raise ValueError(
                    f"a server needs the operator's token file of its job, got a "
                    f"{access.role.word}'s"
                )
            roles = Role.TRAINER, Role.OPERATOR
            self._secrets = {role.word: access.secret.of(role) for role in roles}
        self._port, self._nonces = port, Nonces(clock)

    @property
    def is_open(self) -> bool:
        """Whether everybody may ask for everything."""
        return not self._secrets and self._keys is None

    def answer(self, role: str, client_nonce: bytes) -> tuple[bytes, bytes]:
        """A challenge, and this server's own proof; both empty where it has no secret.

        Args:
            role: the word of the role that the client has a key of.
            client_nonce: 32 bytes.

        Raises:
            Refused: there is no such role, or the nonce has another size.
        """
        if not self._secrets:
            return b"", b""
        nonce = self._nonces.make()
        challenge, secret = self._challenge(role, client_nonce, nonce)
        return nonce, server_code(secret, challenge)

    def admit(
        self,
        name: str,
        request: bytes,
        proof: Proof | None,
        bearer: Bearer | None = None,
        here: bool = False,
        of_peer: bool = False,
    ) -> Role:
        """The role of whoever makes a request: where both are asked for, the lesser of what the
        secret and the certificate give.

        Args:
            name: of the call, or "HELLO".
            request: its bytes.
            proof: what came with it, if something did.
            bearer: whose certificate the connection has, under TLS.
            here: it came over shared memory, from a process of this user, which has no certificate.
            of_peer: servers ask this of each other: a server's certificate counts as an operator's.

        Raises:
            NotAllowed: there is no proof, it is wrong, or it has been shown before.
            Untrusted: there is no certificate, or it does not count any more.
            Stale: its challenge has ended.
        """
        role = self._certified(bearer, here, ROLES if of_peer else CLIENTS)
        return min(role, self._proved(name, request, proof))

    def _certified(self, bearer: Bearer | None, here: bool, roles: tuple[str, ...]) -> Role:
        if self._keys is None or (here and bearer is None):
            return Role.OPERATOR
        if bearer is None:
            raise Untrusted("expected a certificate, got none (--keys, PSERVER_KEYS)")
        return min(Role.OPERATOR, Role[self._keys.check(bearer, *roles).role.upper()])

    def _proved(self, name: str, request: bytes, proof: Proof | None) -> Role:
        if not self._secrets:
            return Role.OPERATOR
        if proof is None:
            raise NotAllowed(NEEDED)
        challenge, secret = self._challenge(proof.role, proof.client_nonce, proof.server_nonce)
        self._nonces.check(proof.server_nonce)
        if not compare_digest(client_code(secret, challenge, name, request), proof.code):
            raise NotAllowed(f"the proof that came with {name} is wrong: expected this job's key")
        self._nonces.use(proof.server_nonce)
        return secret.role

    def _challenge(self, role: str, client: bytes, server: bytes) -> tuple[Challenge, Secret]:
        if role not in self._secrets or len(client) != NONCE_BYTES or len(server) != NONCE_BYTES:
            raise Refused(
                f"expected a key of {' or '.join(self._secrets)} and nonces of {NONCE_BYTES} "
                "bytes, got others"
            )
        secret = self._secrets[role]
        return Challenge(secret.role, self._port, client, server), secret


def check(role: Role, needed: Role, what: str) -> None:
    """Returns if a role is enough.

    Raises:
        NotAllowed: it is not.
    """
    if role < needed:
        has = "no key" if role is Role.NOBODY else f"the {role.word}'s"
        raise NotAllowed(f"{what} needs the {needed.word}'s key, got {has}")


OPEN_GUARD = Guard(OPEN, 0)
