"""Optimizers of a table's own: its rows' update rule, independent of the model's optimizer.

::

    DistributedEmbedding(16, optimizer=row_optimizers.Adagrad(lr=0.1))
    DistributedEmbedding(
        17, optimizer=row_optimizers.Segments([(1, Ftrl(lr=0.1)), (16, Adagrad(lr=0.1))])
    )

They are data: an attribute may be set at any time (``module.optimizer.lr = 0.01``) and holds from
the next step on.  A table without one follows the parameter group of the script's optimizer that
its proxy parameter is in.  An argument may be one of them; ``{"type": "adagrad", "lr": 0.1}``; or a
class of torch.optim, plain or in a ``functools.partial``.

A rule's hparams, flags and defaults are those of its spec in ``transpiler.ir.rules``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import torch

from transpiler.ir.rules import ROW_RULES, Rule
from transpiler.plan.planner import group_rule as group_rule

__all__ = [
    "Adagrad",
    "Adam",
    "AdamW",
    "DecayedAdagrad",
    "Ftrl",
    "group_rule",
    "Interval",
    "LazyAdam",
    "Momentum",
    "row_optimizer",
    "RowOptimizer",
    "RowwiseAdagrad",
    "Segments",
    "SGD",
]

Betas = tuple[float, float]
DEFAULT: Any = object()  # in a class's body: the default of the rule's spec


class Range(NamedTuple):
    """The values that an hparam may have.

    Attributes:
        words: the range, for error messages.
        holds: whether a finite number is in it.
    """

    words: str
    holds: Callable[[float], bool]


def _is_share(value: float) -> bool:
    return 0 < value <= 1


ANY = Range("", lambda value: True)
NOT_NEGATIVE = Range("0 or more", lambda value: value >= 0)
NOT_POSITIVE = Range("0 or less", lambda value: value <= 0)
POSITIVE = Range("a number above 0", lambda value: value > 0)
FRACTION = Range("0 or more and below 1", lambda value: 0 <= value < 1)

_RANGES = {"lr_power": NOT_POSITIVE, "dampening": ANY, "betas": FRACTION}  # others: NOT_NEGATIVE


def _number(whose: str, name: str, value: Any, allowed: Range) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{whose}: {name}: expected a number, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{whose}: {name}: expected a finite number, got {value}")
    if not allowed.holds(value):
        raise ValueError(f"{whose}: {name}: expected {allowed.words}, got {value}")
    return float(value)


@dataclass
class RowOptimizer:
    """A rule for rows, with its hparams and flags as attributes: the base of this module's classes.

    A subclass sets ``type`` and has an attribute for each hparam and flag of that rule's spec, in
    the spec's order.

    Attributes:
        type: the rule, a name in ``transpiler.ir.rules.ROW_RULES``.
        ranges: the values that hparams of this rule may have, where they are not the usual ones.

    Raises:
        AttributeError: an attribute is set that the rule does not have.
        TypeError: an attribute is set to something else than a number (a flag: True or False).
        ValueError: it is set to a number out of range.
    """

    type: ClassVar[str] = ""
    ranges: ClassVar[Mapping[str, Range]] = {}

    def __init_subclass__(cls) -> None:
        """Gives the attributes the defaults of the rule's spec, before ``dataclass`` reads them."""
        if "type" in vars(cls):
            spec = ROW_RULES[cls.type]
            for name, value in (*spec.hparams.items(), *dict.fromkeys(spec.flags, False).items()):
                assert vars(cls).get(name) is DEFAULT, f"{cls.__name__}: expected {name} = DEFAULT"
                setattr(cls, name, value)
            BY_TYPE[cls.type] = cls

    def __setattr__(self, name: str, value: Any) -> None:
        whose, known = type(self).__name__, [field.name for field in fields(self)]
        if name not in known:
            raise AttributeError(f"{whose} has no {name!r}: it has {', '.join(known)}")
        object.__setattr__(self, name, self._checked(name, value))

    def _checked(self, name: str, value: Any) -> Any:
        """A checked attribute; raises as the class says."""
        whose = type(self).__name__
        if name in ROW_RULES[self.type].flags:
            if not isinstance(value, bool):
                raise TypeError(f"{whose}: {name}: expected True or False, got {value!r}")
            return value
        allowed = self.ranges.get(name, _RANGES.get(name, NOT_NEGATIVE))
        if name != "betas":
            return _number(whose, name, value, allowed)
        if not isinstance(value, tuple | list) or len(value) != 2:
            raise TypeError(f"{whose}: betas: expected two numbers, got {value!r}")
        return tuple(_number(whose, name, beta, allowed) for beta in value)

    def rule(self) -> Rule:
        """The rule as data, with the present hparams."""
        spec = ROW_RULES[self.type]  # not by ``asdict``, which copies deeply, in every step
        return Rule(
            self.type,
            {name: getattr(self, name) for name in spec.hparams},
            {name: getattr(self, name) for name in spec.flags},
        )

    def segments(self, dim: int) -> list[tuple[int, int, RowOptimizer]]:
        """The columns [begin, end) of ``dim`` that it updates: all."""
        return [(0, dim, self)]


BY_TYPE: dict[str, type[RowOptimizer]] = {}
"""Rule name -> class."""


