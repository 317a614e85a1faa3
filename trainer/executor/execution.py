"""What an Executor does around the steps of a run, as an Execution says."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from pserver.telemetry.memory import trim_memory
from trainer.modules.dump_file import DumpFiles
from transpiler.ir.graph import Role
from transpiler.ir.ops import is_optimizer
from transpiler.plan.plan import DumpSettings, Execution
from transpiler.program import Program
from transpiler.rewrites.rewrites import Programs, fuse_updates
from transpiler.strategy.execution import execution_of
from transpiler.strategy.refusals import in_one, refusals
from transpiler.strategy.run_strategies import BuildStrategy, ExecutionStrategy
from transpiler.strategy.strategy import DistributedStrategy


def execution_in(program: Program) -> Execution:
    """How the strategy that a program was transpiled with wants it to be run."""
    return Execution() if program.deployment is None else program.deployment.execution


def built(
    who: str,
    program: Program,
    build: BuildStrategy | None,
    run: ExecutionStrategy | None,
) -> tuple[Program, Execution]:
    """A program as its strategies want it, and how it is run.

    Args:
        who: for messages.
        build, run: None: as the program's own strategy has it.

    Raises:
        TypeError: one is no such strategy.
        ValueError: a setting cannot act on this program.
    """
    strategy = DistributedStrategy()
    for name, value, kind in (
        ("build_strategy", build, BuildStrategy),
        ("execution_strategy", run, ExecutionStrategy),
    ):
        if value is None:
            continue
        if not isinstance(value, kind | dict):
            raise TypeError(f"{who}: {name}: expected {kind.__name__}, got {type(value).__name__}")
        setattr(strategy, name, value)
    collective = program.deployment is not None and program.deployment.plan.collective is not None
    if found := refusals(strategy, "collective_program" if collective else "program"):
        raise ValueError(f"{who}: {in_one(found)}")
    if strategy.build_strategy["fuse_all_optimizer_ops"]:
        if program.deployment is not None and program.deployment.plan.collective is None:
            raise ValueError(
                f"{who}: fuse_all_optimizer_ops: servers update the parameters of this program: "
                "give it to transpile(strategy=...)"
            )
        program = fuse_updates(Programs(program, program)).main
    trains = any(is_optimizer(op.type) or op.type == "send" for op in program.main.ops)
    if strategy.execution_strategy["num_iteration_per_run"] > 1 and not trains:
        raise ValueError(f"{who}: num_iteration_per_run: expected a program that trains")
    said, unsaid, own = execution_of(strategy), Execution(), execution_in(program)
    named = {field.name: getattr(said, field.name) for field in fields(Execution)}
    changed = {name: value for name, value in named.items() if value != getattr(unsaid, name)}
    return program, replace(own, **changed)


def feeds_of(feed: Any, iterations: int) -> Sequence[Any]:
    """The feeds of a run's steps.

    Raises:
        TypeError: several steps, and the feed is no list of feeds.
        ValueError: there are more or fewer of them.
    """
    if iterations == 1:
        return [feed]
    if feed is None:
        return [None] * iterations
    if not isinstance(feed, list | tuple) or any(isinstance(each, Tensor) for each in feed):
        raise TypeError(
            f"feed: expected a list of {iterations} feeds, one for each step of this run, as "
            "num_iteration_per_run says"
        )
    if len(feed) != iterations:
        raise ValueError(
            f"feed: expected {iterations} feeds, as num_iteration_per_run says, got {len(feed)}"
        )
    return feed


class Cleanup:
    """Gives memory back after every so many runs.

    Args:
        every: 0 for never.
    """

    def __init__(self, every: int) -> None:
        self._every, self._runs = every, 0

    def ran(self) -> None:
        """A run is over: unreachable objects are collected, allocators return what they keep."""
        self._runs += 1
        if self._every and self._runs % self._every == 0:
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            trim_memory()


class ProgramDump:
    """What is written down of each step of a trainer's program.

    Args:
        program: a trainer's, which trains.
        settings: with a path.

    Attributes:
        names: the variables that a run must give for it.

    Raises:
        ValueError: the program has no such variable, or no such parameter.
    """

    def __init__(self, program: Program, settings: DumpSettings) -> None:
        deployment = program.deployment
        assert deployment is not None and deployment.trainer_id is not None, "a trainer's"
        known = {each.name for each in program.main.variables_of(Role.PARAMETER)}
        for name in settings.params:
            if name not in known:
                raise ValueError(f"trainer_desc_configs: dump_param: no parameter is {name!r}")
        for name in (*settings.fields, *settings.stats):
            program.var(name)
        self.names = tuple(dict.fromkeys((*settings.fields, *settings.stats)))
        self._params = settings.params
        suffix = f".optimizer-{deployment.optimizer}" if deployment.optimizer else ""
        self._files = DumpFiles(settings, deployment.trainer_id, suffix)
        self._found: dict[str, Tensor] = {}

    def begins(self, tensors: Any) -> None:
        """A step begins: keeps the parameters as it finds them."""
        self._found = {name: tensors[name].detach().clone() for name in self._params}

    def ends(self, steps: int, values: Sequence[Tensor]) -> None:
        """A step is over: writes it.

        Args:
            steps: that were taken before it.
            values: of ``names``.
        """
        named = {name: [value] for name, value in zip(self.names, values, strict=True)}
        self._files.write(steps, named, self._found)
