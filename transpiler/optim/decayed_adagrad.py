"""Adagrad whose sum of squares decays, as a ``torch.optim.Optimizer``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class DecayedAdagrad(torch.optim.Optimizer):
    """Adagrad (Duchi et al., JMLR 2011) over a decaying average of squared gradients, so that rates
    do not fall to 0.

    ::

        moment = decay*moment + (1 - decay)*g*g
        w -= lr * g / (sqrt(moment) + eps)

    Example::

        optimizer = DecayedAdagrad(model.parameters(), lr=0.01)

    Args:
        params: float tensors of any shape, or parameter groups.
        lr: the learning rate, 0 or more.
        decay: how much of the average stays at each step, from 0 to below 1.
        eps: added to the root, 0 or more.

    Raises:
        ValueError: an hparam is out of its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 0.001,
        decay: float = 0.95,
        eps: float = 1e-6,
    ) -> None:
        if not float(lr) >= 0:
            raise ValueError(f"lr: expected 0 or more, got {lr}")
        if not 0 <= decay < 1:
            raise ValueError(f"decay: expected a number from 0 to below 1, got {decay}")
        if not eps >= 0:
            raise ValueError(f"eps: expected 0 or more, got {eps}")
        super().__init__(params, {"lr": lr, "decay": decay, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient.

        Args:
            closure: computes the loss and the gradients anew; called first.

        Returns:
            What ``closure`` returned; None without one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state["moment"] = torch.zeros_like(weight)
        moment = state["moment"]
        moment.mul_(group["decay"]).addcmul_(gradient, gradient, value=1 - group["decay"])
        weight.addcdiv_(gradient, moment.sqrt().add_(group["eps"]), value=-float(group["lr"]))
