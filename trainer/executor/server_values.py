"""The values of the pserver programs that an Executor serves: what a job begins with, and what it
leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor

from pserver.errors import FingerprintMismatch
from pserver.service.server import serve_job
from trainer.environment.environment import Connection
from transpiler.ir.graph import Role, Storage
from transpiler.plan.plan import Deployment
from transpiler.program import Program


class ServerValues:
    """The values of pserver programs that hold none themselves.  One thread uses it.

    Args:
        scope: gives what startup programs have bound: slices by name.
        rows: and the first rows of tables.
    """

    def __init__(
        self,
        scope: Callable[[], Mapping[str, Tensor]],
        rows: Mapping[str, tuple[Tensor, Tensor]],
    ) -> None:
        self._scope, self._rows = scope, rows
        self._held: list[tuple[Program, Storage]] = []  # of programs that have served, or loaded

    def forget(self) -> None:
        """A startup program has run: servers begin anew."""
        self._held.clear()

    def of(self, program: Program) -> Storage:
        """The values that a program serves next: those that a file gave, those that its last job
        has left, or those of its startup program.

        Raises:
            ValueError: there are none.
        """
        if program.storage is not None:
            return program.storage
        found = next((storage for known, storage in self._held if known == program), None)
        if found is None:
            wanted = program.main.variables_of(Role.PARAMETER, Role.BUFFER)
            bound = self._scope()
            missing = [each.name for each in wanted if each.name not in bound]
            if missing:
                raise ValueError(
                    f"the server holds no value for {missing[0]!r}; run the pserver's startup "
                    "program first"
                )
            values = {each.name: bound[each.name] for each in wanted}
            found = Storage(values, None, rows=self._rows)
            self._held.append((program, found))
        return found

    def save(self, path: str, program: Program) -> None:
        """Writes a pserver program with its values to one file.

        Raises:
            OSError: the file cannot be written.
            ValueError: there are no values.
        """
        replace(program, storage=self.of(program)).save(path)

    def load(self, path: str, program: Program) -> int:
        """Reads what :meth:`save` wrote: the program's next job goes on from there.

        Returns:
            The step at which it was saved.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is damaged, holds no server's program, or that of another server.
            FingerprintMismatch: it is of another job; the message says in what it differs.
        """
        read = Program.load(path)
        mine, theirs = program.deployment, read.deployment
        assert mine is not None and mine.server_index is not None, "a pserver program"
        if theirs is None or theirs.server_index is None or read.storage is None:
            raise ValueError(f"{path}: expected a pserver program, got another")
        if theirs.server_index != mine.server_index:
            raise ValueError(
                f"{path}: expected the program of {_place(mine)}, got that of {_place(theirs)}"
            )
        if read.fingerprint() != program.fingerprint():
            raise FingerprintMismatch(
                f"{path} is of another job: expected the program of {_place(mine)}, but "
                + "; ".join(program.diff(read).splitlines()[:5])
            )
        if program.storage is None:
            self._held = [each for each in self._held if each[0] != program]
            self._held.append((program, read.storage))
        else:
            vars(program.storage).update(vars(read.storage))
        return read.storage.steps


def _place(deployment: Deployment) -> str:
    index = deployment.server_index
    assert index is not None, "a pserver program"
    return f"server {index}, {deployment.endpoints[index]}"


def serve(program: Program, values: ServerValues) -> None:
    """Runs a pserver program: serves one job until it is done.

    Args:
        values: what servers of this process begin with.

    Raises:
        PServerError: the job has failed; this is what ended it.
        SystemExit: SIGTERM or SIGINT came before the job was done, with status 143 or 130.
    """
    deployment, connection = program.deployment, Connection.from_environment()
    if deployment is None or deployment.server_index is None:
        raise ValueError(
            "expected a pserver program with its deployment, as get_pserver_programs gives it"
        )
    held = values.of(program)
    config = connection.server_config(deployment.endpoints[deployment.server_index])
    serve_job(config, replace(program, storage=held))
