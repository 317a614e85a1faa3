"""The dense slices that one server holds, with their update rules: a pure table without threads,
sockets or clock.

A :class:`SliceStore` is made from a pserver program.  Every optimize block becomes one
:class:`~pserver.dense.slice_update.SliceUpdate`: the slice's memory, the rule that updates it, and what happens to the
merged gradient first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from pserver.dense.slice_optimizer import SliceUpdater
from pserver.dense.slice_update import OuterEntry, SliceUpdate, join_small
from pserver.errors import CorruptFrame, Unprepared
from pserver.transport.codec import DTYPES, NAMES
from transpiler.ir.graph import Block, Op, Ref, Role, Variable
from transpiler.ir.ops import rule_of_op, states_of_op
from transpiler.ir.rules import RULES
from transpiler.program import Program
from transpiler.verify.invariants import table_of_block


class SliceStore:
    """All slices of one server.

    Attributes:
        values: slice name -> contiguous tensor of the slice's shape, the memory itself.
        entries: slice name -> how it is updated; a slice without an entry is held and handed out.
    """

    def __init__(self, program: Program) -> None:
        assert program.deployment is not None, "a pserver program knows its deployment"
        self._plan = program.deployment.plan
        held = program.main.variables_of(Role.PARAMETER, Role.BUFFER)
        self.variables: dict[str, Variable] = {variable.name: variable for variable in held}
        self.values = {variable.name: _zeros(variable) for variable in held}
        blocks = [block for block in program.blocks[1:] if not table_of_block(block, program.main)]
        self.entries = {
            entry.slice: entry for entry in map(self._entry, blocks) if entry is not None
        }
        join_small(self.entries.values())
        self._states = {
            variable: (entry, state)
            for entry in self.entries.values()
            for state, variable in entry.states.items()
        }
        self._shapes = {
            variable.name: _extents(variable) for variable in program.main.variables_of(Role.STATE)
        }
        self._loading: dict[str, dict[str, torch.Tensor]] = {}

    def _entry(self, block: Block) -> SliceUpdate | None:
        """The update of one optimize block; None for the empty block of a server that updates
        nothing.
        """
        update = next((op for op in block.ops if op.type in RULES), None)
        if update is None:
            return self._adding(block)
        name = _variable(update, "param")
        placement = self._plan.placement(self.variables[name].of or name)
        lane = self._plan.lane_of(placement)
        begin = next(piece.begin for piece in placement.slices if piece.name == name)
        memory = self.values[name].view(-1)
        wide = memory.double() if lane.outer is not None else memory
        shaped = states_of_op(update)
        clip = next((op for op in block.ops if op.type == "clip"), None)
        scaled = next((op for op in block.ops if op.type == "norm_scale"), None)
        facts: dict[str, Any] = {
            "slice": name,
            "parameter": placement.name,
            "group": placement.group,
            "lane": placement.lane,
            "value": self.values[name],
            "updater": SliceUpdater(rule_of_op(update), wide, begin, placement.slices[-1].end),
            "states": {key: _variable(update, key) for key in shaped},
            "shaped": frozenset(key for key, whole in shaped.items() if whole),
            "clip": None if clip is None else (_number(clip, "min"), _number(clip, "max")),
            "scaled": None if scaled is None else str(scaled.arguments["by"]),
            "compensation": lane.dc_asgd,
            "compression": placement.compression,
        }
        return SliceUpdate(**facts) if lane.outer is None else OuterEntry(**facts, wide=wide)

    def _adding(self, block: Block) -> SliceUpdate | None:
        """A block that adds what a trainer has changed."""
        if not block.ops:
            return None
        (name,) = block.ops[-1].outputs
        placement = self._plan.placement(self.variables[name].of or name)
        assert placement.group is not None, "what is never updated has no block"
        return SliceUpdate(
            name, placement.name, placement.group, placement.lane, self.values[name], None
        )

    def read(self, name: str) -> torch.Tensor | None:
        """The memory of a slice or of an optimizer state; None for a state that no update has made
        yet.

        Raises:
            Unprepared: nothing of this name is held here.
        """
        if name in self.values:
            return self.values[name]
        if name in self._states:
            entry, state = self._states[name]
            tensor = entry.read(state)
            return None if tensor is None else tensor.view(self._shapes[name])
        raise Unprepared(f"no variable {name!r} on this server; it holds {_some(self.values)}")

    def slice_of(self, state: str) -> str:
        """The slice that an optimizer state belongs to.

        Raises:
            Unprepared: no state of this name is held here.
        """
        if state not in self._states:
            raise Unprepared(f"no variable {state!r} on this server; it holds {_some(self.values)}")
        return self._states[state][0].slice

    def destination(self, name: str, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Where an incoming value goes: a slice's memory, or, for an optimizer state, a buffer
        until :meth:`loaded`.

        Raises:
            Unprepared: nothing of this name is held here.
            CorruptFrame: a state of another shape than the program says.
        """
        if name in self.values:
            return self.values[name]
        if name not in self._states:
            raise Unprepared(f"no variable {name!r} on this server; it holds {_some(self.values)}")
        entry, state = self._states[name]
        if shape != self._shapes[name]:
            raise CorruptFrame(
                f"state {name!r}: expected shape {list(self._shapes[name])}, got {list(shape)}"
            )
        buffers = self._loading.setdefault(entry.slice, {})
        if state not in buffers:
            buffers[state] = torch.zeros(shape, dtype=DTYPES[dtype])
        return buffers[state]

    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        """Takes over values and states by variable name.

        Raises:
            Unprepared: nothing of one of the names is held here.
        """
        for name, value in values.items():
            self.destination(name, NAMES[value.dtype], tuple(value.shape)).copy_(value.detach())
        self.loaded()

    def loaded(self) -> None:
        """Makes the states that have arrived since the last call the present ones."""
        for name, states in self._loading.items():
            self.entries[name].load(states)
        self._loading = {}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every slice and every existing state, by variable name."""
        yield from self.values.items()
        for name in self._states:
            tensor = self.read(name)
            if tensor is not None:
                yield name, tensor

    @property
    def bytes_held(self) -> int:
        """Parameters and optimizer state, in bytes."""
        held = sum(
            tensor.nbytes for name, tensor in self.values.items() if name not in self.entries
        )
        return held + sum(entry.bytes_held for entry in self.entries.values())


def _extents(variable: Variable) -> tuple[int, ...]:
    extents = tuple(extent for extent in variable.shape if isinstance(extent, int))
    assert len(extents) == len(variable.shape), "a pserver program has no free sizes"
    return extents


def _zeros(variable: Variable) -> torch.Tensor:
    return torch.zeros(_extents(variable), dtype=DTYPES[variable.dtype])


def _variable(op: Op, argument: str) -> str:
    ref = op.arguments[argument]
    assert isinstance(ref, Ref)
    return ref.name


def _number(op: Op, argument: str) -> float:
    value = op.arguments[argument]
    assert isinstance(value, (int, float))
    return float(value)


def _some(names: Mapping[str, object]) -> str:
    listed = sorted(names)
    return (
        ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")
        if listed
        else "nothing"
    )
