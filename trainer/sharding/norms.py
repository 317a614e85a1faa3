"""Clipping of gradients that lie in shards on several ranks: the norms are those of the whole
tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainer.sharding.shards import Shards
from transpiler.clip import (
    ClipGradByGlobalNorm,
    ClipGradByValue,
    GradClip,
    clip_value,
    coefficient_of_norm,
)


def clip_gradients(clip: GradClip, shards: Shards, device: torch.device) -> None:
    """Clips every shard's gradient in place, as a single node would clip the whole ones; all ranks
    call this.

    Args:
        device: where the group communicates.
    """
    present = [
        (parameter, shard) for parameter, shard in shards.of.items() if shard.grad is not None
    ]
    if not present:
        return
    with torch.no_grad():
        if isinstance(clip, ClipGradByValue):
            for _, shard in present:
                _gradient(shard).copy_(clip_value(_gradient(shard), clip.min, clip.max))
            return
        norms = _squares(shards, [parameter for parameter, _ in present], device)
        if isinstance(clip, ClipGradByGlobalNorm):
            norms = shards.everywhere(norms.sum()).expand_as(norms)
        factors = coefficient_of_norm(norms.sqrt(), clip.clip_norm)
        for (_, shard), factor in zip(present, factors, strict=True):
            _gradient(shard).mul_(factor.to(shard.device, shard.dtype))


def _gradient(shard: nn.Parameter) -> Tensor:
    assert shard.grad is not None
    return shard.grad


def _squares(shards: Shards, parameters: list[nn.Parameter], device: torch.device) -> Tensor:
    """The square of each whole gradient's 2-norm: 1-D, float32, or float64 where a gradient is."""
    grads = [_gradient(shards.of[parameter]) for parameter in parameters]
    dtype = torch.float64 if any(grad.dtype == torch.float64 for grad in grads) else torch.float32
    squares = torch.stack(
        [torch.linalg.vector_norm(grad, dtype=dtype).to(device) for grad in grads]
    ).square()
    return shards.summed(parameters, squares)
