"""LAMB, Adam with layer-wise adaptive rates, as a ``torch.optim.Optimizer``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from transpiler.optim.following import Group, LayerWiseOptimizer


class LAMB(LayerWiseOptimizer):
    """Adam whose step is scaled tensor by tensor, for large batches: You et al., "Large Batch
    Optimization for Deep Learning: Training BERT in 76 minutes" (arXiv 1904.00962), algorithm 2.

    ::

        m = beta1*m + (1 - beta1)*g
        v = beta2*v + (1 - beta2)*g*g
        r = (m / (1 - beta1**t)) / (sqrt(v / (1 - beta2**t)) + eps) + weight_decay*w
        w -= lr * |w| / |r| * r

    |.| is the 2-norm of the whole tensor.  Where one of the norms is 0, their ratio counts as 1.  A
    group with ``weight_decay=0`` keeps its ratio, as in the paper, which excludes no tensor.

    Example::

        optimizer = LAMB(model.parameters(), lr=0.01)

    Args:
        params: float tensors of any shape, or parameter groups.
        lr: the learning rate, 0 or more.
        betas: how much of the two moments stays at each step, from 0 to below 1.
        eps: added to the root, 0 or more.
        weight_decay: 0 or more.

    Raises:
        ValueError: an hparam is out of its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas: expected numbers from 0 to below 1, got {betas}")
        for name, value in (("lr", float(lr)), ("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"{name}: expected 0 or more, got {value}")
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    def _update(self, weights: list[Tensor], gradients: list[Tensor], group: Group) -> None:
        pairs = zip(weights, gradients, strict=True)
        changes = [self._change(weight, gradient, group) for weight, gradient in pairs]
        ours, theirs = self._norms(weights, weights, changes)
        for weight, change, own, other in zip(weights, changes, ours, theirs, strict=True):
            ratio = torch.where((own > 0) & (other > 0), own / other, 1.0)
            weight.sub_(change.mul_(ratio * float(group["lr"])))

    def _change(self, weight: Tensor, gradient: Tensor, group: Group) -> Tensor:
        """The step before it is scaled, in memory of its own; moves the moments."""
        first, second = group["betas"]
        state = self._held(weight, "exp_avg", "exp_avg_sq", scalar="step")
        state["step"] += 1
        count = float(state["step"])
        state["exp_avg"].mul_(first).add_(gradient, alpha=1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        root = (state["exp_avg_sq"] / (1 - second**count)).sqrt_().add_(group["eps"])
        change: Tensor = (state["exp_avg"] / (1 - first**count)).div_(root)
        return change.add_(weight, alpha=group["weight_decay"])
