"""Optimizers that torch lacks, as torch.optim classes: adam_d2sum, decayed Adagrad, FTRL, LAMB,
LARS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from transpiler.optim.dgc import FollowingOptimizer, Group, LayerWiseOptimizer

# ---- adam d2sum ----
#
# Adam's rule of Paddle's parameter servers, as a ``torch.optim.Optimizer``.


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


# ---- decayed adagrad ----
#
# Adagrad whose sum of squares decays, as a ``torch.optim.Optimizer``.


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
            The loss that ``closure`` returned; None without one.
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


# ---- ftrl ----
#
# FTRL-Proximal as a ``torch.optim.Optimizer``: sparse weights for linear models, one learning rate
# per coordinate.


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
            The loss that ``closure`` returned; None without one.
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


# ---- lamb ----
#
# LAMB, Adam with layer-wise adaptive rates, as a ``torch.optim.Optimizer``.


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


# ---- lars ----
#
# LARS, layer-wise adaptive rate scaling, as a ``torch.optim.Optimizer``.


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
