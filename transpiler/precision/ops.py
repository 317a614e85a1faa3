"""The ops of the user's lists run in 16 or 32 bits, inside ``torch.autocast``.

[Note: ops inside functions]  The lists are applied above autograd and autocast, where a cast is an
op like any other, with its own backward.  torch calls a mode for a function such as ``F.softmax``,
and then no more for what this calls: a listed op inside ``F.multi_head_attention_forward`` would be
missed.  So a function of torch.nn.functional that is not listed itself runs with a copy of its body
in which the question "is somebody overriding this?" is answered with no, and the mode sees the ops
in it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from transpiler.precision.op_names import is_in_place, op_name

SIXTEEN = (torch.float16, torch.bfloat16)
# ops whose further arguments are statistics that they write: only the first one is cast
_KEEP_STATISTICS = frozenset(
    {"batch_norm", "instance_norm", "native_batch_norm", "cudnn_batch_norm"}
)
_CONVERSIONS = frozenset({"to", "type", "float", "double", "half", "bfloat16"})
_ASKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_OPENED = ("torch.nn.functional", "torch.functional")


class OpCasts(TorchFunctionMode):
    """Runs listed ops in 16 or 32 bits, while it is entered.

    Args:
        dtype: of ops in 16 bits.
        device: the type of the device, for torch.autocast.
        white, black: names of ops that run in 16 bits, and in 32.

    Attributes:
        kept: tensors, by id, whose ops run in 32 bits.
        rest: the dtype of ops that no list names; None: they run as they would without the mode.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: str,
        white: Collection[str],
        black: Collection[str],
    ) -> None:
        super().__init__()
        self._dtype, self._device, self._white, self._black = dtype, device, white, black
        self._opening: set[FunctionType] = set()
        self.kept: Collection[int] = ()
        self.rest: torch.dtype | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """See torch.overrides."""
        kwargs = dict(kwargs or {})
        target = self._target(func, args, kwargs)
        if target is None:
            if isinstance(func, FunctionType) and func.__module__ in _OPENED:
                return self._open(func, args, kwargs)
            return func(*args, **kwargs)
        with torch.autocast(self._device, enabled=False):
            if op_name(func) in _KEEP_STATISTICS:
                return func(cast(args[0], target), *args[1:], **kwargs)
            return func(*cast(args, target), **cast(kwargs, target))

    def _open(self, func: FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a function whose ops are seen.  One that asks for itself, as ``F.max_pool2d`` does
        from the function that it passes its arguments on to, is called as it is.
        """
        if func in self._opening:
            return func(*args, **kwargs)
        self._opening.add(func)
        try:
            with self:
                return _opened(func)(*args, **kwargs)
        finally:
            self._opening.remove(func)

    def _target(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.dtype | None:
        """The dtype that an op runs in; None: as without the mode."""
        name = op_name(func)
        if not name or is_in_place(func) or kwargs.get("out") is not None:
            return None
        if name in self._black or (self.kept and self._takes_kept((*args, *kwargs.values()))):
            return torch.float32
        if name in self._white:
            return self._dtype
        return None if name in _CONVERSIONS else self.rest

    def _takes_kept(self, values: tuple[Any, ...]) -> bool:
        return any(
            id(each) in self.kept
            for value in values
            for each in (value if isinstance(value, list | tuple) else (value,))
        )


def cast(value: Any, dtype: torch.dtype) -> Any:
    """A value with its tensors of another precision cast: to 16 bits those of float32, to float32
    those of 16 bits.  Others stay as they are.
    """
    source = (torch.float32,) if dtype in SIXTEEN else SIXTEEN

    def one(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.dtype in source else leaf

    return tree_map(one, value)


@cache
def _opened(function: FunctionType) -> Callable[..., Any]:
    """A function whose body calls the mode for each op; see [Note: ops inside functions]."""
    names = {name: _nobody for name in _ASKS if name in function.__globals__}
    opened = FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    opened.__kwdefaults__ = function.__kwdefaults__
    return opened


def _nobody(*tensors: Any) -> bool:
    return False
