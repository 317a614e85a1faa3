"""torch's own ops in a program: their schemas, and the ops that a program may not hold.

An op ``aten.mm`` is the overload ``torch.ops.aten.mm.default``, ``aten.add.Tensor`` the overload of
that name, with torch's own schema.

[Note: ops that are not accepted]  A program may come from a file that someone else wrote, so an op
must be a function of its arguments: it takes tensors, numbers and words, and gives tensors (or, for
the ``sym_`` ops, sizes).  An op that takes a storage, stream, generator or untyped value, or gives
nothing back, has no schema here at all, but for two that only check a tensor (``CHECKS``).  Among
the other ops these are refused:

- ``from_file`` reads and writes files;
- ``set_``, ``resize_`` and similar ops swap or grow the memory of a tensor that others hold;
- ``_reshape_alias``, ``_nested_*`` and ``_sparse_*_unsafe`` take sizes, strides or indices on trust
  and read beyond a buffer;
- pinning, plan caches and the like change the process and not a value; ``_print``, ``_test_*`` and
  ``_make_dep_token`` are internal to torch;
- ``item`` and ``_local_scalar_dense`` make a graph depend on data.
"""

from __future__ import annotations

import functools
import re

import torch
from torch._ops import OpOverload, OpOverloadPacket

from transpiler.ir.schema import (
    BOOLEAN,
    DEVICE,
    DTYPE,
    LAYOUT,
    MEMORY_FORMAT,
    NOTHING,
    REAL,
    SCALAR,
    SIZE,
    TEXT,
    VARIABLE,
    ArgumentKind,
    Parameter,
    Schema,
    either,
    many,
    optional,
)

_REFUSED = re.compile(
    r"from_file|_?set_?|set_data|_?resize.*|_copy_from.*|sparse_resize.*|record_stream|_?pin_memory"
    r"|is_pinned|_reshape_alias(_copy)?|_reshape_from_tensor|_nested_.*|_sparse_.*_unsafe|_cslt_.*"
    r"|_cufft_.*|_make_dep_token|_print|_test_.*|item|_local_scalar_dense|_debug_.*"
    r"|_propagate_xla_data|requires_grad_|_make_dual.*|_nnpack_available"
)
_PREFIX = "aten."
# ops without results, which raise where a tensor is invalid
CHECKS = frozenset({"aten._assert_async", "aten._assert_async.msg", "aten._linalg_check_errors"})

# A tensor argument may be a plain number, which torch wraps; a size stands wherever a number does.
_TENSOR = either(VARIABLE, SCALAR)
_KINDS = {
    "Tensor": _TENSOR,
    "number": either(SCALAR, VARIABLE),
    "int": SIZE,
    "float": either(REAL, VARIABLE),
    "bool": BOOLEAN,
    "str": TEXT,
    "ScalarType": DTYPE,
    "Layout": LAYOUT,
    "Device": DEVICE,
    "MemoryFormat": MEMORY_FORMAT,
}


def _kind(written: str, count: int | None) -> ArgumentKind:
    """The kind for one of torch's types.

    Args:
        written: the type as torch's schemas write it: "Optional[Tensor]".
        count: the N of ``int[N]``, where a single number is accepted for the list.
    """
    if match := re.fullmatch(r"Optional\[(.*)\]", written):
        return optional(_kind(match[1], count))
    if match := re.fullmatch(r"List\[(.*)\]", written):
        item = {"Tensor": VARIABLE, "Optional[Tensor]": optional(VARIABLE)}.get(match[1]) or _kind(
            match[1], None
        )
        return many(item) if count is None else either(many(item), item)
    return _KINDS.get(written, NOTHING)


@functools.lru_cache(maxsize=4096)
def aten_overload(op_type: str) -> OpOverload:
    """``"aten.mm"`` or ``"aten.add.Tensor"`` as torch's overload.

    Raises:
        ValueError: torch has no such op, or a program may not hold it (see [Note: ops that are not
            accepted]).
    """
    name, _, overload = op_type.removeprefix(_PREFIX).partition(".")
    if not op_type.startswith(_PREFIX) or not re.fullmatch(r"\w+", name) or overload == "default":
        raise ValueError(
            f"op {op_type!r}: expected aten.NAME or aten.NAME.OVERLOAD (the default overload has "
            "no second part)"
        )
    if _REFUSED.fullmatch(name):
        raise ValueError(
            f"op {op_type!r}: a program may not hold it, because it is not a function from "
            "tensors to tensors"
        )
    packet = getattr(torch.ops.aten, name, None)
    found = (
        getattr(packet, overload or "default", None)
        if isinstance(packet, OpOverloadPacket)
        else None
    )
    if not isinstance(found, OpOverload):
        raise ValueError(f"op {op_type!r}: torch {torch.__version__} has no such op")
    return found


def _gives_values(overload: OpOverload) -> bool:
    returned = [str(result.real_type) for result in overload._schema.returns]
    if str(overload._schema.name).startswith("aten::sym_"):
        return returned == ["int"]
    return any("Tensor" in written for written in returned) and all(
        written in ("Tensor", "List[Tensor]", "Optional[Tensor]", "int", "float")
        for written in returned
    )


@functools.lru_cache(maxsize=4096)
def aten_schema(op_type: str) -> Schema:
    """The schema of an aten op.

    Raises:
        ValueError: as :func:`aten_overload`, and for an op that gives no tensor.
    """
    overload = aten_overload(op_type)
    if op_type not in CHECKS and not _gives_values(overload):
        raise ValueError(f"op {op_type!r}: a program may not hold it, because it gives no tensor")
    parameters = {
        argument.name: Parameter(
            _kind(str(argument.real_type), getattr(argument, "N", None)),
            not argument.has_default_value(),
        )
        for argument in overload._schema.arguments
    }
    lists = sum("List" in str(result.real_type) for result in overload._schema.returns)
    results = len(overload._schema.returns)
    return Schema(parameters, None, results - lists) if lists else Schema(parameters, results)
