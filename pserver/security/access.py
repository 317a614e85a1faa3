"""What a process has to prove with, and asks of others: nothing, a job's secret, keys, or both."""

from __future__ import annotations

from dataclasses import dataclass

from pserver.security import token_files
from pserver.security.keys import Keys
from pserver.security.role import Role
from pserver.security.secret import Secret


@dataclass(frozen=True, slots=True)
class Access:
    """What a server asks of its clients, and what a client gives and asks of a server.

    Example::

        access = Access.of_file("job.token")  # or OPEN

    Attributes:
        secret: None: none is asked for, and none proved.
        keys: of this process, for TLS with certificates of both ends; None: without TLS.
    """

    secret: Secret | None = None
    keys: Keys | None = None

    @classmethod
    def of(cls, token_file: str | None, keys: str | None, *roles: str) -> Access:
        """With the secret of a token file, and the keys of a folder, where they are given.

        Args:
            roles: this process's; the first one with a key in the folder counts.

        Raises:
            ValueError: a file cannot be read, or holds something else; one sentence.
        """
        if not (token_file or keys):
            return OPEN
        found = None
        if keys:
            try:
                found = Keys(keys, roles)
            except ValueError as error:
                raise ValueError(f"keys: {error}") from error
        return cls(token_files.read(token_file) if token_file else None, found)

    @classmethod
    def of_file(cls, path: str | None) -> Access:
        """With the secret of a token file; open where there is no path.

        Raises:
            ValueError: the file cannot be read, or holds none; one sentence.
        """
        return cls.of(path, None)

    @property
    def is_open(self) -> bool:
        """Whether nothing is asked and nothing proved."""
        return self.secret is None and self.keys is None

    @property
    def role(self) -> Role:
        """What the holder of the secret may do at a server of the job: all, where there is none."""
        return Role.OPERATOR if self.secret is None else self.secret.role


OPEN = Access()


def always_open(endpoint: str) -> Access:
    """The access of those who hold no secret, whatever the endpoint."""
    return OPEN
