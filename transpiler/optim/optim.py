"""FTRL-Proximal as a ``torch.optim.Optimizer``: sparse weights for linear models, one learning rate
per coordinate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class Ftrl(torch.optim.Optimizer):
    """Follow the regularized leader, the per-coordinate form of McMahan et al., "Ad Click
    Prediction: a View from the Trenches" (KDD 2013), algorithm 1.

    With q = -lr_power, n the sum of squared gradients and z the linear term of a coordinate::

        sigma = ((n + g*g)**q - n**q) / lr
        z += g - sigma*w
        n += g*g
        w = 0 if |z| <= l1 else -(z - sign(z)*l1) / ((beta + n**q)/lr + l2)

    A coordinate keeps its initial value until its first gradient other than zero.

    Example::

        optimizer = Ftrl(model.parameters(), lr=0.1, l1=0.01)

    Args:
        params: float tensors of any shape, or parameter groups.
        lr: the paper's alpha, above 0.
        l1: the strength of L1 regularisation, 0 or more.
        l2: the strength of L2 regularisation, 0 or more.
        lr_power: at most 0; -0.5 is the paper's rule.
        beta: smooths the first steps' rates, 0 or more.

    Raises:
        ValueError: an hparam is out of its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 0.001,
        l1: float = 0.0,
        l2: float = 0.0,
        lr_power: float = -0.5,
        beta: float = 0.0,
    ) -> None:
        if not float(lr) > 0:
            raise ValueError(f"lr: expected a number above 0, got {lr}")
        if lr_power > 0:
            raise ValueError(f"lr_power: expected a number of at most 0, got {lr_power}")
        for name, value in (("l1", l1), ("l2", l2), ("beta", beta)):
            if not value >= 0:
                raise ValueError(f"{name}: expected 0 or more, got {value}")
        super().__init__(params, {"lr": lr, "l1": l1, "l2": l2, "lr_power": lr_power, "beta": beta})

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
            state["squared_accumulator"] = torch.zeros_like(weight)
            state["linear_accumulator"] = torch.zeros_like(weight)
        squares, linear = state["squared_accumulator"], state["linear_accumulator"]
        rate, power, l1 = float(group["lr"]), -group["lr_power"], group["l1"]
        before = squares.pow(power)
        squares.addcmul_(gradient, gradient)
        after = squares.pow(power)
        linear.add_(gradient).sub_((after - before).div_(rate).mul_(weight))
        shrunk = linear - linear.clamp(-l1, l1)  # 0 where |z| <= l1, otherwise z - sign(z)*l1
        solution = shrunk.neg_().div_(after.add(group["beta"]).div_(rate).add_(group["l2"]))
        weight.copy_(torch.where(squares > 0, solution, weight))
