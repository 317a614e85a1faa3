"""A program together with the way in which an Executor runs it, by the original's name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from trainer.executor.devices import checked_device
from trainer.executor.execution import built
from transpiler.collective import broadcast_program, executed, parallel_program
from transpiler.ir.close_names import close_names
from transpiler.ir.graph import Role
from transpiler.plan.settings import check_flag
from transpiler.program import Program
from transpiler.strategy.run_strategies import BuildStrategy, ExecutionStrategy


class CompiledProgram:
    """A program with what is said about its running, for ``Executor.run``.

    Example::

        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = (torch.ones(3, 4),)
        main, startup = capture(model, lambda model, x: model(x).sum(), optimizer, batch)
        compiled = CompiledProgram(main).with_data_parallel("loss", places=cpu_places())
        with Executor() as executor:
            executor.run(startup)
            (loss,) = executor.run(compiled, batch, ["loss"])

    Args:
        program: of one process, or a trainer's.
        build_strategy: what becomes of the program: a BuildStrategy, or a dict; docs/execution.md.
        compile: ``torch.compile`` the compute of this program, as ``Executor(compile=True)`` does
            of all (needs a C++ compiler; rounding may then differ).

    Attributes:
        program: as given: for whatever takes a program, such as ``Executor.save``.
        main: what an Executor runs.
        first: what it runs once before: it gives every trainer trainer 0's values; None: nothing.
        execution: how an Executor runs it.

    Raises:
        TypeError: an argument has another type.
        ValueError: the program is a server's, or a setting cannot act on it.
    """

    def __init__(
        self,
        program: Program,
        build_strategy: BuildStrategy | None = None,
        *,
        compile: bool = False,
    ) -> None:
        if not isinstance(program, Program):
            raise TypeError(f"CompiledProgram: expected a Program, got {type(program).__name__}")
        if program.deployment is not None and program.deployment.server_index is not None:
            raise ValueError("CompiledProgram: expected a trainer's program, got a server's")
        self.program = program
        compiles = check_flag("CompiledProgram: compile", compile)
        self._build = build_strategy
        main, execution = built("CompiledProgram", program, build_strategy, None)
        self.execution = replace(execution, compiles=execution.compiles or compiles)
        # of its own, for an Executor keeps the code of each program
        self.main = replace(main)
        self.first: Program | None = None
        self._place: torch.device | None = None
        self._parallel = False

    def with_data_parallel(
        self,
        loss_name: str | None = None,
        build_strategy: BuildStrategy | None = None,
        exec_strategy: ExecutionStrategy | None = None,
        share_vars_from: CompiledProgram | None = None,
        places: Sequence[str | torch.device] | None = None,
    ) -> CompiledProgram:
        """Averages gradients over the trainers of a job without servers, as ``ParallelExecutor``
        does; a program that was not transpiled runs alone.

        Args:
            loss_name: the loss; checked.
            build_strategy, exec_strategy: what becomes of the program, and how it is run: objects,
                or dicts; docs/execution.md.
            share_vars_from: a compiled program over the same values, which is checked: programs of
                one module share them anyway.
            places: the one device of this process, which must be the Executor's; None: that.

        Returns:
            This object.

        Raises:
            TypeError: an argument has another type.
            ValueError: it is said twice, the program is one of a job with servers, the loss or the
                place does not exist, there is more than one place, or a setting cannot act.
        """
        if self._parallel:
            raise ValueError("with_data_parallel: expected to be called once")
        if build_strategy is not None and self._build is not None:
            raise ValueError("with_data_parallel: build_strategy: expected it once, got it twice")
        check_without_servers("with_data_parallel", self.program)
        check_loss("with_data_parallel", self.program, loss_name)
        _check_shared(self.program, share_vars_from)
        self._place = _place(places)
        build = self._build if build_strategy is None else build_strategy
        program, execution = built("with_data_parallel", self.program, build, exec_strategy)
        self._build = build
        compiles = execution.compiles or self.execution.compiles
        self.execution = replace(execution, compiles=compiles)
        program = executed(program, self.execution)
        self.main = replace(parallel_program(program))
        if self.program.deployment is not None:
            self.first = broadcast_program(program)
        self._parallel = True
        return self

    def _check_build(self) -> None:
        """Raises where what the build strategy asks for was decided before it was given."""
        build = BuildStrategy() if self._build is None else {**BuildStrategy(), **self._build}
        placed = len(self.main.main.ops) > len(self.program.main.ops)  # sums, by this object
        late = {
            "enable_sequential_execution": not placed and not self.execution.compiles,
            "fuse_broadcast_ops": self.first is None,
        }
        for key, is_late in late.items():
            if build[key] and is_late:
                raise ValueError(
                    f"CompiledProgram: {key}: the program is as transpile made it: give it to "
                    "transpile(strategy=...)"
                )

    def begun(
        self, device: torch.device, loaded: Collection[int], run: Callable[[Program], Any]
    ) -> Program:
        """The program to run; where this is the first time in an Executor, what comes before it has
        run.

        Args:
            device: the Executor's.
            loaded: the ids of the programs that it has run.
            run: runs one.

        Raises:
            ValueError: the program is for another place, or the build strategy comes too late.
        """
        if self._place not in (None, device):
            raise ValueError(
                f"CompiledProgram: expected an Executor on {self._place}, as places says, got one "
                f"on {device}"
            )
        self._check_build()
        if self.first is not None and id(self.first) not in loaded:
            run(self.first)
        return self.main


def check_without_servers(who: str, program: Program) -> None:
    """Checks that a program is none of a job with servers.

    Raises:
        ValueError: it is.
    """
    deployment = program.deployment
    if deployment is not None and deployment.plan.collective is None:
        raise ValueError(
            f"{who}: expected a program without servers, got one of mode {deployment.plan.mode}"
        )


def check_loss(who: str, program: Program, loss_name: str | None) -> None:
    """Checks the name of a program's loss, or None.

    Raises:
        TypeError: it is no text.
        ValueError: the program has no such loss.
    """
    if loss_name is None:
        return
    if not isinstance(loss_name, str):
        raise TypeError(f"{who}: loss_name: expected text, got {type(loss_name).__name__}")
    outputs = [variable.name for variable in program.main.variables_of(Role.OUTPUT)]
    if loss_name != "loss" or "loss" not in outputs:
        near = close_names(loss_name, outputs)
        raise ValueError(
            f"{who}: loss_name: expected the program's loss, got {loss_name!r}; close names: {near}"
        )


def _check_shared(program: Program, other: CompiledProgram | None) -> None:
    if other is None:
        return
    if not isinstance(other, CompiledProgram):
        raise TypeError(
            "with_data_parallel: share_vars_from: expected a CompiledProgram, got "
            f"{type(other).__name__}"
        )
    if program.storage is None or program.storage is not other.program.storage:
        raise ValueError(
            "with_data_parallel: share_vars_from: expected a program over the same values (a clone "
            "for tests, or one of the same capture), got one over others"
        )


def _place(places: Any) -> torch.device | None:
    if places is None:
        return None
    if isinstance(places, str) or not isinstance(places, Sequence):
        raise TypeError(f"with_data_parallel: places: expected a list of devices, got {places!r}")
    if len(places) != 1:
        raise ValueError(
            f"with_data_parallel: places: expected one, got {len(places)}: a process computes on "
            "one device, and several trainers are several processes"
        )
    return checked_device(places[0])
