"""Gradient clipping, with exactly the arithmetic of ``torch.nn.utils``, out of place.

``value`` is ``clip_grad_value_``; ``norm`` is ``clip_grad_norm_`` of each tensor by itself;
``global_norm`` is ``clip_grad_norm_`` of all of them.  The coefficient is ``min(1, max_norm / (norm
+ 1e-6))`` (Pascanu, Mikolov, Bengio: On the difficulty of training recurrent neural networks,
2013), and gradients are multiplied by it even where it is 1, as torch does.

In a program: ``clip`` per gradient; ``clip_by_norm`` per gradient; or ``global_norm_scale`` over
all, then ``scale_by`` for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from transpiler.ir.rules import Clip
from transpiler.ir.sparse_rows import on_rows, rows_of


def _positive(what: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{what}: expected a number, got {type(value).__name__}")
    if math.isnan(value) or value <= 0:
        raise ValueError(f"{what}: expected a number above 0, got {value}")
    return float(value)


class ClipGradByValue:
    """Clips every element of a gradient to [min, max], as ``clip_grad_value_`` does.

    Args:
        max: the largest value.
        min: the smallest value; None is ``-max``.

    Raises:
        TypeError: a bound is not a number.
        ValueError: ``min`` is above ``max``, or ``max`` is not above 0 while ``min`` is not given.

    Example:
        >>> from pserver import ClipGradByValue
        >>> ClipGradByValue(2).min
        -2.0
    """

    def __init__(self, max: float, min: float | None = None) -> None:
        if min is None:
            self.max = _positive("ClipGradByValue: max", max)
            self.min = -self.max
            return
        for what, value in (("max", max), ("min", min)):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(
                    f"ClipGradByValue: {what}: expected a number, got {type(value).__name__}"
                )
        if not min <= max:
            raise ValueError(f"ClipGradByValue: expected min <= max, got min {min} and max {max}")
        self.max, self.min = float(max), float(min)

    def to_clip(self) -> Clip:
        """The same setting as data of a plan."""
        return Clip("value", self.max, self.min)


class ClipGradByNorm:
    """Clips every gradient tensor by itself, as ``clip_grad_norm_`` of that tensor does.

    Args:
        clip_norm: the largest 2-norm of a gradient.

    Raises:
        TypeError: ``clip_norm`` is no number.
        ValueError: ``clip_norm`` is not above 0.

    Example:
        >>> from pserver import ClipGradByNorm
        >>> ClipGradByNorm(1).clip_norm
        1.0
    """

    def __init__(self, clip_norm: float) -> None:
        self.clip_norm = _positive("ClipGradByNorm: clip_norm", clip_norm)

    def to_clip(self) -> Clip:
        """The same setting as data of a plan."""
        return Clip("norm", self.clip_norm)


class ClipGradByGlobalNorm:
    """Clips all gradients together, as ``clip_grad_norm_`` of all of them does.

    Args:
        clip_norm: the largest 2-norm of all gradients together.

    Raises:
        TypeError: ``clip_norm`` is no number.
        ValueError: ``clip_norm`` is not above 0.

    Example:
        >>> from pserver import ClipGradByGlobalNorm
        >>> ClipGradByGlobalNorm(1).clip_norm
        1.0
    """

    def __init__(self, clip_norm: float) -> None:
        self.clip_norm = _positive("ClipGradByGlobalNorm: clip_norm", clip_norm)

    def to_clip(self) -> Clip:
        """The same setting as data of a plan."""
        return Clip("global_norm", self.clip_norm)


GradClip = ClipGradByValue | ClipGradByNorm | ClipGradByGlobalNorm


def clip_value(grad: Tensor, low: float, high: float) -> Tensor:
    """A gradient with every element clamped to [low, high]; any shape, the gradient's dtype."""
    return grad.clamp(min=low, max=high)


def coefficient(grads: Sequence[Tensor], max_norm: float) -> Tensor:
    """``clip_grad_norm_``'s factor for these gradients together: a 0-dim tensor, at most 1."""
    return coefficient_of_norm(get_total_norm(grads), max_norm)


def coefficient_of_norm(norm: Tensor, max_norm: float) -> Tensor:
    """The factor for gradients whose 2-norm is already known."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def scale_by(grad: Tensor, factor: Tensor) -> Tensor:
    """A gradient times the factor, on the gradient's device."""
    return grad * factor.to(grad.device)


def apply(clip: Clip, grads: Sequence[Tensor]) -> list[Tensor]:
    """New gradients, clipped; the given ones stay as they are.

    Raises:
        ValueError: the kind is unknown.
    """
    with torch.no_grad():
        if clip.kind == "value":
            return [clip_value(grad, clip.low, clip.high) for grad in grads]
        if clip.kind == "norm":
            return [scale_by(grad, coefficient([grad], clip.high)) for grad in grads]
        if clip.kind == "global_norm":
            factor = coefficient(grads, clip.high)
            return [scale_by(grad, factor) for grad in grads]
    raise ValueError(f"clip: expected the kind value, norm or global_norm, got {clip.kind!r}")


# The kernels of the clip ops; each is called with its op and the op's arguments by name.
KERNELS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "clip": lambda op, x, min, max: on_rows(lambda rows: clip_value(rows, min, max), x),
        "clip_by_norm": lambda op, x, max_norm: on_rows(
            lambda rows: scale_by(rows, coefficient([rows], max_norm)), x
        ),
        "global_norm_scale": lambda op, x, max_norm: coefficient(list(map(rows_of, x)), max_norm),
        "scale_by": lambda op, x, coefficient: on_rows(lambda rows: scale_by(rows, coefficient), x),
    }
)
