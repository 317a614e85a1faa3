"""The token files of one launch: for its servers, for its trainers, and for the commands of the
same user.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from pserver.config import split_endpoint
from pserver.launcher.cluster import Cluster
from pserver.security import tokens
from pserver.security.tokens import Role, Secret

VARIABLE = "PSERVER_TOKEN_FILE"


class JobTokens:
    """Makes the files, and removes them at the end; a context manager.

    A local job always has a new secret.  The parts of a larger one must have the same, which the
    user gives to each host's ``launch`` in ``PSERVER_TOKEN_FILE``; without it there is none.

    Args:
        cluster: what is launched.
        environ: the variables of ``launch``.

    Attributes:
        operator: the file for servers and for ``launch`` itself; "" where the job has no secret.
        trainer: the file for trainers; likewise.

    Raises:
        ValueError: the file that the user gives holds no secret.
        OSError: there is no private place for files.
    """

    def __init__(self, cluster: Cluster, environ: Mapping[str, str]) -> None:
        self.operator = self.trainer = ""
        self._environ = environ
        self._held: tokens.Held | None = None
        self._own: Path | None = None  # the directory of this job
        if cluster.collective:
            return
        local = cluster.host is None
        given = "" if local else environ.get(VARIABLE, "")
        if not (local or given):
            return
        secret = Secret.make() if local else tokens.read(given)
        if secret.role is Role.TRAINER:
            if cluster.here(cluster.servers):
                raise ValueError(
                    f"{VARIABLE}: servers of this host need the operator's token file, got a "
                    "trainer's"
                )
            self.operator = self.trainer = given
            return
        self._held = tokens.Held(tokens.folder(environ))
        self._own = self._held.directory()
        self.trainer = self._write("trainer.token", secret.of(Role.TRAINER))
        self.operator = given or self._write("operator.token", secret)

    def _write(self, name: str, secret: Secret) -> str:
        assert self._own is not None, "the directory of this job"
        tokens.write(self._own / name, secret)
        return str(self._own / name)

    def publish(self, endpoints: Iterable[str]) -> None:
        """Leaves the operator's file where the commands of this user find it by a server's port.

        Args:
            endpoints: of the servers of a local job.
        """
        if self._held is None:
            return
        secret = tokens.read(self.operator)
        for endpoint in endpoints:
            self._held.file(tokens.name_of(split_endpoint(endpoint)[1]), secret)

    @staticmethod
    def _variables(path: str) -> dict[str, str]:
        return {VARIABLE: path} if path else {}

    @property
    def for_servers(self) -> dict[str, str]:
        """The variables of servers, and of what ``launch`` runs for itself."""
        return self._variables(self.operator)

    @property
    def for_trainers(self) -> dict[str, str]:
        """The variables of trainers."""
        return self._variables(self.trainer)

    def __enter__(self) -> JobTokens:
        return self

    def __exit__(self, *_: object) -> None:
        if self._held is not None:
            self._held.remove()
