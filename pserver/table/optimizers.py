"""Which kernels, states and scalars each rule of rows has: the table that sparse_table.py goes by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pserver.table import deferred_adam, deferred_updates, update_kernels
from transpiler.ir.rules import Hparam, Rule

Scalars = tuple[float, ...]


def _sgd(n: Mapping[str, Any], step: int) -> Scalars:
    return n["lr"], n["weight_decay"]


def _momentum(n: Mapping[str, Any], step: int) -> Scalars:
    return n["lr"], n["momentum"], 1 - n["dampening"], n["weight_decay"], n["nesterov"]


def _adagrad(n: Mapping[str, Any], step: int) -> Scalars:
    return n["lr"] / (1 + (step - 1) * n["lr_decay"]), n["weight_decay"], n["eps"]


def _rowwise(n: Mapping[str, Any], step: int) -> Scalars:
    return n["lr"], n["weight_decay"], n["eps"]


def adam_scalars(n: Mapping[str, Any], step: int) -> Scalars:
    """Rate over its bias correction, 1 - beta1, beta2, 1 - beta2, the root of the other correction,
    eps, what is added to the gradient, and what values are multiplied with first.
    """
    beta, beta_square = n["betas"]
    rate, root = n["lr"] / (1 - beta**step), (1 - beta_square**step) ** 0.5
    return rate, 1 - beta, beta_square, 1 - beta_square, root, n["eps"], n["weight_decay"], 1.0


def _adamw(n: Mapping[str, Any], step: int) -> Scalars:
    return *adam_scalars(n, step)[:6], 0.0, 1 - n["lr"] * n["weight_decay"]


def _lazy_adam(n: Mapping[str, Any], step: int) -> Scalars:
    beta, beta_square = n["betas"]
    return (
        n["lr"] * (1 - beta_square**step) ** 0.5 / (1 - beta**step),
        1 - beta,
        1 - beta_square,
        n["eps"],
    )


def _ftrl(n: Mapping[str, Any], step: int) -> Scalars:
    return n["lr"], n["l1"], n["l2"], -n["lr_power"], n["beta"]


def _adam_past(n: Mapping[str, Any]) -> Scalars:
    return n["lr"], *n["betas"], n["eps"], n["weight_decay"], 0.0


def _adamw_past(n: Mapping[str, Any]) -> Scalars:
    return n["lr"], *n["betas"], n["eps"], n["weight_decay"], 1.0


def _adagrad_past(n: Mapping[str, Any]) -> Scalars:
    return n["lr"], n["lr_decay"], n["weight_decay"], n["eps"]


@dataclass(frozen=True, slots=True)
class RowOptimizer:
    """One rule.

    Attributes:
        kernel: what a step does to the rows that it touches: see update_kernels.py.
        scalars: (the step's numbers, the step's number from 1 on) -> what the kernel takes.
        states: name -> whether it has a number for each of the segment's columns, or one for the
            row.
        defaults: numbers where nobody gives them, as torch's constructor has them.
        missed: what a step does to the rows that it does not touch: see deferred_updates.py; None: nothing,
            ever.
        past: (a step's numbers) -> what that kernel takes.
        decay: which of those is weight decay; None: it has none.
        always: whether steps move rows that they do not touch even without weight decay.
        initial: the number that states begin with; "": 0.
    """

    kernel: Callable[..., None]
    scalars: Callable[[Mapping[str, Any], int], Scalars]
    states: Mapping[str, bool]
    defaults: Mapping[str, Hparam]
    missed: Callable[..., None] | None = None
    past: Callable[[Mapping[str, Any]], Scalars] = lambda hparams: ()
    decay: int | None = None
    always: bool = False
    initial: str = ""

    def moves(self, hparams: Mapping[str, Any]) -> bool:
        """Whether a step with these numbers moves rows that it does not touch."""
        return self.missed is not None and (self.always or hparams["weight_decay"] != 0)


_SGD = {"lr": 1e-3, "weight_decay": 0.0}
_ADAGRAD = {"lr": 1e-2, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10}
_ADAM: Mapping[str, Hparam] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
_MOMENTS = {"exp_avg": True, "exp_avg_sq": True}

ROW_OPTIMIZERS: Mapping[str, RowOptimizer] = MappingProxyType(
    {
        "sgd": RowOptimizer(
            update_kernels.sgd, _sgd, {}, _SGD, deferred_updates.sgd, lambda n: _sgd(n, 0), decay=1
        ),
        "momentum": RowOptimizer(
            update_kernels.momentum,
            _momentum,
            {"momentum_buffer": True},
            {**_SGD, "momentum": 0.9, "dampening": 0.0},
            deferred_updates.momentum,
            lambda n: _momentum(n, 0),
            decay=3,
            always=True,
        ),
        "adagrad": RowOptimizer(
            update_kernels.adagrad,
            _adagrad,
            {"sum": True},
            {**_ADAGRAD, "lr_decay": 0.0},
            deferred_updates.adagrad,
            _adagrad_past,
            decay=2,
            initial="initial_accumulator_value",
        ),
        "rowwise_adagrad": RowOptimizer(
            update_kernels.rowwise_adagrad,
            _rowwise,
            {"sum": False},
            _ADAGRAD,
            initial="initial_accumulator_value",
        ),
        "adam": RowOptimizer(
            update_kernels.adam,
            adam_scalars,
            _MOMENTS,
            _ADAM,
            deferred_adam.adam,
            _adam_past,
            decay=4,
            always=True,
        ),
        "adamw": RowOptimizer(
            update_kernels.adam,
            _adamw,
            _MOMENTS,
            {**_ADAM, "weight_decay": 1e-2},
            deferred_adam.adam,
            _adamw_past,
            decay=4,
            always=True,
        ),
        "lazy_adam": RowOptimizer(update_kernels.lazy_adam, _lazy_adam, _MOMENTS, {**_ADAM}),
        "ftrl": RowOptimizer(
            update_kernels.ftrl,
            _ftrl,
            {"squared_accumulator": True, "linear_accumulator": True},
            {"lr": 1e-3, "l1": 0.0, "l2": 0.0, "lr_power": -0.5, "beta": 0.0},
            deferred_updates.ftrl,
            lambda n: _ftrl(n, 0),
            always=True,
        ),
    }
)


def first_hparams(rule: Rule) -> dict[str, Any]:
    """A rule's numbers at the first step, all of them, and its flags."""
    optimizer = ROW_OPTIMIZERS[rule.type]
    return {
        **optimizer.defaults,
        "nesterov": False,
        "maximize": False,
        **rule.hparams,
        **rule.flags,
    }
