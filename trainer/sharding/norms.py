"""Clipping of gradients that lie in pieces on several ranks: the norms are those of the whole
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


def clip_gradients(clip: GradClip, pieces: Shards, device: torch.device) -> None:
    """Clips every piece's gradient in place, as a single node would clip the whole ones; all ranks
    call this.

    Args:
        device: where the group communicates.
    """
    present = [
        (parameter, piece) for parameter, piece in pieces.of.items() if piece.grad is not None
    ]
    if not present:
        return
    with torch.no_grad():
        if isinstance(clip, ClipGradByValue):
            for _, piece in present:
                _gradient(piece).copy_(clip_value(_gradient(piece), clip.min, clip.max))
            return
        norms = _squares(pieces, [parameter for parameter, _ in present], device)
        if isinstance(clip, ClipGradByGlobalNorm):
            norms = pieces.everywhere(norms.sum()).expand_as(norms)
        factors = coefficient_of_norm(norms.sqrt(), clip.clip_norm)
        for (_, piece), factor in zip(present, factors, strict=True):
            _gradient(piece).mul_(factor.to(piece.device, piece.dtype))


def _gradient(piece: nn.Parameter) -> Tensor:
    assert piece.grad is not None
    return piece.grad


def _squares(pieces: Shards, parameters: list[nn.Parameter], device: torch.device) -> Tensor:
    """The square of each whole gradient's 2-norm: 1-D, float32, or float64 where a gradient is."""
    grads = [_gradient(pieces.of[parameter]) for parameter in parameters]
    dtype = torch.float64 if any(grad.dtype == torch.float64 for grad in grads) else torch.float32
    squares = torch.stack(
        [torch.linalg.vector_norm(grad, dtype=dtype).to(device) for grad in grads]
    ).square()
    return pieces.summed(parameters, squares)
