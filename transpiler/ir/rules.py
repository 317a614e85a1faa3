"""torch.optim instances as update rules of programs, and rules as torch.optim instances over
slices.

What a rule does to one element must depend on that element's own parameter, gradient and state (and
on numbers common to all): only then may a parameter be cut anywhere.  ``RULES`` lists the classes
of which we know that.  No arithmetic is written here: a server runs the very class that the user
chose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from transpiler.optim.decayed_adagrad import DecayedAdagrad
from transpiler.optim.ftrl import Ftrl

Hparam = float | tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """One parameter group's update rule: the optimizer op's type, its numbers (a schedule may move
    them) and its flags.

    ``hparams`` of a plan are the values at the time of transpiling.  A step carries its own row of
    them.
    """

    type: str  # "adam"
    hparams: Mapping[str, Hparam]
    flags: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Clip:
    """How merged gradients are clipped: ``"value"`` to [low, high]; ``"norm"`` (each tensor) or
    ``"global_norm"`` to ``high``.
    """

    kind: str
    high: float
    low: float = 0.0


@dataclass(frozen=True, slots=True)
class RuleSpec:
    """One optimizer op: the class that implements it, the numbers a schedule may move, the flags
    that never change.

    Both are keys of a parameter group and keyword arguments of the class.
    """

    cls: type[torch.optim.Optimizer]
    hparams: tuple[str, ...]
    flags: tuple[str, ...] = ()


_SGD = RuleSpec(
    torch.optim.SGD,
    ("lr", "momentum", "dampening", "weight_decay"),
    ("nesterov", "maximize", "foreach", "fused"),
)
_ADAM_NUMBERS = ("lr", "betas", "eps", "weight_decay")
_ADAM_FLAGS = ("amsgrad", "maximize", "foreach", "fused")
_PLAIN = ("maximize", "foreach")

RULES: Mapping[str, RuleSpec] = MappingProxyType(
    {
        "sgd": _SGD,
        "momentum": _SGD,  # the same class; a program shows whether there is a velocity
        "adam": RuleSpec(torch.optim.Adam, _ADAM_NUMBERS, (*_ADAM_FLAGS, "decoupled_weight_decay")),
        "adamw": RuleSpec(torch.optim.AdamW, _ADAM_NUMBERS, _ADAM_FLAGS),
        "adamax": RuleSpec(torch.optim.Adamax, _ADAM_NUMBERS, _PLAIN),
        "nadam": RuleSpec(
            torch.optim.NAdam,
            (*_ADAM_NUMBERS, "momentum_decay"),
            (*_PLAIN, "decoupled_weight_decay"),
        ),
        "radam": RuleSpec(torch.optim.RAdam, _ADAM_NUMBERS, (*_PLAIN, "decoupled_weight_decay")),
        "adagrad": RuleSpec(
            torch.optim.Adagrad,
            ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"),
            (*_PLAIN, "fused"),
        ),
        "adadelta": RuleSpec(torch.optim.Adadelta, ("lr", "rho", "eps", "weight_decay"), _PLAIN),
        "rmsprop": RuleSpec(
            torch.optim.RMSprop,
            ("lr", "alpha", "eps", "weight_decay", "momentum"),
            ("centered", *_PLAIN),
        ),
        "rprop": RuleSpec(torch.optim.Rprop, ("lr", "etas", "step_sizes"), _PLAIN),
        "asgd": RuleSpec(torch.optim.ASGD, ("lr", "lambd", "alpha", "t0", "weight_decay"), _PLAIN),
        "ftrl": RuleSpec(Ftrl, ("lr", "l1", "l2", "lr_power", "beta")),
        "decayed_adagrad": RuleSpec(DecayedAdagrad, ("lr", "decay", "eps")),
    }
)

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
    """The op type for this group.

    Exact classes only: what a subclass changes, nobody here can know.
    """
    cls = type(optimizer)
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
        f"{known}"
    )


def _number(key: str, value: Any) -> Hparam:
    if isinstance(value, tuple | list):
        return tuple(float(item) for item in value)
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"{key}: expected one number, got a tensor of shape {tuple(value.shape)}")
    return float(value)


def rule_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Rule:
    """The update rule of one of the optimizer's parameter groups, with the group's present numbers.

    A flag that the user left at None (``foreach``, ``fused``) is left out, which keeps torch's own
    choice.

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
    flags = {key: bool(group[key]) for key in RULES[op_type].flags if group.get(key) is not None}
    return Rule(op_type, hparams_of(op_type, group), flags)


