"""LARS, layer-wise adaptive rate scaling, as a ``torch.optim.Optimizer``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from transpiler.optim.following import Group, LayerWiseOptimizer


class LARS(LayerWiseOptimizer):
    """Momentum whose rate is scaled tensor by tensor, for large batches: You, Gitman and Ginsburg,
    "Large Batch Training of Convolutional Networks" (arXiv 1708.03888), algorithm 1.

    ::

        rate = lr * lars_coeff * |w| / (|g| + weight_decay*|w| + eps)
        v = momentum*v + rate * (g + weight_decay*w)
        w -= v

    |.| is the 2-norm of the whole tensor.  Where ``weight_decay`` is 0, or one of the norms is, the
    rate is ``lr``: plain momentum.  So a group with ``weight_decay=0``, of biases or of what batch
    norm learns, is left out of the scaling too.

    Example::

        optimizer = LARS(model.parameters(), lr=0.1)

    Args:
        params: float tensors of any shape, or parameter groups.
        lr: the learning rate, 0 or more.
        momentum: how much of the velocity stays at each step, from 0 to below 1.
        lars_coeff: the paper's trust coefficient, above 0.
        weight_decay: 0 or more.
        eps: added to the denominator, 0 or more.

    Raises:
        ValueError: an hparam is out of its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 0.001,
        momentum: float = 0.9,
        lars_coeff: float = 0.001,
        weight_decay: float = 0.0005,
        eps: float = 0.0,
    ) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum: expected a number from 0 to below 1, got {momentum}")
        if not lars_coeff > 0:
            raise ValueError(f"lars_coeff: expected a number above 0, got {lars_coeff}")
        for name, value in (("lr", float(lr)), ("weight_decay", weight_decay), ("eps", eps)):
            if not value >= 0:
                raise ValueError(f"{name}: expected 0 or more, got {value}")
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "lars_coeff": lars_coeff,
                "weight_decay": weight_decay,
                "eps": eps,
            },
        )

    def _update(self, weights: list[Tensor], gradients: list[Tensor], group: Group) -> None:
        rate, decay = float(group["lr"]), group["weight_decay"]
        rates: list[Any] = [rate] * len(weights)
        if decay > 0:
            ours, theirs = self._norms(weights, weights, gradients)
            rates = [
                self._rate(rate, weight, gradient, group)
                for weight, gradient in zip(ours, theirs, strict=True)
            ]
        for weight, gradient, own in zip(weights, gradients, rates, strict=True):
            velocity = self._held(weight, "momentum_buffer")["momentum_buffer"]
            change = gradient if decay == 0 else gradient.add(weight, alpha=decay)
            velocity.mul_(group["momentum"]).add_(change * own)
            weight.sub_(velocity)

    def _rate(self, rate: float, weight: Tensor, gradient: Tensor, group: Group) -> Tensor:
        """The rate of one tensor, by the norms of the weight and of the gradient."""
        lower = gradient + group["weight_decay"] * weight + group["eps"]
        scaled = rate * group["lars_coeff"] * weight / lower
        return torch.where((weight > 0) & (gradient > 0), scaled, rate)
