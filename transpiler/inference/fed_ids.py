"""The lookups of a program whose ids follow from its feed, which can be made before it runs.

Ids follow from the feed if plain ops compute them from inputs, constants, and buffers that no step
changes.  Ops that draw random numbers, or change what the feed or the program holds, would do so
twice; parameters and rows are others when the step comes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from transpiler.inference.inference import needed
from transpiler.ir.aten_ops import CHECKS
from transpiler.ir.effects import Aliases, changed
from transpiler.ir.graph import PERSISTENT, Argument, Block, Op, Role, refs
from transpiler.ir.ops import aten_overload
from transpiler.ir.table_ops import LOOKUPS, table_name


@dataclass(frozen=True, slots=True)
class ProgramLookup:
    """One lookup of a program, in one table.

    Attributes:
        table: its name.
        ids: the variables that have them.
        padding_idx: of the op that has one.
        split: whether each server's ids are asked for together, by ``split_ids``.
    """

    table: str
    ids: tuple[str, ...]
    padding_idx: Argument
    split: bool


@dataclass(frozen=True, slots=True)
class FedLookups:
    """The lookups whose ids follow from a feed.

    Attributes:
        ops: that compute the ids.
        lookups: in the program's order.
    """

    ops: tuple[Op, ...]
    lookups: tuple[ProgramLookup, ...]

    @classmethod
    def of(cls, main: Block) -> FedLookups:
        """Those of block 0 of a program."""
        found = tuple(each for each in lookups_of(main) if not _unfed(main, each))
        return cls(tuple(_computing(main, [name for each in found for name in each.ids])), found)


def check_fed(mains: Iterable[Block], tables: Sequence[str]) -> None:
    """Checks that some ids of these tables follow from the feed of these programs.

    Args:
        mains: their blocks 0.
        tables: names.

    Raises:
        ValueError: none do; the message has the reason.
    """
    reasons = [
        (each.table, _unfed(main, each))
        for main in mains
        for each in lookups_of(main)
        if each.table in tables
    ]
    if reasons and all(reason for _, reason in reasons):
        name, reason = reasons[0]
        raise ValueError(
            "look_ahead: expected ids that follow from a program's feed, got those of table "
            f"{name!r}, which {reason}: set look_ahead to 0"
        )


def lookups_of(main: Block) -> Iterator[ProgramLookup]:
    """The lookups of block 0 of a program, a trainer's or a single-node one."""
    makers = {name: op for op in main.ops for name in op.outputs}
    for op in main.ops:
        if op.type in ("lookup_table", "distributed_lookup_table"):
            ids = tuple(refs(op.arguments["ids"]))
            yield ProgramLookup(table_name(op), ids, op.arguments.get("padding_idx"), False)
        elif op.type == "prefetch":
            tables, parts = list(refs(op.arguments["w"])), list(refs(op.arguments["ids"]))
            for table, part in zip(tables, parts[:: len(parts) // len(tables)], strict=True):
                split = makers[part]
                ids = tuple(refs(split.arguments["x"]))
                yield ProgramLookup(table, ids, split.arguments.get("padding_idx"), True)


def _computing(main: Block, names: Sequence[str]) -> list[Op]:
    """The ops that variables come from, without those that only check them."""
    return [op for op in needed(main.ops, names) if op.type not in CHECKS]


def _unfed(main: Block, lookup: ProgramLookup) -> str:
    """The reason why a lookup's ids do not follow from the feed; "": they do."""
    ops, memory = _computing(main, lookup.ids), Aliases(main.ops)
    kept = {
        memory.of(v.name): v.name
        for v in main.variables.values()
        if v.role is Role.INPUT or v.role in PERSISTENT
    }
    for op in ops:
        if op.type in LOOKUPS or op.type == "merge_ids":
            return "come from rows"
        if not _is_plain(op):
            return f"come from the op {op.type}"
        if torch.Tag.nondeterministic_seeded in _tags(op):
            return f"are drawn at random, by {op.type}"
        for name in changed(op):
            if memory.of(name) in kept:
                return f"come from {kept[memory.of(name)]!r}, which {op.type} changes"
    for name in dict.fromkeys((*lookup.ids, *(name for op in ops for name in op.inputs))):
        role = main.variables[name].role
        if role is Role.BUFFER and not _is_written(main, memory, name):
            continue
        if role in PERSISTENT:
            return f"come from {name!r}, which steps change"
    return ""


def _is_plain(op: Op) -> bool:
    return op.type.startswith(("aten.", "sym.")) or op.type in ("assign", "assign_value")


def _tags(op: Op) -> Sequence[torch.Tag]:
    return aten_overload(op.type).tags if op.type.startswith("aten.") else ()


def _is_written(main: Block, memory: Aliases, name: str) -> bool:
    """Whether ops of the block change a persistent variable."""
    return any(
        name in op.outputs or memory.of(name) in map(memory.of, changed(op)) for op in main.ops
    )
