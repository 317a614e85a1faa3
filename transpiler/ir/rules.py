"""Every update rule: its name in programs, and how it updates dense parameters and rows of tables.

``UPDATE_RULES`` is the one table.  A rule has a dense part, a part for rows, or both; ``RULES`` and
``ROW_RULES`` are the table's two columns.

Dense: a server runs the very optimizer class that the user chose, over slices of parameters.  The
update of one element must depend only on that element's own parameter, gradient and state (and on
hparams common to all): only then may a parameter be cut anywhere.  The table lists the classes that
are known to do so, and those that need norms of whole tensors, whose parameters stay whole.

Rules that users register are not in the table: such a :class:`Rule` brings its own arithmetic,
a block of ops (``update_block.py``).

Rows: the table holds everything about the rule that is data.  The arithmetic is a kernel in
``pserver/table/rules.py`` (and one in ``deferred.py`` where a step also moves rows that it does not
touch), the class that users name is in ``trainer/row_optimizers.py``.  Both are found by the rule's
name.  So a new rule for rows is a spec here, a kernel and a class;
``tests/pserver/table/test_update_kernels.py`` says which of them is missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from transpiler.ir.block import Argument, Block
from transpiler.ir.rule_optimizer import RuleOptimizer, check_runs
from transpiler.ir.update_block import (
    check,
    expect,
    is_registered,
    needs_norms,
    states_of,
)
from transpiler.ir.update_block import hparams_of as hparams_of_block
from transpiler.optim.dgc import LayerWiseOptimizer
from transpiler.optim.optim import LAMB, LARS, AdamD2Sum, DecayedAdagrad, Ftrl

Hparam = float | tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """One parameter group's update rule.

    Attributes:
        type: the optimizer op's type, for example "adam".
        hparams: name -> value; a schedule may move them.  Those of a plan are the values at the
            time of transpiling, and each step carries its own.
        flags: name -> value; they never change.
        update: the ops of a rule that a user registered; None for a rule of the table.
    """

    type: str
    hparams: Mapping[str, Hparam]
    flags: Mapping[str, bool] = field(default_factory=dict)
    update: Block | None = None

    @property
    def arguments(self) -> dict[str, Argument]:
        """The hparams, the flags and the block, as an optimizer op has them."""
        block = {} if self.update is None else {"update": self.update}
        return {**self.hparams, **self.flags, **block}

    @property
    def whole(self) -> bool:
        """Whether the rule computes a number of a whole tensor, so that no parameter may be cut."""
        if self.update is not None:
            return needs_norms(self.update)
        return self.type in RULES and RULES[self.type].whole


@dataclass(frozen=True, slots=True)
class Clip:
    """The clipping of merged gradients.

    Attributes:
        kind: "value", to [low, high]; "norm" (each tensor) or "global_norm", to ``high``.
        high: the upper limit.
        low: the lower limit, for "value" only.
    """

    kind: str
    high: float
    low: float = 0.0


# ---- the table ----


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """The part of a rule for dense parameters.

    Attributes:
        cls: the optimizer class that a server runs.
        hparams: those that a schedule may move; keys of a parameter group and keyword arguments of
            the class.
        flags: likewise, those that never change.
    """

    cls: type[torch.optim.Optimizer]
    hparams: tuple[str, ...]
    flags: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether the class needs norms of whole tensors."""
        return issubclass(self.cls, LayerWiseOptimizer)


