"""Shows and clicks as the first two features of a sample."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trainer.nn.labels import check_matrix


def continuous_value_model(input: Tensor, cvm: Tensor, use_cvm: bool = True) -> Tensor:
    """Features that begin with a row's counts of shows and clicks, made ready for a network.

    With ``use_cvm`` the two columns become log(show + 1) and log(click + 1) - log(show + 1);
    without it they are left out.  The gradient of the two columns is ``cvm``, whatever the loss
    says: pushed to a table, it is what the counts of a row are to be increased by.

    It is how embeddings with counters are used for click-through rates in McMahan et al.: Ad Click
    Prediction: a View from the Trenches, KDD 2013 (counts as features), and in PaddlePaddle, where
    the name is from.

    Args:
        input: floats [n, size], size at least 2: shows, clicks, and what was learned.
        cvm: shows and clicks of each sample, floats [n, 2].

    Returns:
        [n, size], or [n, size - 2] without ``use_cvm``.

    Raises:
        ValueError: shapes do not fit.
    """
    check_matrix("continuous_value_model", "input", input)
    if input.shape[1] < 2:
        raise ValueError(
            "continuous_value_model: input: expected shows, clicks and features in each row, got "
            f"{list(input.shape)}"
        )
    if cvm.dim() != 2 or cvm.shape[0] != input.shape[0] or cvm.shape[1] != 2:
        raise ValueError(
            f"continuous_value_model: cvm: expected [{input.shape[0]}, 2], got {list(cvm.shape)}"
        )
    found: Tensor = _Counts.apply(input, cvm.to(input.dtype), use_cvm)  # type: ignore[no-untyped-call]  # torch's own
    return found


class _Counts(torch.autograd.Function):
    """The two columns as logarithms, or none of them; their gradient is given."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, cvm: Tensor, use_cvm: bool) -> Tensor:
        ctx.save_for_backward(cvm)
        ctx.kept = 0 if use_cvm else 2
        if not use_cvm:
            return input[:, 2:].clone()
        show, click = (input[:, :2] + 1).log().chunk(2, 1)
        return torch.cat([show, click - show, input[:, 2:]], 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (cvm,) = ctx.saved_tensors
        return torch.cat([cvm, gradient[:, 2 - ctx.kept :]], 1), None, None


class ContinuousValueModel(nn.Module):
    """:func:`continuous_value_model` as a module."""

    def __init__(self, use_cvm: bool = True) -> None:
        super().__init__()
        self.use_cvm = use_cvm

    def forward(self, input: Tensor, cvm: Tensor) -> Tensor:
        """[n, size] and [n, 2] -> [n, size], or [n, size - 2]."""
        return continuous_value_model(input, cvm, self.use_cvm)
