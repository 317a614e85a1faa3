"""The optimizer states of a server's slices, as its program names them."""

from __future__ import annotations

from collections.abc import Sequence

from transpiler.ir.graph import Block, Ref
from transpiler.ir.rules import is_dense
from transpiler.ir.table_ops import updates_rows


def slice_states(blocks: Sequence[Block]) -> dict[str, dict[str, str]]:
    """The variables of a pserver program's optimizer states.

    Args:
        blocks: of the program.

    Returns:
        Slice name -> state name -> variable name.
    """
    found: dict[str, dict[str, str]] = {}
    for op in (
        op for block in blocks[1:] for op in block.ops if is_dense(op.type) and not updates_rows(op)
    ):
        refs = {key: value.name for key, value in op.arguments.items() if isinstance(value, Ref)}
        param = refs.pop("param")
        found[param] = {key: name for key, name in refs.items() if key != "grad"}
    return found