@dataclass(frozen=True, slots=True)
class RowSpec:
    """The part of a rule for rows of tables: all of it that is data.

    Attributes:
        hparams: those that a schedule may move: name -> default.
        flags: those that never change; False unless given.
        states: name -> whether a row has an element of the state for each of the segment's columns
            (True) or one element (False).
        initial: the hparam that states begin with; "" for 0.
        untouched: the effect of a step on a row that it does not touch.  "stay": none.  "decay":
            the row moves where ``weight_decay`` is not 0.  "move": the row always moves.
    """

    hparams: Mapping[str, Hparam]
    flags: tuple[str, ...] = ()
    states: Mapping[str, bool] = field(default_factory=dict)
    initial: str = ""
    untouched: Literal["stay", "decay", "move"] = "stay"

    def complete(self, rule: Rule) -> dict[str, Any]:
        """All hparams and flags of a rule, with defaults where it has none."""
        flags = dict.fromkeys(self.flags, False)
        return {**self.hparams, **flags, **rule.hparams, **rule.flags}

    def moves_untouched(self, hparams: Mapping[str, Any]) -> bool:
        """Whether a step with these hparams moves rows that it does not touch."""
        decays = self.untouched == "decay" and hparams["weight_decay"] != 0
        return decays or self.untouched == "move"


@dataclass(frozen=True, slots=True)
class RuleSpec:
    """One update rule.

    Attributes:
        dense: how it updates dense parameters; None: not at all.
        rows: how it updates rows of tables; None: not at all.
    """

    dense: DenseSpec | None = None
    rows: RowSpec | None = None


# the rate is a float32 tensor, with which these classes compute in its precision: a server's
# optimizer gets one, too, and rounds as the user's
TENSOR_LR = "tensor_lr"
_PLAIN = ("maximize", "foreach")
_SGD = DenseSpec(
    torch.optim.SGD,
    ("lr", "momentum", "dampening", "weight_decay"),
    ("nesterov", *_PLAIN, "fused"),
)
_ADAM = ("lr", "betas", "eps", "weight_decay")
_ADAM_FLAGS = ("amsgrad", *_PLAIN, "fused", TENSOR_LR)
_ADAM_DEFAULTS: Mapping[str, Hparam] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
_MOMENTS = {"exp_avg": True, "exp_avg_sq": True}

