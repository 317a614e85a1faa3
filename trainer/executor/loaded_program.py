"""A program as an Executor holds it, cut into segments that run one after the other.

A segment is a run of ops: generated code for compute and (in a trainer's program) communication, or
optimizer ops.  A variable lives from the segment that defines it to the last one that reads it;
what an op writes to a persistent variable is copied into the tensor that holds it when the segment
ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from trainer.executor.optimizer_segment import OptimizerSegment
from trainer.executor.table_handle import TableHandle
from transpiler.ir.graph import PERSISTENT, Op
from transpiler.ir.ops import is_optimizer
from transpiler.ir.table_ops import updates_rows
from transpiler.lower import Kernel, Lowered, free_inputs, lower
from transpiler.program import Program


@dataclass
class Segment:
    """Ops that run as one: generated code, or an update.

    Attributes:
        run: takes values by name, gives those of ``outputs``.
        last_uses: variables that no later segment needs.
    """

    run: Callable[[dict[str, Any]], Sequence[Any]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    last_uses: tuple[str, ...] = ()

    def advance(self, values: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Runs, puts the results into ``values`` or, where ``tensors`` hold a variable, into its
        tensor, and drops what is not needed any more.
        """
        results = self.run(values)
        for name, value in zip(self.outputs, results, strict=True):
            held = tensors.get(name)
            if held is None:
                values[name] = value
            elif value is not held and value is not None:
                held.copy_(value)
        for name in self.last_uses:
            values.pop(name, None)


class LoadedProgram:
    """A program in an Executor: its tensors, its updates, and its segments by what is fetched.

    Args:
        program: kept by the Executor's caller; this object holds no reference to it.
        tensors: behind the persistent variables, by name, on the Executor's device.
        tables: the values of the tables' variables, by name.
        kernels: of communication ops, lookups and init ops, by op type.
        compiles: whether compute between communication ops is compiled by ``torch.compile``.

    Attributes:
        binds: the variables that the program's init ops name.
        trains: whether a run of it is a step.
        updates: its optimizer ops, in the order in which they run; made when they are first cut.
    """

    def __init__(
        self,
        program: Program,
        tensors: Mapping[str, Tensor],
        tables: Mapping[str, TableHandle],
        kernels: Mapping[str, Kernel],
        compiles: bool,
    ) -> None:
        self.tensors = tensors
        self.tables = tables
        self.binds = tuple(
            name
            for op in program.main.ops
            if op.type == "init"
            for name in op.outputs
            if name in tensors
        )
        self.trains = any(
            is_optimizer(op.type) or op.type == "send" or updates_rows(op)
            for op in program.main.ops
        )
        self.updates: list[OptimizerSegment] = []
        self._kernels = kernels
        self._compiles = compiles
        self._segments: dict[tuple[str, ...], list[Segment]] = {}

    def segments(
        self, program: Program, fetches: tuple[str, ...], device: torch.device
    ) -> list[Segment]:
        """The segments of a run that fetches these variables.

        Args:
            program: that this object was made of.
            device: where new tensors are made.
        """
        if fetches not in self._segments:
            self._segments[fetches] = self._cut(program, fetches, device)
        return self._segments[fetches]

    def _cut(
        self, program: Program, fetches: tuple[str, ...], device: torch.device
    ) -> list[Segment]:
        runs = [(kind, list(ops)) for kind, ops in groupby(program.main.ops, key=self._kind)]
        persistent = {v.name for v in program.main.variables.values() if v.role in PERSISTENT}
        segments: list[Segment] = []
        updates = iter(self.updates)
        for index, (kind, ops) in enumerate(runs):
            if kind == "update":
                update = next(updates, None) or self._update(program, ops)
                segments.append(Segment(_updating(update), tuple(update.grads.values()), ()))
                continue
            later = {name for _, others in runs[index + 1 :] for name in free_inputs(others)}
            outputs = [
                name
                for op in ops
                for name in op.outputs
                if name in later or name in fetches or name in persistent
            ]
            lowered = lower(ops, list(dict.fromkeys(outputs)), device, self._kernels)
            segments.append(
                Segment(_running(lowered, kind == "compiled"), lowered.inputs, lowered.outputs)
            )
        _note_last_uses(segments, {*fetches, *persistent})
        return segments

    def _update(self, program: Program, ops: Sequence[Op]) -> OptimizerSegment:
        optimizer, states = None, None
        if program.storage is not None:
            optimizer, states = program.storage.optimizer, program.storage.states
        update = OptimizerSegment(ops, self.tensors, optimizer, self.tables, states)
        self.updates.append(update)
        return update

    def _kind(self, op: Op) -> str:
        if is_optimizer(op.type):
            return "update"
        compute = op.type.startswith(("aten.", "sym.")) or op.type == "assign"
        return "compiled" if self._compiles and compute else "plain"


def _running(lowered: Lowered, compiled: bool) -> Callable[[dict[str, Any]], Sequence[Any]]:
    if not compiled:
        return lowered
    # fallback_random: dropout draws what eager dropout draws
    module = torch.compile(lowered.module, dynamic=True, options={"fallback_random": True})

    def run(values: dict[str, Any]) -> Sequence[Any]:
        return module(*[values[name] for name in lowered.inputs])  # type: ignore[no-any-return]  # generated

    return run


def _updating(update: OptimizerSegment) -> Callable[[dict[str, Any]], Sequence[Any]]:
    def run(values: dict[str, Any]) -> Sequence[Any]:
        update(values)
        return ()

    return run


def _note_last_uses(segments: Iterable[Segment], kept: set[str]) -> None:
    seen = set(kept)
    for segment in reversed(list(segments)):
        names = {*segment.inputs, *segment.outputs} - seen
        segment.last_uses = tuple(names)
        seen |= names
