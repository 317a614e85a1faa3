"""A job's secret: 32 random bytes, and the trainers' key that is made of them."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field

from pserver.security.role import Role

SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class Secret:
    """The key of one role in one job.

    The trainers' key is made of the operator's, and says nothing about it.  So servers, which are
    given the operator's, know both.  Neither ``repr`` nor ``str`` shows the bytes.

    Attributes:
        role: what its holder may do.
        key: the bytes that nobody else has.
    """

    role: Role
    key: bytes = field(repr=False)

    @classmethod
    def make(cls) -> Secret:
        """A new operator's secret."""
        return cls(Role.OPERATOR, secrets.token_bytes(SECRET_BYTES))

    @classmethod
    def parse(cls, text: str) -> Secret:
        """What a token file holds: ``operator:HEX``, or ``trainer:HEX``.

        Raises:
            ValueError: it holds something else; the message does not repeat it.
        """
        word, _, digits = text.strip().partition(":")
        roles = {role.word: role for role in (Role.OPERATOR, Role.TRAINER)}
        try:
            key = bytes.fromhex(digits)
        except ValueError:
            key = b""
        if word not in roles or len(key) != SECRET_BYTES:
            raise ValueError(
                f"expected operator: or trainer: and {2 * SECRET_BYTES} hexadecimal digits, got "
                f"{len(text)} other characters"
            )
        return cls(roles[word], key)

    @property
    def text(self) -> str:
        """As a token file holds it."""
        return f"{self.role.word}:{self.key.hex()}"

    def of(self, role: Role) -> Secret:
        """The key of a role, where this one tells it.

        Raises:
            ValueError: a trainer's key tells no operator's.
        """
        if role is self.role:
            return self
        if self.role is Role.OPERATOR and role is Role.TRAINER:
            made = hmac.new(self.key, b"pserver trainer", hashlib.sha256).digest()
            return Secret(Role.TRAINER, made)
        raise ValueError(f"expected an operator's key, got a {self.role.word}'s")
