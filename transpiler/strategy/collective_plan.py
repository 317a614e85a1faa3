"""The plan of trainers without servers, from a configuration and a strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transpiler.distribute_config import DistributeTranspilerConfig
from transpiler.plan.modes import GRAD_ALLREDUCE, LOCAL_SGD, NCCL2, Payload
from transpiler.plan.plan import Collective, row_length
from transpiler.strategy.exchange import exchange_of
from transpiler.strategy.local_sgd import local_sgd_of
from transpiler.strategy.strategy import DistributedStrategy

MB = 2**20
# the settings that sums of several gradients read
_IN_BUCKETS = (
    "fp16_allreduce",
    "fuse_all_reduce_ops",
    "fuse_grad_size_in_MB",
    "fuse_grad_size_in_num",
    "last_comm_group_size_MB",
    "sync_nccl_allreduce",
)
_SHARED = ("nccl_comm_num", "use_hierarchical_allreduce", "hierarchical_allreduce_inter_nranks")


def collective_of(
    config: DistributeTranspilerConfig,
    endpoints: Sequence[str],
    strategy: DistributedStrategy | None = None,
) -> Collective:
    """The settings of trainers without servers, by a configuration and, if given, a strategy.

    Args:
        endpoints: of the trainers.
        strategy: with which the configuration agrees.

    Raises:
        ValueError: the trainers cannot be divided into groups of the configured size, the two
            contradict each other, a setting has no effect in the configured mode, or updates cannot
            be sharded in it.
    """
    config = agreed(config, strategy)
    mode = config.collective_mode or NCCL2.name
    values = {name: getattr(config, name) for name in _SHARED}
    if strategy is not None:
        values = _assigned(config, strategy)
    inner = (
        row_length(values["hierarchical_allreduce_inter_nranks"], endpoints)
        if values["use_hierarchical_allreduce"]
        else 0
    )
    made = Collective(mode, values["nccl_comm_num"], inner, steps=max(1, config.k_steps))
    if strategy is None:
        return made
    if made.kind.averages is Payload.PARAMETERS:
        _check_gradients_travel(strategy, mode)
    exchange = exchange_of(strategy)
    return replace(
        made,
        bucket_bytes=int(exchange.size_mb * MB),
        last_bytes=int(exchange.last_mb * MB),
        most=exchange.most,
        dtype=exchange.dtype,
        waits=exchange.waits,
        sharded=_shards(strategy, mode, inner, len(endpoints)),
        gradient_scale=strategy.gradient_scale_configs["scale_strategy"],
        **_averages(strategy),
    )


def _check_gradients_travel(strategy: DistributedStrategy, mode: str) -> None:
    """Raises ValueError for a setting about shared gradients, where trainers share parameters."""
    if strategy.gradient_scale_configs["scale_strategy"] != "avg":
        raise ValueError(
            "strategy.gradient_scale_configs.scale_strategy: has no effect with "
            f"collective_mode={mode!r}, which shares no gradients; leave it at its default"
        )
    if strategy.fp16_allreduce:
        raise ValueError(
            f"strategy.fp16_allreduce: acts on gradients, and collective_mode={mode!r} averages "
            "parameters: leave one of them out"
        )


def _averages(strategy: DistributedStrategy) -> dict[str, Any]:
    """The fields about when parameters are averaged, if a strategy sets them."""
    if strategy.localsgd:
        steps, begin = (strategy.localsgd_configs[key] for key in ("k_steps", "begin_step"))
        return {"steps": steps, "begin": 0 if steps == 1 else begin}
    if strategy.adaptive_localsgd:
        given = strategy.adaptive_localsgd_configs
        return {"steps": given["init_k_steps"], "begin": given["begin_step"], "adaptive": True}
    return {}


def agreed(
    config: DistributeTranspilerConfig, strategy: DistributedStrategy | None
) -> DistributeTranspilerConfig:
    """The configuration; in a mode without servers with the strategy's choices.

    Raises:
        ValueError: the two contradict each other; the message names both.
    """
    # another type than a strategy's is refused later, and a strategy among servers
    if not isinstance(strategy, DistributedStrategy) or config.has_servers:
        return config
    if not (chosen := local_sgd_of(strategy)):
        return config
    found = []
    if config.mode != "collective":
        found.append(
            f"mode={config.mode!r} contradicts strategy.{chosen}=True, which averages in the "
            "program itself: set mode='collective'"
        )
    if config.collective_mode not in (None, LOCAL_SGD.name):
        found.append(
            f"collective_mode={config.collective_mode!r} contradicts strategy.{chosen}=True, which "
            f"is {LOCAL_SGD.name!r}: leave one of them out"
        )
    key = "k_steps" if chosen == "localsgd" else "init_k_steps"
    steps = strategy.value(f"{chosen}_configs.{key}")
    if config.is_set("k_steps") and config.k_steps != steps:
        found.append(
            f"k_steps={config.k_steps} contradicts strategy.{chosen}_configs[{key!r}]={steps}: "
            "leave one of them out"
        )
    if found:
        raise ValueError("; ".join(found))
    fields = {**vars(config), "collective_mode": LOCAL_SGD.name}
    return DistributeTranspilerConfig(**fields)


def _shards(strategy: DistributedStrategy, mode: str, inner: int, trainers: int) -> bool:
    """Whether a strategy asks for updates that are sharded over the trainers.

    Raises:
        ValueError: it does so in a mode that has no such programs, or for some of the trainers.
    """
    name = "sharding_configs.sharding_degree"
    degree = strategy.value(name) if strategy.is_set(name) else trainers
    if not strategy.sharding:
        if strategy.is_set(name):
            raise ValueError(f"strategy.{name}: has no effect without sharding=True")
        return False
    if mode != GRAD_ALLREDUCE.name:
        raise ValueError(
            "strategy.sharding: expected collective_mode='grad_allreduce', whose gradients can be "
            f"summed on one trainer, got the mode {mode!r}"
        )
    if inner:
        raise ValueError(
            "use_hierarchical_allreduce: has no effect with strategy.sharding, which sums each "
            "gradient on one trainer; leave one of them out"
        )
    if strategy.amp and not strategy.amp_configs["use_pure_bf16"]:
        raise ValueError(
            "strategy.amp: float16 has no effect with strategy.sharding in a program, where no "
            "trainer has all gradients to check for an overflow; set "
            "amp_configs['use_pure_bf16'], or leave one of the two off"
        )
    if odd := [each for each in _IN_BUCKETS if each in strategy.unsupported(())]:
        raise ValueError(
            f"strategy.{', strategy.'.join(odd)}: has no effect with strategy.sharding, which sums "
            "each gradient by itself, on the trainer that updates its parameter; leave one of them "
            "out"
        )
    if degree not in (1, trainers):
        raise ValueError(
            f"strategy.{name}={degree}: expected the {trainers} trainers of the program, or 1 (no "
            "sharding); leave it out for all of them"
        )
    return not strategy.is_set(name) or degree > 1


def _assigned(config: DistributeTranspilerConfig, strategy: DistributedStrategy) -> dict[str, Any]:
    """The settings that both have, each from the one that it was assigned to."""
    for name in _SHARED:
        own, other = getattr(config, name), strategy.value(name)
        if config.is_set(name) and strategy.is_set(name) and own != other:
            raise ValueError(
                f"{name}={own!r} contradicts strategy.{name}={other!r}: leave one of them out"
            )
    return {
        name: strategy.value(name) if strategy.is_set(name) else getattr(config, name)
        for name in _SHARED
    }