@dataclass
class SGD(RowOptimizer):
    """torch.optim.SGD without momentum.  Weight decay also moves rows that a step does not
    touch.
    """

    type: ClassVar[str] = "sgd"
    lr: float = DEFAULT
    weight_decay: float = DEFAULT
    maximize: bool = DEFAULT


@dataclass
class Momentum(RowOptimizer):
    """torch.optim.SGD with momentum, exact: a row also moves in steps that do not touch it."""

    type: ClassVar[str] = "momentum"
    lr: float = DEFAULT
    momentum: float = DEFAULT
    dampening: float = DEFAULT
    weight_decay: float = DEFAULT
    nesterov: bool = DEFAULT
    maximize: bool = DEFAULT

    def rule(self) -> Rule:
        """The rule as data, with the present hparams.

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
    lr: float = DEFAULT
    lr_decay: float = DEFAULT
    weight_decay: float = DEFAULT
    initial_accumulator_value: float = DEFAULT
    eps: float = DEFAULT
    maximize: bool = DEFAULT


@dataclass
class RowwiseAdagrad(RowOptimizer):
    """Adagrad with one accumulator a row, the mean of its squared gradients: a 16th of the state
    where rows have 16 columns.
    """

    type: ClassVar[str] = "rowwise_adagrad"
    lr: float = DEFAULT
    weight_decay: float = DEFAULT
    initial_accumulator_value: float = DEFAULT
    eps: float = DEFAULT


@dataclass
class DecayedAdagrad(RowOptimizer):
    """Adagrad over a decaying average of squared gradients, as
    :class:`transpiler.optim.optim.DecayedAdagrad` over each row by itself: a row and its
    average change in the steps that touch it, and in no others.  (Over a whole dense parameter the
    average decays at every step.)
    """

    type: ClassVar[str] = "decayed_adagrad"
    ranges: ClassVar[Mapping[str, Range]] = {"decay": FRACTION}
    lr: float = DEFAULT
    decay: float = DEFAULT
    eps: float = DEFAULT


@dataclass
class Adam(RowOptimizer):
    """torch.optim.Adam, exact: rows that a step does not touch move by their moments (Kingma, Ba:
    Adam, 2015).
    """

    type: ClassVar[str] = "adam"
    lr: float = DEFAULT
    betas: Betas = DEFAULT
    eps: float = DEFAULT
    weight_decay: float = DEFAULT
    maximize: bool = DEFAULT


@dataclass
class AdamW(RowOptimizer):
    """torch.optim.AdamW, exact (Loshchilov, Hutter: Decoupled weight decay regularization,
    2019).
    """

    type: ClassVar[str] = "adamw"
    lr: float = DEFAULT
    betas: Betas = DEFAULT
    eps: float = DEFAULT
    weight_decay: float = DEFAULT
    maximize: bool = DEFAULT


@dataclass
class LazyAdam(RowOptimizer):
    """torch.optim.SparseAdam: a row's moments and values move in the steps that touch it, and in no
    others.
    """

    type: ClassVar[str] = "lazy_adam"
    lr: float = DEFAULT
    betas: Betas = DEFAULT
    eps: float = DEFAULT
    maximize: bool = DEFAULT


@dataclass
class Ftrl(RowOptimizer):
    """FTRL-Proximal, as :class:`transpiler.Ftrl` (McMahan et al.: Ad click prediction, 2013)."""

    type: ClassVar[str] = "ftrl"
    ranges: ClassVar[Mapping[str, Range]] = {"lr": POSITIVE}
    lr: float = DEFAULT
    l1: float = DEFAULT
    l2: float = DEFAULT
    lr_power: float = DEFAULT
    beta: float = DEFAULT


@dataclass
class Interval(RowOptimizer):
    """No descent: a row's values are a moving average of the number of steps between two steps that
    touch it, with the weight ``alpha`` for the newest interval; 0 until it is first touched.  The
    gradient's values do not count (Yi et al.: Sampling-bias-corrected neural modeling for large
    corpus item recommendations, RecSys 2019, algorithm 2).
    """

    type: ClassVar[str] = "interval"
    ranges: ClassVar[Mapping[str, Range]] = {"alpha": Range("above 0 and up to 1", _is_share)}
    alpha: float = DEFAULT


class Segments:
    """Rules by columns: one rule for the first columns of every row, another for the next, and so
    on.

    ::

        Segments([(1, Ftrl(lr=0.1)), (16, Adagrad(lr=0.1))])

    Args:
        parts: pairs of a number of columns and what :func:`row_optimizer` takes; the columns add up
            to the table's ``dim``.

    Attributes:
        parts: pairs of a number of columns and the optimizer of these columns.

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
        """The columns [begin, end) of each optimizer, in order.

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


def row_optimizer(given: Any) -> RowOptimizer | Segments:
    """The optimizer from a user's argument for a table.

    Args:
        given: a :class:`RowOptimizer` or :class:`Segments`; a mapping with a "type", the name of a
            rule, and any of its hparams and flags; a class of torch.optim, or a
            ``functools.partial`` of one.

    Returns:
        A RowOptimizer, or Segments.

    Raises:
        TypeError: it is none of these, or an hparam is no number.
        ValueError: there is no such rule for rows, or an hparam is out of range.
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
        f"torch.optim (functools.partial for its hparams), got {given!r}"
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
