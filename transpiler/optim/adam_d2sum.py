"""Adam's rule of Paddle's parameter servers, as a ``torch.optim.Optimizer``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from transpiler.optim.following import FollowingOptimizer, Group


class AdamD2Sum(FollowingOptimizer):
    """A velocity, scaled by decaying sums of squares and of steps: the rule that the dense tables
    of Paddle's parameter servers call ``adam_d2sum``
    (paddle/fluid/distributed/ps/table/depends/dense.h, ``DAdamD2Sum``).

    ::

        d2sum = ada_decay*d2sum + 1
        g2sum = ada_decay*g2sum + g*g
        v = momentum*v - (1 - momentum)*g
        w += lr * v * sqrt((d2sum + eps*d2sum) / (g2sum + eps*d2sum))

    It is Adam without bias correction: g2sum / d2sum is the average square, and is unbiased by
    itself.  The defaults are those that Paddle's servers are given.

    Example::

        optimizer = AdamD2Sum(model.parameters(), lr=0.001)

    Args:
        params: float tensors of any shape, or parameter groups.
        lr: the learning rate, 0 or more.
        momentum: how much of the velocity stays at each step, from 0 to below 1.
        ada_decay: how much of the sums stays at each step, from 0 to below 1.
        eps: added to the average square, above 0.

    Raises:
        ValueError: an hparam is out of its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 0.001,
        momentum: float = 0.99,
        ada_decay: float = 0.9999,
        eps: float = 1e-8,
    ) -> None:
        if not float(lr) >= 0:
            raise ValueError(f"lr: expected 0 or more, got {lr}")
        if not eps > 0:
            raise ValueError(f"eps: expected a number above 0, got {eps}")
        for name, value in (("momentum", momentum), ("ada_decay", ada_decay)):
            if not 0 <= value < 1:
                raise ValueError(f"{name}: expected a number from 0 to below 1, got {value}")
        super().__init__(
            params, {"lr": lr, "momentum": momentum, "ada_decay": ada_decay, "eps": eps}
        )

    def _update(self, weights: list[Tensor], gradients: list[Tensor], group: Group) -> None:
        decay, keeps, eps = group["ada_decay"], group["momentum"], group["eps"]
        for weight, gradient in zip(weights, gradients, strict=True):
            state = self._held(weight, "velocity", "g2sum", scalar="d2sum")
            # Paddle keeps it for each element, where it is the same
            count = float(state["d2sum"].mul_(decay).add_(1))
            state["g2sum"].mul_(decay).addcmul_(gradient, gradient)
            state["velocity"].mul_(keeps).sub_(gradient, alpha=1 - keeps)
            scale = (state["g2sum"] + eps * count).reciprocal_().mul_(count + eps * count).sqrt_()
            weight.addcmul_(state["velocity"], scale, value=float(group["lr"]))
