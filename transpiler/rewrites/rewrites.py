"""Recomputation: what backward reads of the forward part is computed again, segment by segment.

The checkpoints divide the forward part into segments.  Checkpoints are kept, and so is all of the
last segment, which backward begins with.  Of every other segment the ops that backward needs are
copied in front of the first op of backward that reads one of their results::

    h1 = aten.tanh(addmm)                     # a checkpoint: kept
    relu = aten.relu(addmm_1)                 # freed after its last use in the forward part
    ...
    addmm_1@RECOMPUTE = aten.addmm(b.bias, h1, t_1)
    relu@RECOMPUTE = aten.relu(addmm_1@RECOMPUTE)
    ... = aten.threshold_backward(..., relu@RECOMPUTE, 0)

What would not be the same again is kept: results of random ops, of ops that change a variable in
place, of what is changed afterwards, and of ops that are not torch's.  A copy runs the same op on
the same values, so the results are equal to the bit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from transpiler.ir.aten_ops import aten_overload
from transpiler.ir.close_names import close_names
from transpiler.ir.effects import Memory, changed
from transpiler.ir.graph import PERSISTENT, Block, Op, Ref, Role, Variable, freeze
from transpiler.ir.renamed import renamed
from transpiler.rewrites.programs import Programs
from transpiler.strategy.strategy import DistributedStrategy

SUFFIX = "@RECOMPUTE"
_KEPT_ROLES = PERSISTENT | {Role.INPUT, Role.OUTPUT, Role.SIZE, Role.TABLE}


def recompute(programs: Programs, strategy: DistributedStrategy) -> Programs:
    """Makes backward compute again what lies between the checkpoints.

    Raises:
        ValueError: a checkpoint is no variable of the forward part, or there is no backward part.
    """
    configs = strategy.recompute_configs
    block = _Recomputation(programs.main.main, configs["checkpoints"]).block()
    return programs._replace(main=programs.main.with_blocks(block, *programs.main.blocks[1:]))


class _Recomputation:
    """One block, as it recomputes.

    Args:
        block: forward, backward, updates.
        checkpoints: names of variables.
    """

    def __init__(self, block: Block, checkpoints: Sequence[str]) -> None:
        self._block = block
        self._seed = _seed(block)
        self._memory = Memory(block.ops)
        self._maker = {
            name: index
            for index, op in enumerate(block.ops[: self._seed])
            for name in op.outputs
            if name
        }
        for name in checkpoints:
            if name not in self._maker:
                raise ValueError(
                    "recompute_configs['checkpoints']: expected variables of the forward part, "
                    f"which transpiler.name(tensor, ...) names, got {name!r}; close names: "
                    f"{close_names(name, self._maker)}"
                )
        self._ends = sorted(self._maker[name] for name in set(checkpoints))
        kept = [v.name for v in block.variables.values() if v.role in _KEPT_ROLES]
        self._kept = {self._memory.of(name) for name in (*kept, *checkpoints)}
        # the last op that changes some memory
        self._changed = {
            self._memory.of(name): index
            for index, op in enumerate(block.ops[: self._seed])
            for name in changed(op)
        }

    def block(self) -> Block:
        """The block with the copies in it."""
        needed = self._needed()
        names = {name: name + SUFFIX for name in needed}
        written: set[int] = set()
        ops = list(self._block.ops[: self._seed])
        for op in self._block.ops[self._seed :]:
            for name in op.inputs:
                if name in needed:
                    ops += self._copies(self._segment(name), needed, names, written)
            ops.append(renamed(op, names))
        made = {
            new: replace(self._block.variables[old], name=new, role=Role.TEMPORARY, of="")
            for old, new in names.items()
        }
        variables: dict[str, Variable] = {**self._block.variables, **made}
        return replace(self._block, ops=tuple(ops), variables=freeze(variables))

    def _segment(self, name: str) -> int:
        """The number of checkpoints before the op that makes a variable."""
        return sum(end < self._maker[name] for end in self._ends)

    def _again(self, name: str) -> bool:
        """Whether a variable may be computed again, and is not kept."""
        index, memory = self._maker.get(name, -1), self._memory.of(name)
        if index < 0 or memory in self._kept or self._segment(name) == len(self._ends):
            return False
        op = self._block.ops[index]
        if op.type != "assign" and (not op.type.startswith("aten.") or _is_random(op)):
            return False
        later = (self._changed.get(self._memory.of(each), -1) for each in op.inputs)
        return memory not in self._changed and all(index > change for change in later)

    def _needed(self) -> Mapping[str, None]:
        """What is to be computed again: what backward reads, and what that is made of; in an order
        that is the same in every process.
        """
        found: dict[str, None] = {}
        waiting = [name for op in self._block.ops[self._seed :] for name in op.inputs]
        while waiting:
            name = waiting.pop()
            if name not in found and self._again(name):
                found[name] = None
                waiting += self._block.ops[self._maker[name]].inputs
        return found

    def _copies(
        self, segment: int, needed: Collection[str], names: Mapping[str, str], written: set[int]
    ) -> Iterator[Op]:
        """The copies of a segment's ops, once; before them those of earlier segments that they
        read.
        """
        if segment in written:
            return
        written.add(segment)
        own = {self._maker[name] for name in needed if self._segment(name) == segment}
        for index in sorted(own):
            op = self._block.ops[index]
            for name in op.inputs:
                if name in needed:
                    yield from self._copies(self._segment(name), needed, names, written)
            outputs = tuple(names.get(name, "") for name in op.outputs)
            yield replace(renamed(op, names), outputs=outputs)


def _seed(block: Block) -> int:
    """The number of the op with which backward begins: ones in the shape of the loss."""
    for index, op in reversed(list(enumerate(block.ops))):
        if op.type == "aten.ones_like" and op.arguments.get("self") == Ref("loss"):
            return index
    raise ValueError(
        "strategy.recompute: expected a program whose backward begins with aten.ones_like(loss), "
        "got one without"
    )


def _is_random(op: Op) -> bool:
    return torch.Tag.nondeterministic_seeded in aten_overload(op.type).tags
