"""Settings of a strategy by their full names: how to read and assign each, and another value than
its default.
"""

from __future__ import annotations

from typing import Any

from transpiler import DistributedStrategy
from transpiler.plan.settings import Setting


def read(strategy: DistributedStrategy, name: str) -> Any:
    owner, _, key = name.rpartition(".")
    return getattr(strategy, owner)[key] if owner else getattr(strategy, name)


def assign(strategy: DistributedStrategy, name: str, value: Any) -> None:
    owner, _, key = name.rpartition(".")
    setattr(strategy, owner or name, {key: value} if owner else value)


def other(name: str, setting: Setting) -> Any:
    """A valid value that is not the default."""
    special = {
        "a_sync_configs.merge": "mean",
        "a_sync_configs.nonfinite": "stop",
        "a_sync_configs.outlier_push": "stop",
        "a_sync_configs.outlier_factor": 1e6,
        "a_sync_configs.lost_trainer": "stop",
        "a_sync_configs.buffers": "mean",
        "a_sync_configs.launch_barrier": False,
        "a_sync_configs.staleness": 0,
        "a_sync_configs.outer_optimizer": {"type": "nesterov", "lr": 0.7, "momentum": 0.9},
        "a_sync_configs.modes": {"emb.*": "async", "*": "sync"},
        "gradient_scale_configs.scale_strategy": "sum",
        "sharding_configs.sharding_segment_strategy": "segment_anchors",
        "pipeline_configs.schedule_mode": "F-then-B",
        "hybrid_configs.order": ["mp", "sep", "sharding", "pp", "dp"],
        "dgc_configs.sparsity": [0.75, 0.9],
        "recompute_configs.checkpoints": ["0"],
        "recompute_configs.checkpoint_shape": [100, 512],
        "amp_configs.decr_ratio": 0.25,
        "amp_configs.custom_white_list": ["softmax", "conv2d"],
        "amp_configs.custom_black_list": ["matmul"],
        "amp_configs.custom_black_varnames": ["0.weight", "1.bias"],
        "fs_client_param.uri": "ftp://host/folder",
    }
    if name in special:
        return special[name]
    default = setting.default
    if isinstance(default, bool):
        return not default
    if isinstance(default, str):
        return "something"
    return ["a", "b"] if isinstance(default, tuple) else type(default)(default + 2)
