"""Every rewrite that a strategy may ask for, in the order in which they run."""

from __future__ import annotations

from transpiler.rewrites.amp import in_16_bits
from transpiler.rewrites.dgc import DGC
from transpiler.rewrites.rewrites import (
    FUSED_UPDATES,
    SPARSITY,
    UPDATE_RULES,
    Programs,
    Rewrite,
    gradient_merge,
    recompute,
)
from transpiler.strategy.strategy import DistributedStrategy
from transpiler.verify.verify import verify_single_node

REWRITES: tuple[Rewrite, ...] = (
    Rewrite(lambda strategy: strategy.amp, in_16_bits),
    Rewrite(lambda strategy: strategy.recompute, recompute),
    UPDATE_RULES,
    SPARSITY,
    DGC,
    Rewrite(lambda strategy: strategy.gradient_merge, gradient_merge),
    FUSED_UPDATES,  # last, as it asks what rule each update follows
)


def rewritten(programs: Programs, strategy: DistributedStrategy | None) -> Programs:
    """The programs as a strategy asks for them; after each rewrite they are verified.

    Args:
        strategy: None asks for nothing.

    Raises:
        ValueError: a setting does not fit the program; the message names it.
        IllegalProgram: a rewrite made a program that violates an invariant.
    """
    for rewrite in REWRITES:
        if strategy is not None and rewrite.asked(strategy):
            programs = rewrite.apply(programs, strategy)
            for program in programs:
                verify_single_node(program)
    return programs
