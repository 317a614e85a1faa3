"""The number of ranks in each direction of parallelism, from all settings of a strategy.

=========  =============================================  ===================================
direction  in ``hybrid_configs``                          and with the switch
=========  =============================================  ===================================
dp         ``dp_degree``                                  ``sharding``: in ``sharding_configs``
mp         ``mp_degree``                                  the same; ``tensor_parallel``:
                                                          ``tensor_parallel_degree``
pp         ``pp_degree``                                  ``sharding``: in ``sharding_configs``
sharding   ``sharding_degree``                            the same
sep        ``sep_degree``
=========  =============================================  ===================================

Two places may name one direction where they name the same number.  With ``sharding=True`` a
``sharding_degree`` that is not assigned is as many ranks as the other directions leave; an assigned
one counts, even if it is 8, its default in ``sharding_configs``.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

from transpiler.strategy.strategy import DistributedStrategy

AXES = ("dp", "pp", "sharding", "sep", "mp")
REST = -1  # a degree: the ranks that the other directions leave

# the switches that divide a model, beside hybrid_configs
DIVIDING = ("sharding", "pipeline", "tensor_parallel")
# by direction: the settings of its degree
_SETTINGS = MappingProxyType(
    {
        "dp": ("hybrid_configs.dp_degree", "sharding_configs.dp_degree"),
        "pp": ("hybrid_configs.pp_degree", "sharding_configs.pp_degree"),
        "sharding": ("hybrid_configs.sharding_degree", "sharding_configs.sharding_degree"),
        "sep": ("hybrid_configs.sep_degree",),
        "mp": (
            "hybrid_configs.mp_degree",
            "sharding_configs.mp_degree",
            "tensor_parallel_configs.tensor_parallel_degree",
        ),
    }
)


def is_divided(strategy: DistributedStrategy) -> bool:
    """Whether a strategy divides a model among trainers without servers."""
    return any(
        name in DIVIDING or name.startswith("hybrid_configs.") for name in strategy.unsupported(())
    )


def degrees_of(strategy: DistributedStrategy) -> dict[str, int]:
    """The number of ranks in each direction; at most one is REST.

    Raises:
        ValueError: two settings name different numbers of one direction.
    """
    found = {axis: _said(strategy, axis) for axis in AXES}
    rest = "sharding" if strategy.sharding and found["sharding"] is None else "dp"
    unset = {axis: REST if axis == rest else 1 for axis in AXES}
    return {axis: unset[axis] if degree is None else degree for axis, degree in found.items()}


def _said(strategy: DistributedStrategy, axis: str) -> int | None:
    said = {
        name: degree
        for name in _SETTINGS[axis]
        if strategy.is_set(name)
        and _is_on(strategy, name)
        and (degree := strategy.value(name)) != REST
    }
    if len(set(said.values())) > 1:
        words = " and ".join(f"strategy.{name}={degree}" for name, degree in said.items())
        raise ValueError(f"{words}: expected one {axis} degree, got two; leave one of them out")
    return next(iter(said.values()), None)


def _is_on(strategy: DistributedStrategy, name: str) -> bool:
    """Whether the switch of a key's dictionary is on; ``hybrid_configs`` has none."""
    switch = name.partition(".")[0].removesuffix("_configs")
    return switch == "hybrid" or bool(getattr(strategy, switch))


def degree_contradictions(strategy: DistributedStrategy) -> Iterator[str]:
    """The settings of a divided job that have no effect, or lack another one.

    Returns:
        A sentence for each of them, which begins with its name; none where all act.
    """
    for name in strategy.unsupported(()):
        owner = name.partition(".")[0]
        switch = owner.removesuffix("_configs")
        if owner in ("sharding_configs", "tensor_parallel_configs") and not _is_on(strategy, name):
            yield f"strategy.{name}: has no effect without {switch}=True"
    try:
        degrees = degrees_of(strategy)
    except ValueError as error:
        yield str(error)
        return
    yield from _of_degrees(strategy, degrees["pp"], degrees["mp"])
    if strategy.sharding:
        yield from _of_sharding(strategy, degrees["pp"])


def _of_degrees(strategy: DistributedStrategy, pp: int, mp: int) -> Iterator[str]:
    if pp == 1 and any(name.startswith("pipeline_configs") for name in strategy.unsupported(())):
        yield "strategy.pipeline_configs: has an effect with a pp_degree above 1 only"
    if strategy.pipeline and pp == 1:
        yield (
            "strategy.pipeline: expected a pp_degree above 1, which is the number of stages, got "
            f"{_got(strategy, 'pp')}; set hybrid_configs['pp_degree']"
        )
    if strategy.tensor_parallel and mp == 1:
        yield (
            "strategy.tensor_parallel: expected a tensor_parallel_degree above 1, which is the "
            f"number of parts of a layer, got {_got(strategy, 'mp')}; set "
            "tensor_parallel_configs['tensor_parallel_degree'], or hybrid_configs['mp_degree']"
        )


def _got(strategy: DistributedStrategy, axis: str) -> str:
    degree = _said(strategy, axis)
    return "none" if degree is None else str(degree)


def _of_sharding(strategy: DistributedStrategy, pp: int) -> Iterator[str]:
    configs = strategy.sharding_configs
    if configs["pp_degree"] > 1 and not strategy.pipeline:
        yield "strategy.sharding_configs.pp_degree: has no effect without pipeline=True"
    by_anchors = configs["sharding_segment_strategy"] == "segment_anchors"
    if by_anchors and not configs["segment_anchors"]:
        yield (
            "strategy.sharding_configs.sharding_segment_strategy='segment_anchors': expected "
            "segment_anchors, the names of the modules that begin a segment, got none"
        )
    idle = "segment_broadcast_MB" if by_anchors else "segment_anchors"
    if f"sharding_configs.{idle}" in strategy.unsupported(()):
        yield (
            f"strategy.sharding_configs.{idle}: has no effect with sharding_segment_strategy="
            f"{configs['sharding_segment_strategy']!r}"
        )
    steps = configs["gradient_merge_acc_step"]
    if steps > 1 and pp > 1:
        yield (
            f"strategy.sharding_configs.gradient_merge_acc_step={steps}: a pipeline merges the "
            "gradients of the micro batches of one update; leave it at its default, and set "
            "pipeline_configs['accumulate_steps']"
        )
    if configs["pp_allreduce_in_optimize"] and strategy.fp16_allreduce:
        yield (
            "strategy.sharding_configs.pp_allreduce_in_optimize and strategy.fp16_allreduce: the "
            "update reduces gradients in their own dtype; leave one of them out"
        )
    if steps > 1 and strategy.gradient_merge:
        yield (
            f"strategy.sharding_configs.gradient_merge_acc_step={steps} and "
            "strategy.gradient_merge: both merge the gradients of several steps; set one of them"
        )
