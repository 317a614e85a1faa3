"""Updates of many parameters by few kernels: ``build_strategy["fuse_all_optimizer_ops"]``.

torch has them twice: one kernel for a parameter's whole update ("fused"), or one for each operation
on all parameters ("foreach").  An op's flag says which; rows of tables are updated by kernels of
their own anyway.
"""

from __future__ import annotations

from dataclasses import replace

from transpiler.ir.fusion import fusion_of
from transpiler.ir.graph import Op
from transpiler.ir.ops import is_optimizer
from transpiler.ir.table_ops import updates_rows
from transpiler.rewrites.programs import Programs, Rewrite


def fuse_updates(programs: Programs) -> Programs:
    """The programs with the flag in each optimizer op.

    Raises:
        ValueError: torch has no such kernels for an update rule.
    """
    block = programs.main.main
    ops = tuple(_fused(op) if is_optimizer(op.type) else op for op in block.ops)
    return programs._replace(
        main=programs.main.with_blocks(replace(block, ops=ops), *programs.main.blocks[1:])
    )


def _fused(op: Op) -> Op:
    if updates_rows(op):
        return op
    flag = fusion_of(op.type)
    others = {key: value for key, value in op.arguments.items() if key not in ("foreach", "fused")}
    return replace(op, arguments={**others, flag: True})


FUSED_UPDATES = Rewrite(
    lambda strategy: bool(strategy.build_strategy["fuse_all_optimizer_ops"]),
    lambda programs, strategy: fuse_updates(programs),
)