def hparams_of(op_type: str, group: Mapping[str, Any]) -> dict[str, Hparam]:
    """The present numbers of a parameter group: what a step carries.  A number that is None is left
    out.

    A number that the user holds as a tensor becomes a float.  torch computes with a tensor in the
    tensor's precision and with a float in double, so the step may then differ from the user's
    optimizer's in the last bits.

    Raises:
        KeyError: ``op_type`` is not in ``RULES``.
    """
    hparams = RULES[op_type].hparams
    return {key: _number(key, group[key]) for key in hparams if group.get(key) is not None}


def state_of(rule: Rule) -> dict[str, bool]:
    """The names of a rule's states: True where the state has the parameter's shape, False for a
    scalar.

    Found by a step of the real class on a tiny tensor, so that it follows torch.  No random numbers
    are drawn.
    """
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
    """The rule's own torch.optim class over these tensors, as one group.  They need not require
    gradients: set ``.grad``.

    Raises:
        ValueError: the rule's type is unknown, or torch refuses one of its numbers.
    """
    if rule.type not in RULES:
        raise ValueError(f"expected an optimizer op among {', '.join(RULES)}, got {rule.type!r}")
    cls: Callable[..., torch.optim.Optimizer] = RULES[rule.type].cls
    return cls(params, **rule.hparams, **rule.flags)


def set_hparams(optimizer: torch.optim.Optimizer, row: Mapping[str, Hparam]) -> None:
    """Writes a step's numbers into every group of the optimizer."""
    for group in optimizer.param_groups:
        group.update(row)


# ---- rules for rows ----


@dataclass(frozen=True, slots=True)
class RowRuleSpec:
    """One rule for rows: the numbers that a schedule may move, and the flags that never change."""

    hparams: tuple[str, ...]
    flags: tuple[str, ...] = ()


_ROW_ADAM = ("lr", "betas", "eps", "weight_decay")

ROW_RULES: Mapping[str, RowRuleSpec] = MappingProxyType(
    {
        "sgd": RowRuleSpec(("lr", "weight_decay"), ("maximize",)),
        "momentum": RowRuleSpec(
            ("lr", "momentum", "dampening", "weight_decay"), ("nesterov", "maximize")
        ),
        "adagrad": RowRuleSpec(
            ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"), ("maximize",)
        ),
        "rowwise_adagrad": RowRuleSpec(("lr", "weight_decay", "initial_accumulator_value", "eps")),
        "adam": RowRuleSpec(_ROW_ADAM, ("maximize",)),
        "adamw": RowRuleSpec(_ROW_ADAM, ("maximize",)),
        "lazy_adam": RowRuleSpec(("lr", "betas", "eps"), ("maximize",)),
        "ftrl": RowRuleSpec(("lr", "l1", "l2", "lr_power", "beta")),
    }
)
"""What rows may be updated by.  "momentum", "adam" and "adamw" are torch's dense rules: a row that a step does not touch moves by
that step all the same (its velocity, its decay), which is made up for when the row is next read or updated.  "lazy_adam" is
torch.optim.SparseAdam: only rows that are touched move.  "rowwise_adagrad" keeps one accumulator a row, the mean of its squared
gradients (as FBGEMM's and DLRM's EXACT_ROWWISE_ADAGRAD)."""