UPDATE_RULES: Mapping[str, RuleSpec] = MappingProxyType(
    {
        "sgd": RuleSpec(
            _SGD, RowSpec({"lr": 1e-3, "weight_decay": 0.0}, ("maximize",), untouched="decay")
        ),
        # torch's class is that of "sgd"; a program shows whether there is a velocity
        "momentum": RuleSpec(
            _SGD,
            RowSpec(
                {"lr": 1e-3, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0},
                ("nesterov", "maximize"),
                {"momentum_buffer": True},
                untouched="move",
            ),
        ),
        "adam": RuleSpec(
            DenseSpec(torch.optim.Adam, _ADAM, (*_ADAM_FLAGS, "decoupled_weight_decay")),
            RowSpec(
                {**_ADAM_DEFAULTS, "weight_decay": 0.0}, ("maximize",), _MOMENTS, untouched="move"
            ),
        ),
        "adamw": RuleSpec(
            DenseSpec(torch.optim.AdamW, _ADAM, _ADAM_FLAGS),
            RowSpec(
                {**_ADAM_DEFAULTS, "weight_decay": 1e-2}, ("maximize",), _MOMENTS, untouched="move"
            ),
        ),
        # torch.optim.SparseAdam
        "lazy_adam": RuleSpec(rows=RowSpec(_ADAM_DEFAULTS, ("maximize",), _MOMENTS)),
        "adamax": RuleSpec(DenseSpec(torch.optim.Adamax, _ADAM, (*_PLAIN, TENSOR_LR))),
        "nadam": RuleSpec(
            DenseSpec(
                torch.optim.NAdam,
                (*_ADAM, "momentum_decay"),
                (*_PLAIN, "decoupled_weight_decay", TENSOR_LR),
            )
        ),
        "radam": RuleSpec(
            DenseSpec(torch.optim.RAdam, _ADAM, (*_PLAIN, "decoupled_weight_decay", TENSOR_LR))
        ),
        "adagrad": RuleSpec(
            DenseSpec(
                torch.optim.Adagrad,
                ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"),
                (*_PLAIN, "fused"),
            ),
            RowSpec(
                {
                    "lr": 1e-2,
                    "lr_decay": 0.0,
                    "weight_decay": 0.0,
                    "initial_accumulator_value": 0.0,
                    "eps": 1e-10,
                },
                ("maximize",),
                {"sum": True},
                initial="initial_accumulator_value",
                untouched="decay",
            ),
        ),
        # one accumulator a row, as FBGEMM's and DLRM's EXACT_ROWWISE_ADAGRAD
        "rowwise_adagrad": RuleSpec(
            rows=RowSpec(
                {"lr": 1e-2, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10},
                states={"sum": False},
                initial="initial_accumulator_value",
            )
        ),
        "decayed_adagrad": RuleSpec(
            DenseSpec(DecayedAdagrad, ("lr", "decay", "eps")),
            RowSpec({"lr": 1e-3, "decay": 0.95, "eps": 1e-6}, states={"moment": True}),
        ),
        "lars_momentum": RuleSpec(
            DenseSpec(LARS, ("lr", "momentum", "lars_coeff", "weight_decay", "eps"))
        ),
        "lamb": RuleSpec(DenseSpec(LAMB, _ADAM)),
        "adam_d2sum": RuleSpec(DenseSpec(AdamD2Sum, ("lr", "momentum", "ada_decay", "eps"))),
        "adadelta": RuleSpec(
            DenseSpec(torch.optim.Adadelta, ("lr", "rho", "eps", "weight_decay"), _PLAIN)
        ),
        "rmsprop": RuleSpec(
            DenseSpec(
                torch.optim.RMSprop,
                ("lr", "alpha", "eps", "weight_decay", "momentum"),
                ("centered", *_PLAIN),
            )
        ),
        "rprop": RuleSpec(DenseSpec(torch.optim.Rprop, ("lr", "etas", "step_sizes"), _PLAIN)),
        "asgd": RuleSpec(
            DenseSpec(
                torch.optim.ASGD,
                ("lr", "lambd", "alpha", "t0", "weight_decay"),
                (*_PLAIN, TENSOR_LR),
            )
        ),
        "ftrl": RuleSpec(
            DenseSpec(Ftrl, ("lr", "l1", "l2", "lr_power", "beta")),
            RowSpec(
                {"lr": 1e-3, "l1": 0.0, "l2": 0.0, "lr_power": -0.5, "beta": 0.0},
                states={"squared_accumulator": True, "linear_accumulator": True},
                untouched="move",
            ),
        ),
        "interval": RuleSpec(rows=RowSpec({"alpha": 0.05}, states={"last": False})),
    }
)
"""Rule name -> spec.

Rows of "momentum", "adam" and "adamw" move as in torch's dense optimizers: a row that a step does
not touch moves by that step all the same (its velocity, its decay), when the row is next read or
updated.  Under "lazy_adam" and "decayed_adagrad" only rows that are touched
change, their states included.  "interval" is no descent: rows count how often they are touched."""

RULES: Mapping[str, DenseSpec] = MappingProxyType(
    {name: spec.dense for name, spec in UPDATE_RULES.items() if spec.dense is not None}
)
"""The rules for dense parameters: name -> spec."""

ROW_RULES: Mapping[str, RowSpec] = MappingProxyType(
    {name: spec.rows for name, spec in UPDATE_RULES.items() if spec.rows is not None}
)
"""The rules for rows of tables: name -> spec."""


@dataclass(frozen=True, slots=True)
class Registered:
    """The rule that a user registered for an optimizer class.

    Attributes:
        type: the optimizer op's type: "registered.Lion".
        update: its ops.
    """

    type: str
    update: Block


registered: dict[type[torch.optim.Optimizer], Registered] = {}
"""The rules that users registered in this process, by optimizer class."""


def is_dense(op_type: str) -> bool:
    """Whether the op updates dense parameters, by a rule of the table or a registered one."""
    return op_type in RULES or is_registered(op_type)


# ---- rules of optimizers, and optimizers of rules ----

