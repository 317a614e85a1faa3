"""The exchange of gradients among trainers, by a strategy: one value for every kind of job that has
one.

Eager jobs without servers, the dense parameters of jobs with servers (mode "collective") and
programs without servers read the same switches, here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from transpiler.strategy.strategy import DistributedStrategy

FLOAT16 = "float16"
_SIZES = ("fuse_grad_size_in_MB", "fuse_grad_size_in_num", "last_comm_group_size_MB")


@dataclass(frozen=True, slots=True)
class GradientExchange:
    """The settings of an exchange of gradients.

    Attributes:
        size_mb: the most MB (2**20 bytes) of gradients that are reduced together; a single larger
            gradient is reduced by itself.
        last_mb: the same for the last gradients of a backward, which nothing hides.
        most: the most gradients that are reduced together; 0: any number.
        rings: process groups, which buckets use in turn.
        row: None: all trainers reduce at once.  Otherwise the number of trainers that reduce among
            themselves first; 0 and 1: those of each host.
        dtype: as which gradients of more than 16 bits travel; "" for their own.
        waits: the host waits for each reduction as soon as it has begun.
        unused: a parameter may have no gradient in a step.
    """

    size_mb: float = 25.0
    last_mb: float = 1.0
    most: int = 0
    rings: int = 1
    row: int | None = None
    dtype: str = ""
    waits: bool = False
    unused: bool = False


def exchange_of(strategy: DistributedStrategy | None) -> GradientExchange:
    """The exchange settings of a strategy; the defaults for None."""
    if strategy is None:
        return GradientExchange()
    return GradientExchange(
        size_mb=strategy.fuse_grad_size_in_MB,
        last_mb=strategy.last_comm_group_size_MB,
        most=strategy.fuse_grad_size_in_num if strategy.fuse_all_reduce_ops else 1,
        rings=strategy.nccl_comm_num,
        row=strategy.hierarchical_allreduce_inter_nranks
        if strategy.use_hierarchical_allreduce
        else None,
        dtype=FLOAT16 if strategy.fp16_allreduce else "",
        waits=strategy.sync_nccl_allreduce,
        unused=strategy.find_unused_parameters,
    )


def without_effect(strategy: DistributedStrategy, names: Collection[str]) -> Iterator[str]:
    """A sentence for each of these settings that has no effect because of another switch.

    Args:
        names: of settings that differ from their defaults.
    """
    if "hierarchical_allreduce_inter_nranks" in names and not strategy.use_hierarchical_allreduce:
        yield (
            "strategy.hierarchical_allreduce_inter_nranks: has no effect with "
            "use_hierarchical_allreduce=False: switch it on"
        )
    if not strategy.fuse_all_reduce_ops:
        for name in _SIZES:
            if name in names:
                yield (
                    f"strategy.{name}: has no effect with fuse_all_reduce_ops=False, which reduces "
                    "each gradient by itself: leave one of them out"
                )
