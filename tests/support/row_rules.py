"""The rules of rows, and torch's optimizers that a table of each is held against."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from pserver.table.table import SparseTable
from transpiler.ir.rules import Rule
from transpiler.ir.tables import Normal, Segment, Table
from transpiler.optim.optim import DecayedAdagrad, Ftrl

ROWS, DIM, STEPS = 24, 5, 40


TOLERANCE = {"float32": 1e-6, "float64": 1e-12}


class RowwiseAdagrad(torch.optim.Optimizer):
    """The formula of FBGEMM's EXACT_ROWWISE_ADAGRAD, over rows that have a gradient."""

    def __init__(self, params: Any, **hparams: Any) -> None:
        super().__init__(params, hparams)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                touched = weight.grad.coalesce().indices()[0]
                gradient = weight.grad.coalesce().values() + group["weight_decay"] * weight[touched]
                start = torch.full(
                    weight.shape[:1], group["initial_accumulator_value"], dtype=weight.dtype
                )
                sums = self.state[weight].setdefault("sum", start)
                sums[touched] += gradient.pow(2).mean(1)
                weight[touched] -= (
                    group["lr"] * gradient / (sums[touched].sqrt() + group["eps"])[:, None]
                )


class Interval(torch.optim.Optimizer):
    """The average of the steps between two that touch a row, for rows that have a gradient."""

    def __init__(self, params: Any, **hparams: Any) -> None:
        super().__init__(params, hparams)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                touched = weight.grad.coalesce().indices()[0]
                state = self.state[weight]
                state["steps"] = state.get("steps", 0) + 1
                last = state.setdefault("last", torch.zeros(weight.shape[:1], dtype=weight.dtype))
                since = (state["steps"] - last[touched])[:, None].expand_as(weight[touched])
                moved = weight[touched] + group["alpha"] * (since - weight[touched])
                weight[touched] = torch.where(weight[touched] == 0, since, moved)
                last[touched] = float(state["steps"])


class EachRow:
    """An optimizer of a dense class over every row as a parameter of its own, so that a step is
    one of the rows that have a gradient.
    """

    def __init__(self, cls: Any, weight: torch.Tensor, **hparams: Any) -> None:
        self._weight, self._rows = weight, weight.unbind(0)  # views
        self._optimizer = cls(list(self._rows), **hparams)
        self.param_groups = self._optimizer.param_groups

    def step(self) -> None:
        assert self._weight.grad is not None
        gradient = self._weight.grad.coalesce()
        for at, values in zip(gradient.indices()[0].tolist(), gradient.values(), strict=True):
            self._rows[at].grad = values
        self._optimizer.step()
        self._optimizer.zero_grad()


def decayed_adagrad(params: list[torch.Tensor], **hparams: Any) -> EachRow:
    return EachRow(DecayedAdagrad, *params, **hparams)


CLASSES: Mapping[str, tuple[Any, bool]] = {  # and whether it takes sparse gradients
    "sgd": (torch.optim.SGD, False),
    "momentum": (torch.optim.SGD, False),
    "adagrad": (torch.optim.Adagrad, False),
    "rowwise_adagrad": (RowwiseAdagrad, True),
    "adam": (torch.optim.Adam, False),
    "adamw": (torch.optim.AdamW, False),
    "lazy_adam": (torch.optim.SparseAdam, True),
    "ftrl": (Ftrl, False),
    "decayed_adagrad": (decayed_adagrad, True),
    "interval": (Interval, True),
}


RULES = {
    "sgd": Rule("sgd", {"lr": 0.1}),
    "sgd, decay": Rule("sgd", {"lr": 0.1, "weight_decay": 0.01}),
    "sgd, maximize": Rule("sgd", {"lr": 0.1, "weight_decay": 0.01}, {"maximize": True}),
    "momentum": Rule("momentum", {"lr": 0.05, "momentum": 0.9}),
    "momentum, dampening": Rule(
        "momentum", {"lr": 0.05, "momentum": 0.8, "dampening": 0.3}, {"maximize": True}
    ),
    "momentum, nesterov": Rule(
        "momentum", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.02}, {"nesterov": True}
    ),
    "momentum, decay": Rule("momentum", {"lr": 0.05, "momentum": 0.7, "weight_decay": 0.05}),
    "adagrad": Rule("adagrad", {"lr": 0.1}),
    "adagrad, all": Rule(
        "adagrad",
        {
            "lr": 0.1,
            "lr_decay": 0.01,
            "weight_decay": 0.02,
            "initial_accumulator_value": 0.5,
            "eps": 1e-6,
        },
        {"maximize": True},
    ),
    "rowwise": Rule(
        "rowwise_adagrad",
        {"lr": 0.1, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-8},
    ),
    "rowwise, all": Rule(
        "rowwise_adagrad",
        {"lr": 0.1, "weight_decay": 0.02, "initial_accumulator_value": 0.3, "eps": 1e-8},
    ),
    "adam": Rule("adam", {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8}),
    "adam, decay": Rule(
        "adam",
        {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1},
        {"maximize": True},
    ),
    "adamw": Rule("adamw", {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}),
    "lazy_adam": Rule("lazy_adam", {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8}),
    "lazy_adam, maximize": Rule(
        "lazy_adam", {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-5}, {"maximize": True}
    ),
    "ftrl": Rule("ftrl", {"lr": 0.1, "l1": 0.05, "l2": 0.1, "lr_power": -0.5, "beta": 0.2}),
    "ftrl, power": Rule("ftrl", {"lr": 0.2, "l1": 0.01, "l2": 0.0, "lr_power": -0.4, "beta": 1.0}),
    "decayed_adagrad": Rule("decayed_adagrad", {"lr": 0.1, "decay": 0.9, "eps": 1e-6}),
    "interval": Rule("interval", {"alpha": 0.2}),
}


def table_of(rules: Mapping[tuple[int, int], Rule], dtype: str, **metadata: Any) -> SparseTable:
    segments = tuple(Segment(begin, end, at) for at, (begin, end) in enumerate(rules))
    metadata = {"rows": ROWS, "initial": Normal(0, 0.5), **metadata}
    return SparseTable(
        Table("t", segments[-1].end, segments, dtype, **metadata), list(rules.values())
    )


def values_of(table: SparseTable, ids: np.ndarray | None = None) -> np.ndarray:
    ids = np.arange(ROWS) if ids is None else ids
    out = np.empty((len(ids), table.table.dim), table.table.dtype)
    table.lookup(ids, out)
    return out


def gradients(
    dim: int, dtype: str, steps: int, seed: int = 5
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Some rows of each step; the last is touched once, early, the one before never; and a step
    that touches none.
    """
    random = np.random.default_rng(seed)
    for step in range(steps):
        count = 0 if step == 7 else random.integers(1, 8)
        ids = random.permutation(ROWS - 2)[:count]
        ids = np.append(ids, ROWS - 1) if step == 3 else ids
        yield ids.astype(np.int64), random.normal(size=(len(ids), dim)).astype(dtype)


def optimizer_of(rule: Rule, weight: torch.Tensor) -> torch.optim.Optimizer:
    kind, _ = CLASSES[rule.type]
    return kind([weight], **rule.hparams, **rule.flags)


def give(weight: torch.Tensor, rule: Rule, ids: np.ndarray, rows: np.ndarray) -> None:
    places, values = torch.from_numpy(ids), torch.from_numpy(rows.copy())
    if CLASSES[rule.type][1]:
        weight.grad = torch.sparse_coo_tensor(
            places[None], values, weight.shape, check_invariants=False
        )
    else:
        weight.grad = torch.zeros_like(weight).index_copy_(0, places, values)
