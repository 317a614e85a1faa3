"""Ops that run in 16 or 32 bits: the user's lists, their names, and the casts.

[Note: ops inside functions]  The lists are applied above autograd and autocast, where a cast is an
op like any other, with its own backward.  torch calls a mode for a function such as ``F.softmax``,
and then no more for what this calls: a listed op inside ``F.multi_head_attention_forward`` would be
missed.  So a function of torch.nn.functional that is not listed itself runs with a copy of its body
in which the question "is somebody overriding this?" is answered with no, and the mode sees the ops
in it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from types import FunctionType, MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, get_overridable_functions
from torch.utils._pytree import tree_map

from transpiler.ir.close_names import close_names
from transpiler.ir.loss_scale import ScaleCourse
from transpiler.strategy.strategy import DistributedStrategy

# ---- op names ----
#
# Ops by the names that users write in ``custom_white_list`` and ``custom_black_list``.
#
# A name is that of a function of torch, without underscores around it: "softmax" is
# ``torch.softmax``, ``F.softmax``, ``x.softmax()`` and aten's ``_softmax``.  Names of the original
# that have an obvious counterpart are taken for it.


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


# ---- choices ----
#
# The settings of a strategy's ``amp`` and ``amp_configs``, in one value.


@dataclass(frozen=True, slots=True)
class MixedPrecision:
    """The settings of a forward with mixed precision.

    Attributes:
        dtype: of the ops in 16 bits.
        pure: parameters and inputs are cast as well.
        guarded: only what is inside ``fp16_guard()`` runs in 16 bits.
        white, black: names of the ops that run in 16 bits, and in 32, whatever torch.autocast does.
        kept: names of variables that stay in 32 bits, with the ops that take them.
        course: of the loss scale; None: the loss is not scaled, as bfloat16 has float32's range.
    """

    dtype: torch.dtype
    pure: bool
    guarded: bool
    white: frozenset[str]
    black: frozenset[str]
    kept: frozenset[str]
    course: ScaleCourse | None

    @property
    def lists(self) -> bool:
        """Whether some ops differ from what torch.autocast does."""
        return bool(self.white or self.black or self.kept)


def precision_of(strategy: DistributedStrategy) -> MixedPrecision:
    """The precision that a strategy with ``amp`` chooses.

    Raises:
        ValueError: a list names an op that torch does not have, or both lists name one op.
    """
    settings = strategy.amp_configs
    white = _ops("custom_white_list", settings["custom_white_list"])
    black = _ops("custom_black_list", settings["custom_black_list"])
    if both := sorted(white & black):
        raise ValueError(
            f"strategy.amp_configs: {', '.join(both)}: expected in custom_white_list or in "
            "custom_black_list, got in both"
        )
    bfloat = settings["use_pure_bf16"]
    return MixedPrecision(
        torch.bfloat16 if bfloat else torch.float16,
        pure=bfloat or settings["use_pure_fp16"],
        guarded=settings["use_pure_fp16"] and settings["use_fp16_guard"],
        white=white,
        black=black,
        kept=frozenset(settings["custom_black_varnames"]),
        course=None if bfloat else _course(strategy),
    )


def _ops(key: str, names: list[str]) -> frozenset[str]:
    return frozenset(known_op(f"strategy.amp_configs[{key!r}]", name) for name in names)


def _course(strategy: DistributedStrategy) -> ScaleCourse:
    settings = strategy.amp_configs
    return ScaleCourse(
        init=settings["init_loss_scaling"],
        dynamic=settings["use_dynamic_loss_scaling"],
        incr_every=settings["incr_every_n_steps"],
        decr_every=settings["decr_every_n_nan_or_inf"],
        incr_ratio=settings["incr_ratio"],
        decr_ratio=settings["decr_ratio"],
    )


# ---- op casts ----
#
# The ops of the user's lists run in 16 or 32 bits, inside ``torch.autocast``.


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
        """Calls a function so that the mode sees its ops.  One that is already being called so, as
        ``F.max_pool2d`` from the function that it passes its arguments on to, is called as it is.
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
