"""The compiler of the tables' arithmetic: numba, without the GIL, with a cache on disk.

[Note: kept kernels]  numba keeps a compiled function beside its source and compiles anew when that
one file has changed.  Our kernels call each other across files, so a change in one must also end
what was kept for the others: every kernel is kept under a digest of all the files in ``SOURCES``.
Where nothing can be written (a read-only container) nothing is kept, and every process compiles
what it uses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

SOURCES = (
    "copies.py",
    "deferred.py",
    "ids.py",
    "index.py",
    "kernels.py",
    "lifecycle.py",
    "rows.py",
    "rules.py",
    "xxh3.py",
)

Array = npt.NDArray[Any]
Function = TypeVar("Function", bound=Callable[..., Any])


@cache
def _digest() -> str:
    """A digest of all source files that have kernels."""
    found = hashlib.sha256()
    for name in SOURCES:
        path = Path(__file__).with_name(name)
        found.update(path.read_bytes() if path.exists() else b"")
    return found.hexdigest()


def kernel(function: Function) -> Function:
    """Compiles the decorated function on its first call with arguments of some types.

    It runs without the GIL and never raises.  See [Note: kept kernels].
    """
    try:
        compiled: Any = njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:  # there is no directory to keep it in
        return cast(Function, njit(nogil=True, error_model="numpy")(function))
    kept: Any = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
    if hasattr(kept, "_source_stamp"):  # see [Note: kept kernels]
        kept._source_stamp = (kept._source_stamp, _digest())
    return cast(Function, compiled)


def _prefetch(context: Any, address: Any) -> Any:
    """Prefetches the cache line at an address, without waiting for it.

    ``address``: an integer; it need not be mapped.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        flag = ir.IntType(32)
        signature_of = ir.FunctionType(ir.VoidType(), [pointer, flag, flag, flag])
        declared = builder.module.declare_intrinsic("llvm.prefetch", [pointer], signature_of)
        where = builder.inttoptr(arguments[0], pointer)
        # a read, wanted in every cache, of data
        builder.call(declared, [where, flag(0), flag(3), flag(1)])
        return context.get_dummy_value()

    return types.void(types.uintp), generate


def _copy(context: Any, target: Any, source: Any, size: Any) -> Any:
    """Copies ``size`` bytes between two addresses that do not overlap; quickest where ``size`` is a
    constant.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        declared = builder.module.declare_intrinsic(
            "llvm.memcpy", [pointer, pointer, ir.IntType(64)]
        )
        into, start = (
            builder.inttoptr(arguments[0], pointer),
            builder.inttoptr(arguments[1], pointer),
        )
        builder.call(declared, [into, start, arguments[2], ir.IntType(1)(0)])
        return context.get_dummy_value()

    return types.void(types.uintp, types.uintp, types.intp), generate


def _loads(bits: int) -> Any:
    """The whole number of so many bits at an address, which need not be aligned; as a uint64."""

    def _load(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            where = builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer())
            return builder.zext(builder.load(where, align=1), ir.IntType(64))

        return types.uint64(types.uintp), generate

    return intrinsic(_load)


def _folded_product(context: Any, one: Any, other: Any) -> Any:
    """The product of two uint64, 128 bits: its lower half xor its upper half."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide, word = ir.IntType(128), ir.IntType(64)
        product = builder.mul(*(builder.zext(each, wide) for each in arguments))
        upper = builder.lshr(product, wide(64))
        return builder.xor(builder.trunc(product, word), builder.trunc(upper, word))

    return types.uint64(types.uint64, types.uint64), generate


prefetch: Any = intrinsic(_prefetch)
copy: Any = intrinsic(_copy)
load, load_half = _loads(64), _loads(32)
folded_product: Any = intrinsic(_folded_product)
