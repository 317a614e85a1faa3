"""Clipping on a trainer: its own gradients, in place."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from transpiler.clip import ClipGradByValue, GradClip, apply


def clip_in_place(
    clip: GradClip | None, gradients: Mapping[Tensor, Tensor], named: Collection[Tensor]
) -> None:
    """Clips the gradients of a step together.

    Args:
        clip: None: nothing is clipped.
        gradients: by parameter.
        named: the parameters among them that are dense; a table's proxy stands for its rows, each
            of which clipping by value clamps.
    """
    clipped = dict(gradients)
    if isinstance(clip, ClipGradByValue):
        for parameter in [p for p in gradients if p not in named]:
            clipped.pop(parameter).clamp_(clip.min, clip.max)
    if clip is not None and clipped:
        results = apply(clip.to_clip(), list(clipped.values()))
        for gradient, result in zip(clipped.values(), results, strict=True):
            gradient.copy_(result)
