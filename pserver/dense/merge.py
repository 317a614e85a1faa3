"""The merged gradient of a sync update: the mean over trainers, and clipping coefficients.

[Note: merge order]  Floating-point sums depend on their order.  A server sums gradients in the
order of their trainers, not of their arrival, and then divides by the number of trainers that
committed the step.  So a run repeats to the bit; and a parameter for which a trainer has no
gradient counts as zero there, as it would in the gradient of the concatenated batch.

[Note: sums of halves]  Gradients of bfloat16 or float16 are summed in float32, and rounded once.
Summed in their own dtype they would be rounded once for each further trainer and once more by the
division: a relative error (root mean square) of 0.0025 with 4 trainers in bfloat16 and 0.0031 with
8, instead of 0.0017 with any number; and a sum of float16 may overflow where the mean does not.
With two trainers nothing changes in bfloat16: one sum is rounded once either way, and halving is
exact.  It costs no time: a chunk's sum stays in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from pserver.dense.slice_optimizer import CHUNK
from transpiler.ir.rules import Clip

CLIP_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


def mean(gradients: Sequence[torch.Tensor], committed: int, averages: bool = True) -> torch.Tensor:
    """The sum of the gradients, in the order given, divided by the number of trainers that
    committed.

    Args:
        gradients: at least one contiguous tensor, all of one shape and dtype, in trainer order.
            The first one is overwritten.
        committed: trainers that committed the step, with or without this gradient.
        averages: False leaves the sum as it is.

    Returns:
        The first tensor, which now holds the result.
    """
    if committed > 1:
        chunks = (
            [gradient] if gradient.numel() <= CHUNK else torch.split(gradient.view(-1), CHUNK)
            for gradient in gradients
        )
        half = gradients[0].dtype in (torch.bfloat16, torch.float16)
        # a chunk stays in the cache from one operation to the next
        for first, *others in zip(*chunks, strict=True):
            total = first.float() if half else first  # see [Note: sums of halves]
            for other in others:
                total.add_(other)
            if averages:
                total.mul_(1.0 / committed)
            if half:
                first.copy_(total)
    return gradients[0]


def squared_norm(gradient: torch.Tensor) -> float:
    """The sum of squares, in double precision."""
    return float(torch.linalg.vector_norm(gradient, dtype=torch.float64).item()) ** 2


def clip_coefficients(clip: Clip, parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The factors that clip merged gradients, from the servers' partial squared norms.

    Args:
        clip: ``"norm"`` or ``"global_norm"``.
        parts: for each server, by server index: parameter name -> sum of squares over the slices
            that it holds.

    Returns:
        A coefficient <= 1 for each parameter name; for the global norm one under the name ``""``.
    """
    squared: dict[str, float] = {}
    for part in parts:
        for name in sorted(part):
            squared[name] = squared.get(name, 0.0) + part[name]
    if clip.kind == "global_norm":
        squared = {"": math.fsum(squared[name] for name in sorted(squared))}
    return {
        name: min(1.0, clip.high / (math.sqrt(value) + CLIP_EPSILON))
        for name, value in squared.items()
    }
