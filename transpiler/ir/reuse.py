"""Element-wise ops that write over an operand, so that a program holds fewer tensors at a time.

An op may do so where its operand was made in the same run of ops, nothing else can see its memory,
and no later op reads it.  Its arithmetic is the same, so every value is, to the bit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch

from transpiler.ir.aten_ops import aten_overload
from transpiler.ir.block import Op, Ref, Variable

# besides element-wise ones: ops whose result is memory of its own
_FRESH = frozenset({"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.convolution"})


def reusing(
    ops: Sequence[Op], variables: Mapping[str, Variable], kept: Collection[str]
) -> list[Op]:
    """The ops, with some of them made in place.

    Args:
        ops: in the order in which they run.
        variables: of the program.
        kept: variables whose values are wanted afterwards.
    """
    last = {name: place for place, op in enumerate(ops) for name in op.inputs}
    own: set[str] = set()  # variables whose memory nothing else sees
    found: list[Op] = []
    for place, op in enumerate(ops):
        fresh = _is_fresh(op)
        operand = op.arguments.get("self")
        if not fresh:
            own -= {*op.inputs, *op.outputs}  # a view may come of it
        elif (
            isinstance(operand, Ref)
            and operand.name in own
            and operand.name not in kept
            and last[operand.name] == place
            and list(op.inputs).count(operand.name) == 1
            and _alike(variables[operand.name], variables[op.outputs[0]])
            and (name := _in_place(op.type))
        ):
            own.discard(operand.name)
            op = replace(op, type=name)
        if fresh:
            own.add(op.outputs[0])
        found.append(op)
    return found


def _is_fresh(op: Op) -> bool:
    """Whether the op gives one tensor with memory of its own, and writes to none."""
    if op.type in _FRESH:
        return True
    if not op.type.startswith("aten.") or len(op.outputs) != 1:
        return False
    overload = aten_overload(op.type)
    schema = overload._schema
    return (
        torch.Tag.pointwise in overload.tags
        and all(each.alias_info is None for each in (*schema.arguments, *schema.returns))
        and not overload.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    )


def _in_place(kind: str) -> str:
    """The type of the op that writes over ``self``; "" where there is none."""
    name, dot, overload = kind.removeprefix("aten.").partition(".")
    try:
        found = aten_overload(f"aten.{name}_{dot}{overload}")
    except ValueError:
        return ""
    first = found._schema.arguments[0]
    writes = first.name == "self" and first.alias_info is not None and first.alias_info.is_write
    return f"aten.{name}_{dot}{overload}" if writes else ""


def _alike(one: Variable, other: Variable) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype)
