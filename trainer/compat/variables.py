"""Variables that a script creates itself, by the original's calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.compat.scope import global_scope
from transpiler.ir.schema import DTYPES
from transpiler.param_attr import Initializer, ParamAttr, check_initializer, fill
from transpiler.plan.settings import check_flag


def create_parameter(
    shape: Sequence[int],
    dtype: str | torch.dtype = "float32",
    name: str | None = None,
    attr: ParamAttr | None = None,
    is_bias: bool = False,
    default_initializer: Initializer | None = None,
) -> nn.Parameter:
    """A parameter for a module: assigned to an attribute, it has the attribute's name in programs.

    Args:
        shape: sizes.
        dtype: a floating-point one.
        name: a name in the current scope, beside the module's; None: none.
        attr: what holds for it; ``parameter_groups`` finds it where no pattern matches.  Its name
            is the scope's where ``name`` is None.  A deep copy of the module loses it.
        is_bias: begins with 0 instead of Xavier's uniform values.
        default_initializer: first values, where ``attr`` gives none.

    Returns:
        The parameter, on the CPU; it requires a gradient unless ``attr`` says otherwise.

    Raises:
        TypeError: an argument has another type.
        ValueError: a size is below 1, the dtype is no floating-point one, or the name is taken.

    Example::

        class Scale(nn.Module):
            def __init__(self):
                super().__init__()
                self.factor = create_parameter([4], attr=ParamAttr(learning_rate=0.1))

            def forward(self, x):
                return self.factor * x

        groups = parameter_groups(Scale(), learning_rate=1.0)    # lr 0.1
    """
    kind = _dtype("create_parameter", dtype)
    if not kind.is_floating_point:
        raise ValueError(f"create_parameter: dtype: expected a floating-point one, got {dtype!r}")
    if attr is not None and not isinstance(attr, ParamAttr):
        raise TypeError(f"create_parameter: attr: expected a ParamAttr or None, got {attr!r}")
    check_flag("create_parameter: is_bias", is_bias)
    check_initializer("create_parameter: default_initializer", default_initializer)
    attr = attr or ParamAttr()
    name = attr.name if name is None else name
    value = torch.zeros(_shape("create_parameter", shape), dtype=kind)
    initializer = attr.initializer or default_initializer
    if initializer is not None:
        fill(value, initializer)
    elif not is_bias:
        nn.init.xavier_uniform_(value if value.dim() > 1 else value.view(1, -1))
    parameter = nn.Parameter(value, attr.trainable)
    parameter.attr = attr  # type: ignore[attr-defined]  # where parameter_groups finds it
    if name is not None:
        _put("create_parameter", name, parameter)
    return parameter


def create_global_var(
    shape: Sequence[int],
    value: float,
    dtype: str | torch.dtype,
    persistable: bool = True,
    *,
    name: str,
) -> Tensor:
    """A tensor of one value, under a name in the current scope.

    Programs that hold no values of their own take it for the variable of this name.  A module has
    it as a buffer, if the script registers it.

    Args:
        shape: sizes.
        value: of all elements.
        dtype: "float32", "int64", ...
        persistable: True: a variable of a scope stays until the scope goes.
        name: in the scope.

    Returns:
        The tensor, on the CPU.

    Raises:
        TypeError: an argument has another type.
        ValueError: a size is below 1, the name is taken, or ``persistable`` is False.

    Example::

        with scope_guard(Scope()):
            counter = create_global_var([1], 0, "int64", name="counter")
            counter += 1
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"create_global_var: value: expected a number, got {value!r}")
    if not check_flag("create_global_var: persistable", persistable):
        raise ValueError(
            "create_global_var: persistable: expected True, for a variable of a scope stays until "
            "the scope goes"
        )
    kind = _dtype("create_global_var", dtype)
    tensor = torch.full(_shape("create_global_var", shape), value, dtype=kind)
    _put("create_global_var", name, tensor)
    return tensor


def _shape(who: str, shape: Any) -> tuple[int, ...]:
    if isinstance(shape, str) or not isinstance(shape, Sequence):
        raise TypeError(f"{who}: shape: expected a list of sizes, got {shape!r}")
    for size in shape:
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"{who}: shape: expected whole numbers, got {size!r}")
        if size < 1:
            raise ValueError(f"{who}: shape: expected sizes of 1 or more, got {size}")
    return tuple(shape)


def _dtype(who: str, dtype: Any) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if not isinstance(dtype, str):
        raise TypeError(f"{who}: dtype: expected a dtype or its name, got {dtype!r}")
    if dtype not in DTYPES:
        raise ValueError(f"{who}: dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    return DTYPES[dtype]


def _put(who: str, name: Any, tensor: Tensor) -> None:
    if not isinstance(name, str):
        raise TypeError(f"{who}: name: expected text, got {name!r}")
    if not name or "@" in name:
        raise ValueError(f"{who}: name: expected one that holds no '@', got {name!r}")
    try:
        global_scope().put(name, tensor)
    except ValueError as error:
        raise ValueError(f"{who}: name: {error}") from None
