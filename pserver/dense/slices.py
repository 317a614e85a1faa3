"""The dense slices of one server: their store, copies of one moment, states of checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from pserver.dense.update import OuterSliceUpdate, SliceUpdate, SliceUpdater, join_small
from pserver.errors import CorruptFrame, Unprepared
from pserver.transport.frames import DTYPES, NAMES
from pserver.transport.memory import ZONE_BYTES, ZoneMemory
from transpiler.ir.graph import Block, Op, Ref, Role, Variable
from transpiler.ir.ops import rule_of_op, states_of_op
from transpiler.ir.rules import is_dense
from transpiler.program import Program
from transpiler.verify.invariants import table_of_block

# ---- slice store ----
#
# The dense slices that one server holds, with their update rules.
#
# A :class:`SliceStore` is made from a pserver program.  Each optimize block becomes a
# :class:`~pserver.dense.update.SliceUpdate`: the slice's memory, the rule that updates it, and what
# is done to the merged gradient before.


log = logging.getLogger(__name__)


class SliceStore:
    """All dense slices of one server.

    One caller at a time for one slice; different slices may be updated and read beside each other.

    Args:
        program: of this server.

    Attributes:
        variables: slice name -> the program's variable.
        values: slice name -> contiguous tensor of the slice's shape, the memory itself.
        updates: slice name -> its update; a slice that is never updated has none.
        segment: in which large slices lie, for trainers of this host; None: there are none, or this
            system has no such memory.
    """

    def __init__(self, program: Program) -> None:
        assert program.deployment is not None, "a pserver program knows its deployment"
        self._plan = program.deployment.plan
        held = program.main.variables_of(Role.PARAMETER, Role.BUFFER)
        self.variables: dict[str, Variable] = {variable.name: variable for variable in held}
        self.segment = _segment(held)
        self.values = {variable.name: self._zeros(variable) for variable in held}
        blocks = [block for block in program.blocks[1:] if not table_of_block(block, program.main)]
        made = (self._update_of(block) for block in blocks)
        self.updates = {update.slice: update for update in made if update is not None}
        join_small(self.updates.values())
        self._states = {
            variable: (update, state)
            for update in self.updates.values()
            for state, variable in update.states.items()
        }
        self._shapes = {
            variable.name: _extents(variable) for variable in program.main.variables_of(Role.STATE)
        }
        self._loading: dict[str, dict[str, torch.Tensor]] = {}

    def _zeros(self, variable: Variable) -> torch.Tensor:
        if self.segment is None or variable.name not in self.segment.zones:
            return torch.zeros(_extents(variable), dtype=DTYPES[variable.dtype])
        return self.segment.tensor(variable.name, DTYPES[variable.dtype], _extents(variable))

    def writing(self, names: Iterable[str]) -> AbstractContextManager[None]:
        """Marks, while the block runs, that the caller changes these slices: readers of shared
        memory notice it.  One caller at a time for one slice.
        """
        return nullcontext() if self.segment is None else self.segment.writing(names)

    def _update_of(self, block: Block) -> SliceUpdate | None:
        """The update of one optimize block; None for the empty block of a server that updates
        nothing.
        """
        op = next((op for op in block.ops if is_dense(op.type)), None)
        if op is None:
            return self._addition_of(block)
        name = _variable(op, "param")
        placement = self._plan.placement(self.variables[name].of or name)
        lane = self._plan.lane_of(placement)
        begin = next(slice_.begin for slice_ in placement.slices if slice_.name == name)
        memory = self.values[name].view(-1)
        widest = torch.promote_types(memory.dtype, torch.float64)  # of complex ones complex128
        wide = memory.to(widest) if lane.outer is not None else memory
        shaped = states_of_op(op)
        clip = next((op for op in block.ops if op.type == "clip"), None)
        scaled = next((op for op in block.ops if op.type == "norm_scale"), None)
        fields: dict[str, Any] = {
            "slice": name,
            "parameter": placement.name,
            "group": placement.group,
            "lane": placement.lane,
            "value": self.values[name],
            "updater": SliceUpdater(rule_of_op(op), wide, begin, placement.slices[-1].end),
            "states": {key: _variable(op, key) for key in shaped},
            "shaped": frozenset(key for key, whole in shaped.items() if whole),
            "clip": None if clip is None else (_number(clip, "min"), _number(clip, "max")),
            "scaled": None if scaled is None else str(scaled.arguments["by"]),
            "compensation": lane.dc_asgd,
            "compression": placement.compression,
        }
        return (
            SliceUpdate(**fields) if lane.outer is None else OuterSliceUpdate(**fields, wide=wide)
        )

    def _addition_of(self, block: Block) -> SliceUpdate | None:
        """The update of a block that adds what a trainer has changed; None for an empty block."""
        if not block.ops:
            return None
        (name,) = block.ops[-1].outputs
        placement = self._plan.placement(self.variables[name].of or name)
        assert placement.group is not None, "what is never updated has no block"
        return SliceUpdate(
            name, placement.name, placement.group, placement.lane, self.values[name], None
        )

    @property
    def states(self) -> Iterable[str]:
        """The names of the optimizer states."""
        return self._states.keys()

    @property
    def held(self) -> dict[str, torch.Tensor]:
        """The memory of the slices that are never updated, by name."""
        return {name: value for name, value in self.values.items() if name not in self.updates}

    def read(self, name: str) -> torch.Tensor | None:
        """Reads a slice or an optimizer state.

        Args:
            name: of the variable.

        Returns:
            The slice's memory itself; a copy of a state; None for a state before its first update.

        Raises:
            Unprepared: nothing of this name is held here.
        """
        if name in self.values:
            return self.values[name]
        if name in self._states:
            update, state = self._states[name]
            tensor = update.read(state)
            return None if tensor is None else tensor.view(self._shapes[name])
        raise Unprepared(f"no variable {name!r} on this server; it holds {_some(self.values)}")

    def slice_of(self, state: str) -> str:
        """The name of the slice that an optimizer state belongs to.

        Raises:
            Unprepared: no state of this name is held here.
        """
        if state not in self._states:
            raise Unprepared(f"no variable {state!r} on this server; it holds {_some(self.values)}")
        return self._states[state][0].slice

    def destination(self, name: str, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The memory that an incoming value is written to.

        Args:
            name: of a slice or of an optimizer state.
            dtype: of the value, by the codec's name.
            shape: of the value.

        Returns:
            A slice's memory, or, for an optimizer state, a buffer until :meth:`loaded`.

        Raises:
            Unprepared: nothing of this name is held here.
            CorruptFrame: a state of another shape than the program says.
        """
        if name in self.values:
            return self.values[name]
        if name not in self._states:
            raise Unprepared(f"no variable {name!r} on this server; it holds {_some(self.values)}")
        update, state = self._states[name]
        if shape != self._shapes[name]:
            raise CorruptFrame(
                f"state {name!r}: expected shape {list(self._shapes[name])}, got {list(shape)}"
            )
        buffers = self._loading.setdefault(update.slice, {})
        if state not in buffers or buffers[state].dtype != DTYPES[dtype]:
            buffers[state] = torch.zeros(shape, dtype=DTYPES[dtype])
        return buffers[state]

    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        """Takes over copies of values and states.

        Args:
            values: variable name -> tensor.  A slice that comes without states has none then, as
                before its first update.

        Raises:
            Unprepared: nothing of one of the names is held here.
        """
        for name, value in values.items():
            with self.writing([name]):
                self.destination(name, NAMES[value.dtype], tuple(value.shape)).copy_(value.detach())
        self.loaded(values.keys() & self.updates.keys())

    def loaded(self, anew: Iterable[str] = ()) -> None:
        """Takes over the states that were written since the last call; see :meth:`destination`.
        Where one is refused, none of them comes with a later call.

        Args:
            anew: slices that begin anew where none of their states was written.

        Raises:
            Unprepared: no such slice is updated here.
        """
        loading, self._loading = self._loading, {}
        for name in anew:
            if name not in self.updates:
                raise Unprepared(
                    f"no slice {name!r} is updated on this server; it updates {_some(self.updates)}"
                )
            loading.setdefault(name, {})
        for name, states in loading.items():
            self.updates[name].load(states)

    def shapes(self) -> Iterator[tuple[str, torch.Size, torch.dtype]]:
        """Name, shape and dtype of every slice and of every state that exists."""
        for name, value in self.values.items():
            yield name, value.shape, value.dtype
        for name, (update, state) in self._states.items():
            dtype = update.dtype_of(state)
            if dtype is not None:
                yield name, torch.Size(self._shapes[name]), dtype

    def copy(self, name: str, out: torch.Tensor | None = None) -> torch.Tensor:
        """A copy of a slice or of a state that exists.

        Args:
            name: one of :meth:`shapes`.
            out: of its shape and dtype: where the copy is made; None: in memory of its own.
        """
        if name in self.values:
            return self.values[name].clone() if out is None else out.copy_(self.values[name])
        update, state = self._states[name]
        found = update.read(state, None if out is None else out.view(-1))
        assert found is not None, "the state exists"
        return found.view(self._shapes[name]) if out is None else out

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every slice and every state that exists, by variable name."""
        yield from self.values.items()
        for name in self._states:
            tensor = self.read(name)
            if tensor is not None:
                yield name, tensor

    @property
    def bytes_held(self) -> int:
        """Memory of parameters and optimizer states, in bytes."""
        held = sum(
            tensor.nbytes for name, tensor in self.values.items() if name not in self.updates
        )
        return held + sum(update.bytes_held for update in self.updates.values())


def _extents(variable: Variable) -> tuple[int, ...]:
    extents = tuple(extent for extent in variable.shape if isinstance(extent, int))
    assert len(extents) == len(variable.shape), "a pserver program has no free sizes"
    return extents


def _segment(held: Iterable[Variable]) -> ZoneMemory | None:
    sizes = {
        variable.name: DTYPES[variable.dtype].itemsize * torch.Size(_extents(variable)).numel()
        for variable in held
    }
    large = {name: size for name, size in sizes.items() if size >= ZONE_BYTES}
    try:
        return ZoneMemory(large, read_only=True) if large else None
    except OSError as error:
        log.warning("values are copied for trainers of this host: %s", error)
        return None


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


# ---- slice copies ----
#
# Copies of all slices and optimizer states of a server, as of one moment.


class SliceCopies:
    """Memory for copies of all that a store holds, which :meth:`copy` fills.

    [Note: memory that is there before]  A copy into memory that no process has touched takes two to
    three times as long, as the system finds each page when it is first written to.  So the memory
    is touched when this is made, while steps continue, and the copies are made while they wait.

    One caller at a time.

    Args:
        store: may be updated while this is made.  A state that comes into being meanwhile is copied
            into memory of its own.

    Attributes:
        copies: the copies by name; who writes them takes them out one by one, so that their memory
            is free again.
    """

    def __init__(self, store: SliceStore) -> None:
        self._store = store
        self._room = {
            name: torch.zeros(shape, dtype=dtype).fill_(0) for name, shape, dtype in store.shapes()
        }
        self.copies: dict[str, torch.Tensor] = {}

    def copy(self) -> None:
        """Copies every slice, and every state that exists, as it is now; nothing is updated
        meanwhile.
        """
        for name, _, _ in self._store.shapes():
            self.copies[name] = self._store.copy(name, self._room.pop(name, None))
        self._room.clear()


# ---- unmerged states ----
#
# The states of servers that a checkpoint of whole tensors does not have.
#
# Whole tensors are those of the script's optimizers: the states of an outer optimizer are not among
# them, and a number that every slice has, the count of its steps, is there once.  After a server
# was lost and has come back, its slices have taken fewer steps than those of the others.


PREFIX = "server/"  # in a checkpoint, before the variable's name


def unmerged_states(
    slices: Sequence[Mapping[str, str]], held: Mapping[str, torch.Tensor], outer: bool
) -> dict[str, torch.Tensor]:
    """The states of one parameter that whole tensors do not have, as a checkpoint names them.

    Args:
        slices: of each slice the variables of its states, by the state's name.
        held: the states that servers have made, by variable.
        outer: they are an outer optimizer's, and the script's has others.
    """
    found: dict[str, torch.Tensor] = {}
    for own in slices:
        for state, variable in own.items():
            tensor = held.get(variable)
            if tensor is not None and (outer or _apart(tensor, held.get(slices[0][state]))):
                found[f"{PREFIX}{variable}"] = tensor
    return found


def _apart(tensor: torch.Tensor, first: torch.Tensor | None) -> bool:
    """Whether a number is not that of the first slice."""
    return tensor.dim() == 0 and (first is None or not torch.equal(tensor, first))
