"""Ops by the names that users write in ``custom_white_list`` and ``custom_black_list``.

A name is that of a function of torch, without underscores around it: "softmax" is
``torch.softmax``, ``F.softmax``, ``x.softmax()`` and aten's ``_softmax``.  Names of the original
that have an obvious counterpart are taken for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch.overrides import get_overridable_functions

from transpiler.ir.close_names import close_names

# The original's names, and torch's.
COUNTERPARTS: Mapping[str, str] = MappingProxyType(
    {
        "matmul_v2": "matmul",
        "fc": "linear",
        "elementwise_add": "add",
        "elementwise_sub": "sub",
        "elementwise_mul": "mul",
        "elementwise_div": "div",
        "elementwise_pow": "pow",
        "reduce_sum": "sum",
        "reduce_mean": "mean",
        "softmax_with_cross_entropy": "cross_entropy",
        "sigmoid_cross_entropy_with_logits": "binary_cross_entropy_with_logits",
        "lookup_table": "embedding",
        "lookup_table_v2": "embedding",
        "conv2d_transpose": "conv_transpose2d",
        "conv3d_transpose": "conv_transpose3d",
        "concat": "cat",
        "p_norm": "norm",
    }
)
# An operator with its operands exchanged is the same op.
_EXCHANGED = MappingProxyType(
    {f"r{name}": name for name in ("add", "sub", "mul", "div", "truediv", "pow", "matmul")}
)
_ACCESS = frozenset({"__get__", "__set__", "__delete__"})  # of a tensor's attributes


@cache
def _known() -> frozenset[str]:
    functions = (each for own in get_overridable_functions().values() for each in own)
    names = {op_name(function) for function in functions} | set(dir(torch.ops.aten))
    return frozenset(name.strip("_") for name in names if name)


def known_op(owner: str, name: str) -> str:
    """The op of a name that a user wrote.

    Args:
        owner: the list's full name, for the error.

    Raises:
        ValueError: torch has no op of this name; the message has close ones.

    Example:
        >>> known_op("custom_white_list", "elementwise_add")
        'add'
    """
    found = COUNTERPARTS.get(name, name)
    if found not in _known():
        raise ValueError(
            f"{owner}: expected names of torch's ops, got {name!r}; close ones are "
            f"{close_names(name, sorted({*_known(), *COUNTERPARTS}))}"
        )
    return found


def op_name(function: Any) -> str:
    """The name of a function of torch, a method or an overload of aten; "" for an access to an
    attribute of a tensor, which is no op.
    """
    own = str(getattr(function, "__name__", ""))
    if own in _ACCESS:
        return ""
    name = own.partition(".")[0].strip("_")
    return _EXCHANGED.get(name, name)


def is_in_place(function: Any) -> bool:
    """Whether a function changes its first argument, whose dtype therefore decides."""
    name = str(getattr(function, "__name__", "")).partition(".")[0]
    return (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__iadd__")
