"""Settings of single parameters beside the model: first values, learning rate, regularization.

An attribute becomes keys of a parameter group, which every optimizer of torch.optim and every
scheduler understands, so it acts eagerly, in a captured program and on servers alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from transpiler.ir.close_names import close_names
from transpiler.ir.tables import Initial
from transpiler.plan.settings import check_flag

Initializer = Initial | Callable[[Tensor], Any]


@dataclass(frozen=True, slots=True)
class L2Decay:
    """Adds ``coefficient`` times a parameter to its gradient: ``weight_decay`` of a group.

    AdamW shrinks the parameter itself by it, as torch's does, and not by way of the gradient.

    Attributes:
        coefficient: 0 or more; 0 turns off the optimizer's own.

    Example:
        >>> from pserver import L2Decay
        >>> L2Decay(0.1).coefficient
        0.1
    """

    coefficient: float = 0.0

    def __post_init__(self) -> None:
        _check_factor("L2Decay", self.coefficient)


@dataclass(frozen=True, slots=True)
class ParamAttr:
    """Settings for some parameters of a model.

    Attributes:
        name: a pattern of parameter names ("emb.*", "*.bias"); None: for one parameter, as an
            argument of ``create_parameter``.
        initializer: gives the first values: Constant, Uniform or Normal of ``trainer``, or a
            function that fills a tensor in place (those of torch.nn.init); None: as they are.
        learning_rate: a factor of the optimizer's, 0 or more.
        regularizer: replaces the optimizer's ``weight_decay``; None: the optimizer's.
        trainable: False freezes the parameters.
        need_clip: False leaves their gradients out of ``grad_clip``, also out of a global norm.

    Raises:
        TypeError: a value has another type.
        ValueError: it is out of range.

    Example:
        >>> import torch
        >>> from pserver import L2Decay, ParamAttr, parameter_groups
        >>> biases = ParamAttr("*bias", learning_rate=2.0, regularizer=L2Decay(0.0))
        >>> groups = parameter_groups(torch.nn.Linear(3, 1), [biases], learning_rate=0.1)
        >>> optimizer = torch.optim.SGD(groups, lr=0.1, weight_decay=0.01)
        >>> [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
        [(0.1, 0.01), (0.2, 0.0)]
    """

    name: str | None = None
    initializer: Initializer | None = None
    learning_rate: float = 1.0
    regularizer: L2Decay | None = None
    trainable: bool = True
    need_clip: bool = True

    def __post_init__(self) -> None:
        if self.name is not None and not isinstance(self.name, str):
            raise TypeError(f"ParamAttr: name: expected text, got {self.name!r}")
        if self.name == "":
            raise ValueError("ParamAttr: name: expected a pattern, got ''")
        check_initializer("ParamAttr: initializer", self.initializer)
        _check_factor("ParamAttr: learning_rate", self.learning_rate)
        if self.regularizer is not None and not isinstance(self.regularizer, L2Decay):
            raise TypeError(
                f"ParamAttr: regularizer: expected an L2Decay or None, got {self.regularizer!r}"
            )
        check_flag("ParamAttr: trainable", self.trainable)
        check_flag("ParamAttr: need_clip", self.need_clip)

    def group(self, learning_rate: float) -> dict[str, Any]:
        """The keys of a parameter group with this attribute.

        Args:
            learning_rate: the optimizer's.
        """
        keys: dict[str, Any] = {"lr": learning_rate * self.learning_rate}
        if self.regularizer is not None:
            keys["weight_decay"] = float(self.regularizer.coefficient)
        if not self.need_clip:
            keys["need_clip"] = False
        return keys


def parameter_groups(
    module: nn.Module, attrs: Sequence[ParamAttr] = (), *, learning_rate: float
) -> list[dict[str, Any]]:
    """The parameters of a module as groups for a torch optimizer.

    The first attribute whose pattern matches a parameter's name applies to it; without one, the
    attribute that ``create_parameter`` gave it.  Initializers fill their parameters now, and
    parameters that are not trainable no longer require gradients and are in no group.

    Args:
        attrs: each with a name.
        learning_rate: the optimizer's, which factors multiply.

    Returns:
        A group for each way in which parameters are trained, in the order of the module's
        parameters.

    Raises:
        TypeError: an argument has another type.
        ValueError: a pattern matches no parameter, or a parameter has no shape yet.

    Example:
        >>> import torch
        >>> from pserver import ParamAttr, parameter_groups
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
        >>> groups = parameter_groups(model, [ParamAttr("0.*", trainable=False)], learning_rate=1.0)
        >>> [list(tensor.shape) for group in groups for tensor in group["params"]]
        [[1, 2], [1]]
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"parameter_groups: expected a module, got {type(module).__name__}")
    _check_factor("parameter_groups: learning_rate", learning_rate)
    named = dict(module.named_parameters())
    _check_patterns(attrs, named)
    groups: dict[str, dict[str, Any]] = {}
    for name, parameter in named.items():
        attr = next((each for each in attrs if fnmatchcase(name, str(each.name))), None)
        if attr is not None and attr.initializer is not None:
            _check_fillable(name, parameter)
            fill(parameter, attr.initializer)
        attr = attr or getattr(parameter, "attr", None) or ParamAttr()
        parameter.requires_grad_(parameter.requires_grad and attr.trainable)
        if parameter.requires_grad:
            keys = attr.group(learning_rate)
            group = groups.setdefault(str(keys), {"params": [], **keys})
            group["params"].append(parameter)
    return list(groups.values())


