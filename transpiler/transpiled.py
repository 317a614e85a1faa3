"""The result of one call of ``transpile``: the programs of one process, and its deployment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transpiler.ir.graph import Role
from transpiler.plan.plan import Deployment
from transpiler.program import Program


@dataclass(frozen=True)
class Transpiled:
    """The programs that a call of ``transpile`` made.

    Attributes:
        deployment: this trainer's.
        mains: the trainer's main program of each optimizer.
        startups: the single-node startup program of each.
        listed: whether a list of programs was given.
        forward: the trainer's program that evaluates, where a forward program was given since.
    """

    deployment: Deployment
    mains: tuple[Program, ...]
    startups: tuple[Program, ...]
    listed: bool = False
    forward: Program | None = None

    def as_given(self, made: list[Program]) -> Any:
        """The programs made: a list where a list was given, else the only one."""
        return made if self.listed else made[0]

    def trains(self, program: Program) -> Program:
        """The main program that has a forward program's variables; the first if none has them."""
        used = program.main.variables_of(Role.PARAMETER, Role.BUFFER, Role.TABLE)
        names = {variable.name for variable in used}
        return next((m for m in self.mains if names <= m.main.variables.keys()), self.mains[0])

    @property
    def servers(self) -> Deployment:
        """The deployment of a job with servers.

        Raises:
            ValueError: the job has none.
        """
        if self.deployment.plan.collective is not None:
            raise ValueError(
                f"expected a mode with servers, got mode={self.deployment.plan.mode!r}, which has "
                "no server programs"
            )
        return self.deployment
