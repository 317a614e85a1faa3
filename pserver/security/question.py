"""The end that asks: it sees the server's proof before it says anything."""

from __future__ import annotations

import secrets
from hmac import compare_digest

from pserver.errors import NotAllowed
from pserver.security.nonces import NONCE_BYTES
from pserver.security.proof import Challenge, Proof, client_code, hello_bytes, server_code
from pserver.security.secret import Secret


class Question:
    """One call, or one HELLO, to a server that must prove itself first.

    Args:
        secret: of the client's role.
        port: the server's control port.
        server: its name, for messages.

    Attributes:
        nonce: what the server is asked with; it tells nothing.
    """

    def __init__(self, secret: Secret, port: int, server: str) -> None:
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self._secret, self._port, self._server = secret, port, server
        self._challenge: Challenge | None = None

    @property
    def role(self) -> str:
        """The word of the role whose key is to be proved."""
        return self._secret.role.word

    def answered(self, nonce: bytes, code: bytes) -> None:
        """Takes the server's answer.

        Args:
            nonce, code: the server's; empty at an open one.

        Raises:
            NotAllowed: the server does not hold the secret, or has none.
        """
        if not nonce and not code:
            raise NotAllowed(
                f"{self._server} is open and asks for no key, but this job has a secret: expected "
                "a server of this job (PSERVER_TOKEN_FILE, or what `pserver launch` has left, "
                "belongs to another one)"
            )
        challenge = Challenge(self._secret.role, self._port, self.nonce, nonce)
        if not compare_digest(server_code(self._secret, challenge), code):
            raise NotAllowed(
                f"{self._server} does not prove that it holds this job's secret: it is a server of "
                "another job, no server, or one behind a port that leads to another port"
            )
        self._challenge = challenge

    def proof(self, name: str, request: bytes) -> Proof:
        """What is shown with the request, after :meth:`answered`.

        Args:
            name: of the call.
            request: its bytes on the wire.
        """
        assert self._challenge is not None, "the server has proved itself"
        nonce = self._challenge.server_nonce
        code = client_code(self._secret, self._challenge, name, request)
        return Proof(self.role, self.nonce, nonce, code)

    def hello_code(
        self, session: str, trainer_id: int, lane: int, stream: int, tables: bool
    ) -> bytes:
        """What HELLO shows, after :meth:`answered`."""
        return self.proof("HELLO", hello_bytes(session, trainer_id, lane, stream, tables)).code
