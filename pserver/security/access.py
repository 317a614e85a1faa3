"""What a process has to prove with, and asks of others: nothing, or a job's secret."""

from __future__ import annotations

from dataclasses import dataclass

from pserver.security import token_files
from pserver.security.role import Role
from pserver.security.secret import Secret


@dataclass(frozen=True, slots=True)
class Access:
    """What a server asks of its clients, and what a client gives and asks of a server.

    Example::

        access = Access.of_file("job.token")  # or OPEN

    Attributes:
        secret: None: open; everybody may do everything.
    """

    secret: Secret | None = None

    @classmethod
    def of_file(cls, path: str | None) -> Access:
        """With the secret of a token file; open where there is no path.

        Raises:
            ValueError: the file cannot be read, or holds none; one sentence.
        """
        return cls(token_files.read(path)) if path else OPEN

    @property
    def is_open(self) -> bool:
        """Whether nothing is asked and nothing proved."""
        return self.secret is None

    @property
    def role(self) -> Role:
        """What the holder may do at a server of the job: all, at an open one."""
        return Role.OPERATOR if self.secret is None else self.secret.role


OPEN = Access()


def always_open(endpoint: str) -> Access:
    """The access of those who hold no secret, whatever the endpoint."""
    return OPEN