def fill(tensor: Tensor, initializer: Initializer) -> None:
    """Gives a tensor its first values, in place, by torch's random generator."""
    with torch.no_grad():
        if not isinstance(initializer, Initial):
            initializer(tensor)
        elif initializer.kind == "constant":
            tensor.fill_(initializer.low)
        elif initializer.kind == "uniform":
            tensor.uniform_(initializer.low, initializer.high)
        else:
            tensor.normal_(initializer.low, initializer.high)


def check_initializer(what: str, value: object) -> None:
    """Checks an initializer, or None.

    Raises:
        TypeError: it is neither.
    """
    if value is not None and not isinstance(value, Initial) and not callable(value):
        raise TypeError(
            f"{what}: expected Constant, Uniform, Normal or a function that fills a tensor, got "
            f"{value!r}"
        )


def unclipped(groups: Iterable[dict[str, Any]]) -> set[Tensor]:
    """The parameters of an optimizer's groups whose gradients ``grad_clip`` leaves as they are."""
    return {
        parameter
        for group in groups
        if not group.get("need_clip", True)
        for parameter in group["params"]
    }


def _check_factor(what: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{what}: expected a number, got {value!r}")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{what}: expected a number of 0 or more, got {value}")


def _check_patterns(attrs: Sequence[ParamAttr], named: dict[str, nn.Parameter]) -> None:
    if isinstance(attrs, str) or not isinstance(attrs, Sequence):
        raise TypeError(f"parameter_groups: expected a list of ParamAttr, got {attrs!r}")
    for attr in attrs:
        if not isinstance(attr, ParamAttr):
            raise TypeError(f"parameter_groups: expected a ParamAttr, got {attr!r}")
        if attr.name is None:
            raise ValueError(f"parameter_groups: expected a ParamAttr with a name, got {attr}")
        if not any(fnmatchcase(name, attr.name) for name in named):
            near = close_names(attr.name, named)
            raise ValueError(
                f"parameter_groups: {attr.name!r} matches no parameter; close names: {near}"
            )


def _check_fillable(name: str, parameter: Tensor) -> None:
    if callable(getattr(parameter, "waiting", None)):  # a table's proxy parameter
        raise ValueError(
            f"parameter_groups: {name!r}: expected no initializer for a table, whose rows begin as "
            "its init says"
        )
    if isinstance(parameter, nn.UninitializedParameter):
        raise ValueError(
            f"parameter_groups: {name!r} has no shape before the module's first forward"
        )
