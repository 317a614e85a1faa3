"""Keys that have no effect beside another key of the same strategy, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transpiler.strategy.strategy import DistributedStrategy

_MOVES = ("incr_every_n_steps", "decr_every_n_nan_or_inf", "incr_ratio", "decr_ratio")
_SCALES = ("init_loss_scaling", "use_dynamic_loss_scaling", *_MOVES)


def idle_keys(strategy: DistributedStrategy) -> dict[str, str]:
    """The full names of the keys that have no effect beside the others, with the reason.

    Example:
        >>> strategy = DistributedStrategy()
        >>> strategy.amp_configs = {"incr_ratio": 4.0}
        >>> idle_keys(strategy)
        {'amp_configs.incr_ratio': 'has no effect without amp=True'}
    """
    found: dict[str, str] = {}
    for name in strategy.unsupported(()):
        owner, _, key = name.partition(".")
        if owner != "amp_configs":
            continue
        reason = _idle(key, strategy.amp_configs) if strategy.amp else "without amp=True"
        if reason:
            found[name] = f"has no effect {reason}"
    return found


def _idle(key: str, settings: Mapping[str, Any]) -> str:
    """The reason why a key of ``amp_configs`` has no effect; "" if it has one."""
    if key in _SCALES and settings["use_pure_bf16"]:
        return "with use_pure_bf16=True: bfloat16 gradients need no loss scale"
    if key in _MOVES and not settings["use_dynamic_loss_scaling"]:
        return "with use_dynamic_loss_scaling=False"
    if key == "use_pure_fp16" and settings["use_pure_bf16"]:
        return "with use_pure_bf16=True: set one of the two"
    if key == "use_fp16_guard" and not settings["use_pure_fp16"]:
        return "without use_pure_fp16=True"
    return ""
