"""Optimizers of a table's own: by which rule its rows are updated, with which numbers, whatever
optimizer its model has.

::

    DistributedEmbedding(16, optimizer=row_optimizers.Adagrad(lr=0.1))
    DistributedEmbedding(17, optimizer=row_optimizers.Segments([(1, Ftrl(lr=0.1)), (16, Adagrad(lr=0.1))]))

They are data: an attribute may be set at any time (``module.optimizer.lr = 0.01``) and holds from
the next step on.  A table without one follows the parameter group of the script's optimizer that
its anchor is in.  What may be given where one of them is expected: one of them, ``{"type":
"adagrad", "lr": 0.1}``, or a class of torch.optim, plain or in a ``functools.partial``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch

from transpiler.ir.rules import ROW_RULES, Rule
from transpiler.plan.table_planner import group_rule as group_rule

__all__ = [
    "Adagrad",
    "Adam",
    "AdamW",
    "Ftrl",
    "group_rule",
    "LazyAdam",
    "Momentum",
    "row_optimizer",
    "RowOptimizer",
    "RowwiseAdagrad",
    "Segments",
    "SGD",
]

Betas = tuple[float, float]


def _number(whose: str, name: str, value: Any) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{whose}: {name}: expected a number, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{whose}: {name}: expected a finite number, got {value}")
    return float(value)


def _checked(whose: str, name: str, value: Any) -> Any:
    """One attribute, as its rule wants it.

    Raises:
        TypeError: it is no number, or no flag.
        ValueError: it is out of range.
    """
    if name in ("nesterov", "maximize"):
        if not isinstance(value, bool):
            raise TypeError(f"{whose}: {name}: expected True or False, got {value!r}")
        return value
    if name == "betas":
        if not isinstance(value, tuple | list) or len(value) != 2:
            raise TypeError(f"{whose}: betas: expected two numbers, got {value!r}")
        betas = tuple(_number(whose, name, beta) for beta in value)
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(
                f"{whose}: betas: expected numbers of 0 or more and below 1, got {value}"
            )
        return betas
    number = _number(whose, name, value)
    if name == "lr_power" and number > 0:
        raise ValueError(f"{whose}: lr_power: expected 0 or less, got {number}")
    if name not in ("lr_power", "dampening") and number < 0:
        raise ValueError(f"{whose}: {name}: expected 0 or more, got {number}")
    if whose == "Ftrl" and name == "lr" and number == 0:
        raise ValueError(f"{whose}: lr: expected a number above 0, got {number}")
    return number


@dataclass
class RowOptimizer:
    """What the optimizers of this module have in common.

    Raises:
        TypeError: an attribute is set to what is no number (or, a flag, not True or False).
        ValueError: it is set to a number out of range.
    """

    type: ClassVar[str] = ""

    def __setattr__(self, name: str, value: Any) -> None:
        whose = type(self).__name__
        if name not in type(self).__dataclass_fields__ or name == "type":
            known = ", ".join(key for key in type(self).__dataclass_fields__ if key != "type")
            raise AttributeError(f"{whose} has no {name!r}: it has {known}")
        object.__setattr__(self, name, _checked(whose, name, value))

    def rule(self) -> Rule:
        """As data, with the present numbers."""
        spec, values = ROW_RULES[self.type], asdict(self)
        return Rule(
            self.type,
            {name: values[name] for name in spec.hparams},
            {name: values[name] for name in spec.flags},
        )

    def segments(self, dim: int) -> list[tuple[int, int, RowOptimizer]]:
        """Which columns [begin, end) of ``dim`` it updates: all."""
        return [(0, dim, self)]


@dataclass
class SGD(RowOptimizer):
    """torch.optim.SGD without a momentum.  Decay moves rows that a step does not touch, too."""

    type: ClassVar[str] = "sgd"
    lr: float = 1e-3
    weight_decay: float = 0.0
    maximize: bool = False


@dataclass
class Momentum(RowOptimizer):
    """torch.optim.SGD with a momentum, to the letter: a row goes on moving in steps that do not
    touch it.
    """

    type: ClassVar[str] = "momentum"
    lr: float = 1e-3
    momentum: float = 0.9
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False

    def rule(self) -> Rule:
        """As data, with the present numbers.

        Raises:
            ValueError: ``nesterov`` with a dampening or without a momentum, as torch.
        """
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise ValueError("Momentum: nesterov: expected a momentum above 0 and a dampening of 0")
        return super().rule()


@dataclass
class Adagrad(RowOptimizer):
    """torch.optim.Adagrad (Duchi, Hazan, Singer: Adaptive subgradient methods, 2011)."""

    type: ClassVar[str] = "adagrad"
    lr: float = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    maximize: bool = False


@dataclass
class RowwiseAdagrad(RowOptimizer):
    """Adagrad with one accumulator a row, the mean of its squared gradients: a 16th of the state
    where rows have 16 columns.
    """

    type: ClassVar[str] = "rowwise_adagrad"
    lr: float = 1e-2
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10


@dataclass
class Adam(RowOptimizer):
    """torch.optim.Adam, exact: rows that a step does not touch move by their moments (Kingma, Ba:
    Adam, 2015).
    """

    type: ClassVar[str] = "adam"
    lr: float = 1e-3
    betas: Betas = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    maximize: bool = False


@dataclass
class AdamW(RowOptimizer):
    """torch.optim.AdamW, exact (Loshchilov, Hutter: Decoupled weight decay regularization,
    2019).
    """

    type: ClassVar[str] = "adamw"
    lr: float = 1e-3
    betas: Betas = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    maximize: bool = False


@dataclass
class LazyAdam(RowOptimizer):
    """torch.optim.SparseAdam: a row's moments and values move in the steps that touch it, and in no
    others.
    """

    type: ClassVar[str] = "lazy_adam"
    lr: float = 1e-3
    betas: Betas = (0.9, 0.999)
    eps: float = 1e-8
    maximize: bool = False


@dataclass
class Ftrl(RowOptimizer):
    """FTRL-Proximal, as :class:`transpiler.Ftrl` (McMahan et al.: Ad click prediction, 2013)."""

    type: ClassVar[str] = "ftrl"
    lr: float = 1e-3
    l1: float = 0.0
    l2: float = 0.0
    lr_power: float = -0.5
    beta: float = 0.0


class Segments:
    """Rules by columns: the first ``columns`` of every row by the first rule, the next ones by the
    second, and so on.

    Args:
        parts: (columns, what :func:`row_optimizer` takes) each; the columns add up to the table's
            ``dim``.

    Raises:
        TypeError: a part is no such pair.
        ValueError: there is no part, or one without columns.
    """

    def __init__(self, parts: Sequence[tuple[int, Any]]) -> None:
        self.parts: list[tuple[int, RowOptimizer]] = []
        for part in parts:
            if not isinstance(part, tuple | list) or len(part) != 2:
                raise TypeError(f"Segments: expected (columns, optimizer), got {part!r}")
            columns, given = part
            if not isinstance(columns, int) or isinstance(columns, bool):
                raise TypeError(f"Segments: columns: expected a whole number, got {columns!r}")
            if columns < 1:
                raise ValueError(f"Segments: columns: expected 1 or more, got {columns}")
            chosen = row_optimizer(given)
            if not isinstance(chosen, RowOptimizer):
                raise TypeError(
                    f"Segments: expected an optimizer for {columns} columns, got {given!r}"
                )
            self.parts.append((columns, chosen))
        if not self.parts:
            raise ValueError("Segments: expected at least one part, got none")

    def segments(self, dim: int) -> list[tuple[int, int, RowOptimizer]]:
        """Columns [begin, end) and their optimizer, in order.

        Raises:
            ValueError: the parts' columns do not add up to ``dim``.
        """
        found, begin = [], 0
        for columns, optimizer in self.parts:
            found.append((begin, begin + columns, optimizer))
            begin += columns
        if begin != dim:
            raise ValueError(f"Segments: expected parts of {dim} columns together, got {begin}")
        return found

    def __repr__(self) -> str:
        return f"Segments({self.parts})"


_CLASSES: tuple[type[RowOptimizer], ...] = (
    SGD,
    Momentum,
    Adagrad,
    RowwiseAdagrad,
    Adam,
    AdamW,
    LazyAdam,
    Ftrl,
)
BY_TYPE: Mapping[str, type[RowOptimizer]] = {cls.type: cls for cls in _CLASSES}


def row_optimizer(given: Any) -> RowOptimizer | Segments:
    """What the user gave as a table's own optimizer, as one.

    Raises:
        TypeError: it is nothing of the kind, or a number of it is none.
        ValueError: there is no such rule for rows, or a number is out of range.
    """
    if isinstance(given, RowOptimizer | Segments):
        return given
    if isinstance(given, Mapping):
        return _from_mapping(given)
    cls, keywords = (
        (given.func, given.keywords) if isinstance(given, functools.partial) else (given, {})
    )
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer):
        optimizer = cls([torch.zeros(1, requires_grad=True)], **keywords)
        rule = group_rule(optimizer, optimizer.param_groups[0], cls.__name__)
        return BY_TYPE[rule.type](**rule.hparams, **rule.flags)
    raise TypeError(
        "optimizer: expected one of trainer.row_optimizers, a mapping with a type, or a class of "
        "torch.optim "
        f"(functools.partial for its numbers), got {given!r}"
    )


def _from_mapping(given: Mapping[str, Any]) -> RowOptimizer:
    rest = dict(given)
    name = rest.pop("type", None)
    if name not in BY_TYPE:
        raise ValueError(f"optimizer: type: expected one of {', '.join(BY_TYPE)}, got {name!r}")
    unknown = [key for key in rest if key not in (*ROW_RULES[name].hparams, *ROW_RULES[name].flags)]
    if unknown:
        known = ", ".join((*ROW_RULES[name].hparams, *ROW_RULES[name].flags))
        raise ValueError(f"optimizer: {name} has no {unknown[0]!r}: it has {known}")
    return BY_TYPE[name](**rest)