_REFUSED = {
    torch.optim.LBFGS: "LBFGS evaluates the loss several times a step and its direction mixes all "
    "parameters",
    torch.optim.Adafactor: "Adafactor factors second moments over whole rows and columns, so a "
    "slice cannot be updated alone",
    torch.optim.Muon: "Muon orthogonalises whole matrices, so a slice cannot be updated alone",
    torch.optim.SparseAdam: "SparseAdam takes sparse gradients only, and dense parameters have "
    "dense ones; use Adam",
}


def _type_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> str:
    """The op type of a parameter group.

    Exact classes only: a subclass may step differently.
    """
    cls = type(optimizer)
    if cls in registered:
        return registered[cls].type
    for op_type, spec in RULES.items():
        if spec.cls is cls:
            return "momentum" if op_type == "sgd" and group["momentum"] != 0 else op_type
    known = ", ".join(dict.fromkeys(spec.cls.__name__ for spec in RULES.values()))
    if cls in _REFUSED:
        raise ValueError(f"{_REFUSED[cls]}. Rules that can be cut into slices: {known}")
    base = next((spec.cls.__name__ for spec in RULES.values() if issubclass(cls, spec.cls)), None)
    why = (
        f"is a subclass of {base} whose step may differ"
        if base
        else "is not known to update each element by itself"
    )
    raise ValueError(
        f"optimizer {cls.__module__}.{cls.__qualname__} {why}. Rules that can be cut into slices: "
        f"{known}; register_rule gives servers the update of another one"
    )


def _hparam(key: str, value: Any) -> Hparam:
    if isinstance(value, tuple | list):
        return tuple(float(item) for item in value)
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"{key}: expected one number, got a tensor of shape {tuple(value.shape)}")
    return float(value)


def _is_single(rate: Any) -> bool:
    """Whether a rate is a tensor of less precision than a float.

    Raises:
        ValueError: it is of another dtype than float32 and float64.
    """
    if isinstance(rate, Tensor) and rate.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"lr: expected a number, or a tensor of float32 or float64, got one of {rate.dtype}: "
            "a parameter server computes with no other"
        )
    return isinstance(rate, Tensor) and rate.dtype is torch.float32


def rule_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Rule:
    """The update rule of a parameter group, with the group's present hparams.

    Args:
        optimizer: the group's optimizer.
        group: one of its ``param_groups``.

    Returns:
        The rule.  It lacks a flag that the user left at None (``foreach``, ``fused``): torch then
        chooses.

    Raises:
        ValueError: the rule is not element-wise, or asks for capturable or differentiable steps;
            the message says why.
    """
    op_type = _type_of(optimizer, group)
    for key, why in (
        ("capturable", "CUDA graphs"),
        ("differentiable", "gradients through the step"),
    ):
        if group.get(key):
            raise ValueError(
                f"{type(optimizer).__name__}({key}=True): a parameter server's step does not "
                f"support {why}"
            )
    own = registered.get(type(optimizer))
    if own is not None:
        names = hparams_of_block(own.update)
        return Rule(op_type, {key: _hparam(key, group[key]) for key in names}, {}, own.update)
    flags = {key: bool(group[key]) for key in RULES[op_type].flags if group.get(key) is not None}
    if TENSOR_LR in RULES[op_type].flags and _is_single(group["lr"]):
        flags[TENSOR_LR] = True
    elif op_type == "asgd" and flags.get("foreach") and isinstance(group["lr"], Tensor):
        raise ValueError(
            "lr: expected a number, or a tensor of float32, got one of float64: with foreach ASGD "
            "rounds that as a parameter server does not"
        )
    return Rule(op_type, hparams_of(op_type, group), flags)


def hparams_of(op_type: str, group: Mapping[str, Any]) -> dict[str, Hparam]:
    """The present hparams of a parameter group, as a step carries them.

    An hparam that the user holds as a tensor becomes a float.  torch computes with a tensor in the
    tensor's precision and with a float in double; a rule whose class does so with its rate has the
    flag ``TENSOR_LR``.

    Args:
        op_type: the group's rule, a name in ``RULES``.
        group: a parameter group.

    Returns:
        Name -> value, without those that are None.

    Raises:
        KeyError: ``op_type`` is not in ``RULES``.
    """
    hparams = RULES[op_type].hparams
    return {key: _hparam(key, group[key]) for key in hparams if group.get(key) is not None}


