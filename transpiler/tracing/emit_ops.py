"""The op and the arguments of a graph node: torch's ops, arithmetic on sizes, plain values."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from transpiler.ir.graph import Argument, Ref, Symbol

SIZE_OPS: Mapping[Any, str] = MappingProxyType(
    {
        operator.add: "sym.add",
        operator.sub: "sym.sub",
        operator.mul: "sym.mul",
        operator.floordiv: "sym.floordiv",
        operator.truediv: "sym.truediv",
        operator.mod: "sym.mod",
        operator.pow: "sym.pow",
        pow: "sym.pow",
        operator.neg: "sym.neg",
        torch.sym_max: "sym.max",
        torch.sym_min: "sym.min",
        torch.sym_float: "sym.float",
        torch.sym_int: "sym.int",
        math.ceil: "sym.ceil",
        math.floor: "sym.floor",
        math.sqrt: "sym.sqrt",
        torch._sym_sqrt: "sym.sqrt",  # type: ignore[attr-defined]  # made at run time
    }
)
ALIASES = ("aten::detach", "aten::alias")


def schema_name(node: fx.Node) -> str:
    """``"aten::view"`` for a node that calls the op of that name; "" for one that calls no op."""
    return node.target._schema.name if isinstance(node.target, OpOverload) else ""


def is_alias(node: fx.Node) -> bool:
    """Whether a node gives its argument a second name."""
    return schema_name(node) in ALIASES


def argument_of(value: Any, variable_of: Mapping[fx.Node, str], device: torch.device) -> Argument:
    """An argument of a node as a program holds it.

    Args:
        variable_of: the names of the variables that nodes have become.
        device: the model's, which a program calls ``executor``.

    Raises:
        TypeError: a program cannot hold the value.
    """
    if isinstance(value, fx.Node):
        return Ref(variable_of[value])
    if isinstance(value, list | tuple):
        return tuple(argument_of(item, variable_of, device) for item in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.device):
        same = value.type == device.type and value.index in (None, device.index)
        return Symbol("device", "executor" if same else str(value))
    for kind in (torch.dtype, torch.layout, torch.memory_format):
        if isinstance(value, kind):
            return Symbol(kind.__name__, str(value).removeprefix("torch."))
    raise TypeError(f"a program cannot hold an argument of type {type(value).__name__}")


def aten_call(
    node: fx.Node, argument: Callable[[Any], Argument]
) -> tuple[str, dict[str, Argument]]:
    """The type and the arguments of a call of one of torch's ops, without those at their default.

    Args:
        argument: turns a node's argument into a program's.

    Raises:
        TypeError: the op is not torch's own, or it changes a constant.
    """
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        raise TypeError(f"a program holds torch's own (aten) ops only, and the step uses {target}")
    schema = target._schema
    if schema.name == "aten::sym_size":
        return "sym.size", {"x": argument(node.args[0]), "dim": argument(node.args[1])}
    positional = zip((each.name for each in schema.arguments), node.args, strict=False)
    given = dict(positional) | node.kwargs
    for each in schema.arguments:
        if each.alias_info is not None and each.alias_info.is_write:
            _refuse_constant(node, given.get(each.name))
    defaults = {
        each.name: each.default_value for each in schema.arguments if each.has_default_value()
    }
    # pin_memory is about where host memory lies, and means nothing to a program
    kept = {
        key: value
        for key, value in given.items()
        if key != "pin_memory" and not _is_default(key, value, defaults)
    }
    overload = f".{schema.overload_name}" if schema.overload_name else ""
    name = schema.name.replace("::", ".") + overload
    return name, {key: argument(value) for key, value in kept.items()}


def _refuse_constant(node: fx.Node, changed: Any) -> None:
    if isinstance(changed, fx.Node) and changed.op == "get_attr":
        raise TypeError(
            f"{node.target} changes a tensor that is neither an input nor a parameter or buffer of "
            "the model; register it as a buffer"
        )


def _is_default(name: str, value: Any, defaults: Mapping[str, Any]) -> bool:
    if name not in defaults or isinstance(value, fx.Node | list | tuple):
        return False
    default = defaults[name]
    return type(default) is type(value) and bool(default == value)
