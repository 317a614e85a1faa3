"""``py_func``: a step calls Python code that a program cannot hold, and the program calls it too.

The op here runs on fake tensors alone; programs have a kernel of their own
(ir/python_functions.py), and eager code calls the function itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from transpiler.ir.python_functions import PY_FUNC, Function, call, register
from transpiler.tracing.tables import NAMESPACE

_library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's own
_library.define(f"{PY_FUNC}(str func, Tensor[] x, Tensor[] like) -> Tensor[]")


def _fake(func: str, x: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(each, memory_format=torch.contiguous_format) for each in like]


torch.library.register_fake(f"{NAMESPACE}::{PY_FUNC}", _fake, lib=_library)


def py_func(
    func: Function,
    x: Tensor | Sequence[Tensor],
    out: Tensor | Sequence[Tensor],
    backward_func: Function | None = None,
) -> Any:
    """Calls a Python function in a step, as one op of the captured program.

    ``capture`` cannot look into NumPy, a library or code that branches on values; this hides the
    code in an op.  It runs on trainers only: servers refuse the op, and a program with it is not
    saved, because a program holds a function's name and no code.  Outside a capture the function
    is simply called.

    Args:
        func: takes the tensors of ``x``, detached, and returns a tensor or an array, or a tuple of
            them.  It must not change its arguments, and must return the same for the same
            arguments.  One at the top level of a module has the same name in every process.
        x: tensors of the step.
        out: tensors with the shapes and dtypes of the results; their values do not matter.
        backward_func: takes the tensors of ``x``, the results and the gradients of the results;
            returns the gradients of ``x``.  None: nothing before the op gets a gradient from it.

    Returns:
        The result; a tuple of them where ``out`` is a list or a tuple.

    Raises:
        TypeError: an argument has another type.
        ValueError: the function gives another number of results, or other shapes or dtypes; or
            ``x`` or ``out`` is empty.

    Example:
        >>> import numpy as np
        >>> import torch
        >>> from pserver import py_func
        >>> def cube(x):
        ...     return np.power(x.numpy(), 3)
        >>> def cube_grad(x, y, dy):
        ...     return dy * 3 * x * x
        >>> x = torch.tensor([2.0], requires_grad=True)
        >>> y = py_func(cube, x, out=x, backward_func=cube_grad)
        >>> y.backward()
        >>> y.item(), x.grad.item()
        (8.0, 12.0)
    """
    for what, function in (("func", func), ("backward_func", backward_func)):
        if not callable(function) and (what == "func" or function is not None):
            raise TypeError(f"py_func: {what}: expected a function, got {function!r}")
    given, like = _tensors("x", x), _tensors("out", out)
    if backward_func is None:
        with torch.no_grad():
            found = _run(func, given, like)
    else:
        functions = (func, backward_func, len(given))
        found = PyFunc.apply(functions, *given, *like)  # type: ignore[no-untyped-call]  # torch's own
    return found[0] if isinstance(out, Tensor) else found


class PyFunc(torch.autograd.Function):
    """A function with a backward function, in autograd."""

    @staticmethod
    def forward(
        ctx: Any, functions: tuple[Function, Function, int], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Calls the function."""
        func, ctx.backward_func, count = functions
        given, like = tensors[:count], tensors[count:]
        found = _run(func, given, [each.detach() for each in like])
        ctx.save_for_backward(*given, *found)
        ctx.count, ctx.rest = count, len(like)
        ctx.mark_non_differentiable(*(each for each in found if not each.is_floating_point()))
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Calls the backward function."""
        given = ctx.saved_tensors[: ctx.count]
        found = _run(ctx.backward_func, [*ctx.saved_tensors, *grads], given)
        return (None, *found, *[None] * ctx.rest)


def _run(func: Function, x: Sequence[Tensor], like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The results; inside a trace the op is added to it instead."""
    if any(isinstance(each, FakeTensor) for each in (*x, *like)):
        return tuple(torch.ops.pserver.py_func(register(func), list(x), list(like)))
    name = str(getattr(func, "__qualname__", type(func).__qualname__))
    return call(func, name, x, like)


def _tensors(what: str, given: Any) -> tuple[Tensor, ...]:
    found = (given,) if isinstance(given, Tensor) else given
    if not isinstance(found, Sequence) or not all(isinstance(each, Tensor) for each in found):
        raise TypeError(f"py_func: {what}: expected a tensor or several, got {given!r}")
    if not found:
        raise ValueError(f"py_func: {what}: expected a tensor or several, got none")
    return tuple(found)


def call_of(node: fx.Node) -> tuple[str, Mapping[str, Any]] | None:
    """The op's type and arguments, for a node of such an op; None for others."""
    if not isinstance(node.target, OpOverload) or node.target.namespace != NAMESPACE:
        return None
    schema = node.target._schema
    if schema.name.partition("::")[2] != PY_FUNC:
        return None
    named = dict(zip((each.name for each in schema.arguments), node.args, strict=False))
    return PY_FUNC, {**named, **node.kwargs}
