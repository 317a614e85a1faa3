"""Local SGD in a strategy: the settings that contradict it, or need it.

``adaptive_localsgd`` is local SGD, too, with another rule for its averages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from transpiler.strategy.strategy import DistributedStrategy

SWITCHES = ("localsgd", "adaptive_localsgd")

# Settings about the all-reduce of gradients, which local SGD does not have, by kind of job.  In
# programs the rings carry parameters.
_OF_GRADIENTS = ("dgc", "fp16_allreduce", "last_comm_group_size_MB", "find_unused_parameters")
_IN_STEPS = (
    "gradient_scale_configs.scale_strategy",
    "sync_nccl_allreduce",
    "fuse_all_reduce_ops",
    "fuse_grad_size_in_num",
    "nccl_comm_num",
    "use_hierarchical_allreduce",
    "hierarchical_allreduce_inter_nranks",
)
WITHOUT_EFFECT: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "collective": (*_OF_GRADIENTS, *_IN_STEPS),
        "collective_program": _OF_GRADIENTS,
    }
)


def local_sgd_of(strategy: DistributedStrategy) -> str:
    """The switch that asks for local SGD; "" if none does."""
    return next((name for name in SWITCHES if strategy.value(name)), "")


def local_sgd_refusals(strategy: DistributedStrategy, kind: str) -> Iterator[str]:
    """A sentence for each setting that contradicts local SGD, or has no effect with or without it.

    Args:
        kind: of the job, as refusals.py has it.
    """
    if kind not in WITHOUT_EFFECT:  # it is refused by itself
        return
    assigned = strategy.unsupported(())
    if all(strategy.value(name) for name in SWITCHES):
        yield (
            "strategy.localsgd: contradicts strategy.adaptive_localsgd, which finds k_steps by "
            "itself; leave one of them False"
        )
    for name in assigned:
        switch = name.partition("_configs.")[0]
        if switch in SWITCHES and name != switch and not strategy.value(switch):
            yield f"strategy.{name}: has no effect without {switch}=True; leave it at its default"
    given = strategy.localsgd_configs
    if strategy.localsgd and given["k_steps"] == 1 and given["begin_step"] > 1:
        yield (
            f"strategy.localsgd_configs.begin_step: {given['begin_step']} has no effect with "
            "k_steps=1, as every step averages; leave it at its default"
        )
    chosen = local_sgd_of(strategy)
    if chosen and strategy.sync_batch_norm:
        yield (
            f"strategy.sync_batch_norm: contradicts {chosen}=True, with which a trainer has "
            "parameters of its own between two averages; leave one of them False"
        )
    for name in WITHOUT_EFFECT[kind]:
        if chosen and name in assigned:
            yield (
                f"strategy.{name}: has no effect with {chosen}=True, as no gradients travel; leave "
                "it at its default"
            )
