"""Means of gradients over ranks with different samples, and sharding over these ranks, by FSDP2."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from trainer.sharding.units import divide, segments_by_anchors, segments_by_size, units_of
from transpiler.strategy.strategy import DistributedStrategy


def average_in_backward(
    part: nn.Module, mesh: DeviceMesh, strategy: DistributedStrategy, anchors: tuple[str, ...]
) -> list[nn.Module]:
    """Makes backward average gradients over replicas and shards; everything is sharded in the
    "sharding" direction.  With ``pp_allreduce_in_optimize`` the mean over replicas is left to the
    update.  With ``fp16_allreduce`` gradients travel as float16; FSDP2 divides them before and
    after their sum, so that it rarely overflows.

    Args:
        part: this rank's part of the model.
        mesh: ("pp", "replicas", "sharding", "mp").
        anchors: the modules that begin a segment.

    Returns:
        The modules whose gradients are reduced in backward, the outermost one first.
    """
    replicas, shards = mesh["replicas"].size(), mesh["sharding"].size()
    if strategy.sharding_configs["pp_allreduce_in_optimize"]:
        replicas = 1
    if replicas * shards == 1:
        return []
    over = mesh["replicas", "sharding"] if replicas > 1 else mesh["sharding"]
    segments = _segments(part, strategy, anchors)
    travels = MixedPrecisionPolicy(reduce_dtype=torch.float16 if strategy.fp16_allreduce else None)
    return divide(part, segments, over, reshard_after_forward=shards > 1, mp_policy=travels)


def _segments(
    part: nn.Module, strategy: DistributedStrategy, anchors: tuple[str, ...]
) -> list[list[nn.Module]]:
    parameters, configs = set(part.parameters()), strategy.sharding_configs
    if not strategy.sharding:
        return [[unit] for unit in units_of(part, parameters)]
    if configs["sharding_segment_strategy"] == "segment_anchors":
        return segments_by_anchors(part, parameters, anchors)
    return segments_by_size(part, parameters, configs["segment_broadcast_MB"])