def state_of(rule: Rule) -> dict[str, bool]:
    """The states of a dense rule.

    They are found by a step of the real class on a tiny tensor, so that they follow torch.  No
    random numbers are drawn.

    Args:
        rule: its flags matter, too: "amsgrad" adds a state.

    Returns:
        Name -> True where the state has the parameter's shape, False for a scalar.
    """
    if rule.update is not None:
        return states_of(rule.update)
    probe = torch.zeros(2)
    probe.grad = torch.zeros(2)
    optimizer = make(rule, [probe])
    optimizer.step()
    return {
        key: value.shape == probe.shape
        for key, value in optimizer.state[probe].items()
        if isinstance(value, Tensor)
    }


def make(rule: Rule, params: list[Tensor]) -> torch.optim.Optimizer:
    """An optimizer of the rule's own class.

    Args:
        rule: of a type in ``RULES``.
        params: become one parameter group.  They need not require gradients: set ``.grad``.

    Returns:
        The optimizer, without state.

    Raises:
        ValueError: the rule's type is unknown, or torch refuses one of its hparams.
    """
    if rule.update is not None:
        return RuleOptimizer(params, rule.update, rule.hparams)
    if rule.type not in RULES:
        raise ValueError(f"expected an optimizer op among {', '.join(RULES)}, got {rule.type!r}")
    cls: Callable[..., torch.optim.Optimizer] = RULES[rule.type].cls
    flags = {name: flag for name, flag in rule.flags.items() if name != TENSOR_LR}
    hparams: dict[str, Any] = dict(rule.hparams)
    if rule.flags.get(TENSOR_LR):
        hparams["lr"] = torch.tensor(hparams["lr"], dtype=torch.float32)
    return cls(params, **hparams, **flags)


def check_registered(rule: Rule, dtype: torch.dtype = torch.float32) -> None:
    """Checks a registered rule: its block, and that a step of it runs.

    Args:
        rule: also one from the network.
        dtype: of a parameter.

    Raises:
        ValueError: naming the op or the hparam, what was expected and what came.
    """
    what = f"rule {rule.type!r}"
    expect(is_registered(rule.type), f"{what}: expected registered.NAME of a rule with a block")
    expect(rule.update is not None, f"{what}: expected its block of ops, got none")
    expect(not rule.flags, f"{what}: expected no flags, got {', '.join(rule.flags)}")
    assert rule.update is not None
    try:
        check(rule.update)
        for name, count in hparams_of_block(rule.update).items():
            value = rule.hparams.get(name)
            expect(value is not None, f"expected a number for {name!r}, got none")
            numbers = value if isinstance(value, tuple) else (value,)
            finite = all(isinstance(each, float) and math.isfinite(each) for each in numbers)
            expect(finite, f"expected finite numbers for {name!r}, got {value!r}")
            got = len(value) if isinstance(value, tuple) else None
            items = "one number" if count is None else f"{count} numbers"
            expect(got == count, f"expected {items} for {name!r}, got {value!r}")
        odd = sorted(set(rule.hparams) - set(hparams_of_block(rule.update)))
        expect(not odd, f"expected hparams that its block has, got {odd[:3]}")
        check_runs(rule.update, rule.hparams, dtype)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error


def set_hparams(optimizer: torch.optim.Optimizer, hparams: Mapping[str, Hparam]) -> None:
    """Writes a step's hparams into every group of the optimizer; a rate that is a tensor stays
    one.
    """
    for group in optimizer.param_groups:
        rate = group.get("lr")
        group.update(hparams)
        if isinstance(rate, Tensor):
            group["lr"] = torch.tensor(group["lr"], dtype=rate.dtype)
