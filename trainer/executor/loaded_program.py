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

from pserver.telemetry.trace import SPANS, now
from trainer.executor.execution import Cleanup, ProgramDump
from trainer.executor.feed import check_feed
from trainer.executor.fetch import fetched
from trainer.executor.merge_segment import MergeSegment
from trainer.executor.optimizer_segment import OptimizerSegment
from trainer.executor.table_handle import TableHandle
from transpiler.ir.graph import PERSISTENT, Op
from transpiler.ir.ops import is_optimizer
from transpiler.ir.reuse import reusing
from transpiler.ir.scaling_ops import found_infinite
from transpiler.ir.table_ops import updates_rows
from transpiler.lower import Kernel, Lowered, free_inputs, lower
from transpiler.plan.plan import Execution
from transpiler.program import Program

# ops that only name what is in its place
PLACES = frozenset({"init", "concat"})


@dataclass
class Segment:
    """Ops that run as one: generated code, or an update.

    Attributes:
        run: takes values by name, gives those of ``outputs``.
        name: of its span in a trace.
        ops: how many there are.
        last_uses: variables that no later segment needs.
    """

    run: Callable[[dict[str, Any]], Sequence[Any]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    name: str
    ops: int
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
        execution: whether compute between communication ops is compiled by ``torch.compile``, in
            which order, and whether ops write over their operands.

    Attributes:
        binds: the variables that the program's init ops name.
        trains: whether a run of it is a step.
        updates: its optimizer ops, in the order in which they run; made when they are first cut.
        merge: what merges its gradients over runs; None: every run updates.
        cleanup: gives memory back, where the execution asks for it.
        dump: what is written down of each step; None: nothing.
        complete: whether the last run came to its end, which it does not where gradients are merged
            over runs and it was not the last one.
    """

    def __init__(
        self,
        program: Program,
        tensors: Mapping[str, Tensor],
        tables: Mapping[str, TableHandle],
        kernels: Mapping[str, Kernel],
        execution: Execution,
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
        merging = [op for op in program.main.ops if op.type == "gradient_merge"]
        self.merge = MergeSegment(merging[0], program.storage) if merging else None
        self._kernels = {name: _traced(name, kernel) for name, kernel in kernels.items()}
        self._execution = execution
        self.cleanup = Cleanup(execution.runs_per_cleanup)
        dumps = self.trains and execution.dump.path
        self.dump = ProgramDump(program, execution.dump) if dumps else None
        self._segments: dict[tuple[str, ...], list[Segment]] = {}

    def step(
        self,
        program: Program,
        feed: Any,
        fetches: tuple[str, ...],
        device: torch.device,
        finish: Callable[[], None],
    ) -> list[Tensor]:
        """Runs the program's ops once, and writes down what is dumped of it.

        Args:
            program: that this object was made of.
            feed: the inputs.
            fetches: the variables wanted.
            device: where new tensors are made.
            finish: called when all ops have run, before a value is read.

        Returns:
            Their values, as detached tensors.

        Raises:
            TypeError, ValueError: the feed does not fit the program.
        """
        began = now() if SPANS.on else 0.0
        values: dict[str, Any] = {
            **self.tensors,
            **self.tables,
            **check_feed(program, feed, device),
        }

        def value(name: str) -> Tensor:
            return fetched(program, name, values, self.tensors, self.updates)

        dumped = () if self.dump is None else self.dump.names
        if self.dump is not None:
            self.dump.begins(self.tensors)
        with torch.no_grad():
            wanted = tuple(dict.fromkeys((*fetches, *dumped)))
            self.complete = self._run(self.segments(program, wanted, device), values)
        finish()
        if self.dump is not None:
            steps = 0 if program.storage is None else program.storage.steps
            self.dump.ends(steps, [value(name) for name in dumped])
        found = [value(name) for name in fetches]
        if began:
            SPANS.add("step" if self.trains else "run", began, now())
        if self.trains and SPANS.watcher is not None:
            SPANS.watcher(None)
        return found

    def _run(self, segments: Iterable[Segment], values: dict[str, Any]) -> bool:
        """Runs segments one after the other; gives whether the last one has run."""
        for segment in segments:
            began = now() if SPANS.on else 0.0
            segment.advance(values, self.tensors)
            if began:
                SPANS.add(segment.name, began, now(), ops=segment.ops)
            merges = self.merge is not None and segment.run is self.merge
            if merges and self.merge is not None and not self.merge.complete:
                return False
        return True

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

    def end(self) -> None:
        """The program runs no more."""
        if self.merge is not None:
            self.merge.end()

    def _cut(
        self, program: Program, fetches: tuple[str, ...], device: torch.device
    ) -> list[Segment]:
        skips = found_infinite(program.main.ops)
        runs = [(kind, list(ops)) for kind, ops in groupby(program.main.ops, key=self._kind)]
        persistent = {v.name for v in program.main.variables.values() if v.role in PERSISTENT}
        segments: list[Segment] = []
        updates = iter(self.updates)
        for index, (kind, ops) in enumerate(runs):
            if kind == "merge" and self.merge is not None:
                merge = self.merge
                segments.append(Segment(merge, merge.inputs, merge.outputs, "merge", len(ops)))
                continue
            if kind == "update":
                update = next(updates, None) or self._update(program, ops)
                read = (*update.grads.values(), *filter(None, (skips,)))
                segments.append(Segment(_updating(update, skips), read, (), "update", len(ops)))
                continue
            later = {name for _, others in runs[index + 1 :] for name in free_inputs(others)}
            later.update(filter(None, (skips,)))
            outputs = [
                name
                for op in ops
                for name in op.outputs
                if name in later or name in fetches or name in persistent
            ]
            if self._execution.reuses:
                ops = reusing(ops, program.main.variables, {*outputs, *fetches, *persistent})
            lowered = lower(ops, list(dict.fromkeys(outputs)), device, self._kernels)
            run = self._compiled(lowered) if kind == "compiled" else lowered
            segments.append(Segment(run, lowered.inputs, lowered.outputs, "compute", len(ops)))
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
        if op.type == "gradient_merge":
            return "merge"
        compute = op.type.startswith(("aten.", "sym.")) or op.type == "assign"
        return "compiled" if self._execution.compiles and compute else "plain"

    def _compiled(self, lowered: Lowered) -> Callable[[dict[str, Any]], Sequence[Any]]:
        # fallback_random: dropout draws what eager dropout draws
        options: dict[str, Any] = {"fallback_random": True}
        if self._execution.ordered:
            options |= {"reorder_for_locality": False, "reorder_for_peak_memory": False}
        module = torch.compile(lowered.module, dynamic=True, options=options)

        def run(values: dict[str, Any]) -> Sequence[Any]:
            return module(*[values[name] for name in lowered.inputs])  # type: ignore[no-any-return]  # generated

        return run


def _traced(name: str, kernel: Kernel) -> Kernel:
    """A kernel of an op that communicates or looks up, whose runs are spans of a trace."""
    if name in PLACES:
        return kernel

    def run(op: Op, *arguments: Any, **named: Any) -> Any:
        if not SPANS.on:
            return kernel(op, *arguments, **named)
        began = now()
        try:
            return kernel(op, *arguments, **named)
        finally:
            SPANS.add(name, began, now())

    return run


def _updating(update: OptimizerSegment, skips: str) -> Callable[[dict[str, Any]], Sequence[Any]]:
    """An update, which is not made where the variable ``skips`` is true."""

    def run(values: dict[str, Any]) -> Sequence[Any]:
        if not skips or not bool(values[skips]):
            update(values)
        return ()

    return run


def _note_last_uses(segments: Iterable[Segment], kept: set[str]) -> None:
    seen = set(kept)
    for segment in reversed(list(segments)):
        names = {*segment.inputs, *segment.outputs} - seen
        segment.last_uses = tuple(names)
        seen |= names
