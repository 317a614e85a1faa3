"""``py_func``: an op that calls a Python function of this process.

[Note: a name, never code]  A program holds no code, so the op holds a name.  The process that
captured the program knows the function of that name, as long as it lives; no other process does.
So servers refuse such an op, and a program with one is not saved to a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from transpiler.ir.schema import NAME, VARIABLES, Parameter, Schema

PY_FUNC = "py_func"
WHY_NOT = "it calls Python code of the process that captured it, which a program does not hold"
Function = Callable[..., Any]

SCHEMAS: Mapping[str, Schema] = MappingProxyType(
    {
        # the results of func(*x), each of the shape and dtype of one of like
        PY_FUNC: Schema(
            MappingProxyType(
                {"func": Parameter(NAME), "x": Parameter(VARIABLES), "like": Parameter(VARIABLES)}
            ),
            None,
            1,
        )
    }
)
_functions: dict[str, Function] = {}


def register(function: Function) -> str:
    """The name of a function in programs; a second one of its name gets a number.

    It is kept as long as the process lives.
    """
    wanted = str(getattr(function, "__qualname__", type(function).__qualname__))
    name, number = wanted, 1
    while name in _functions and _functions[name] != function:
        number += 1
        name = f"{wanted}#{number}"
    _functions[name] = function
    return name


def call(
    function: Function, name: str, x: Sequence[Tensor], like: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Calls a function of tensors, and gives its results as tensors of their own.

    Args:
        name: of the function, for messages.
        like: of the shape and dtype of each result.

    Raises:
        ValueError: the results are not like ``like``; the message says what came.
    """
    with torch.no_grad():
        found = function(*(tensor.detach() for tensor in x))
        found = found if isinstance(found, tuple | list) else (found,)
        if len(found) != len(like):
            raise ValueError(f"py_func: {name}: expected {len(like)} results, got {len(found)}")
        return tuple(
            _result(name, index, each, wanted)
            for index, (each, wanted) in enumerate(zip(found, like, strict=True))
        )


def _result(name: str, index: int, found: Any, wanted: Tensor) -> Tensor:
    try:
        value = torch.as_tensor(found)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = type(found).__name__
        raise ValueError(
            f"py_func: {name}: result {index}: expected a tensor or an array, got {kind}"
        ) from error
    if (value.shape, value.dtype) != (wanted.shape, wanted.dtype):
        raise ValueError(
            f"py_func: {name}: result {index}: expected {wanted.dtype} {list(wanted.shape)}, got "
            f"{value.dtype} {list(value.shape)}"
        )
    # in memory of its own: a function may return what it was given
    return torch.empty_like(wanted, memory_format=torch.contiguous_format).copy_(value)


def _kernel(op: Any, func: str, x: Sequence[Tensor], like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    if func not in _functions:
        raise ValueError(
            f"py_func: expected the function {func!r}, which only the process has that captured "
            "the program"
        )
    return call(_functions[func], func, x, like)


def expect_results(op: Any) -> str:
    """The error in the number of an op's results; "" if there is none."""
    wanted, got = len(op.arguments["like"]), len(op.outputs)
    return "" if got == wanted else f"argument 'like': expected {got}, one a result, got {wanted}"


KERNELS: Mapping[str, Callable[..., Any]] = MappingProxyType({PY_FUNC: _kernel})


def refuse(who: str, ops: Iterable[Any]) -> None:
    """Checks that no op calls Python code.

    Args:
        who: the caller that refuses, for messages.

    Raises:
        ValueError: an op does; the message says which function, and the line of the step.
    """
    for op in ops:
        if op.type == PY_FUNC:
            place = f" ({op.location})" if op.location else ""
            raise ValueError(
                f"{who}: op 'py_func' of {op.arguments['func']!r}{place}: expected no such op: "
                f"{WHY_NOT}"
            )
