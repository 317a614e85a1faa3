"""The arguments of an op that its text leaves out: those with their usual values."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from types import MappingProxyType

from transpiler.ir.ops import aten_overload, is_optimizer
from transpiler.ir.rules import RULES

# of ops of ours: the defaults of torch's SGD and of a strategy; an argument that is None here is
# always said
_OWN: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "dgc": {
            **{"group": 0, "momentum": None, "weight_decay": 0.0, "nesterov": False},
            **{"maximize": False, "rampup_begin_step": 0, "rampup_step": 1, "sparsity": None},
        }
    }
)


@functools.lru_cache(maxsize=4096)
def defaults(op_type: str) -> Mapping[str, object]:
    """The usual values of an op's arguments, by name; those that have none are left out."""
    if op_type.startswith("aten."):
        arguments = aten_overload(op_type)._schema.arguments
        return {
            argument.name: argument.default_value
            for argument in arguments
            if argument.has_default_value()
        }
    if is_optimizer(op_type) and op_type not in RULES:  # of rows, or registered
        return {"group": 0}
    if is_optimizer(op_type):
        parameters = inspect.signature(RULES[op_type].cls).parameters.items()
        return {
            "group": 0,
            **{name: parameter.default for name, parameter in parameters if name != "lr"},
        }
    return _OWN.get(op_type, {})
