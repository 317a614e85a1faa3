"""The gradient of a proxy parameter: a scalar, the norm of a table's pending row gradients, whose
clamps act on the rows.

[Note: clamps of a norm]  A multiplied norm says by which factor the rows are to be multiplied; a
clamped one does not say where the rows are to be cut.  So the gradient is a tensor of a class of
its own, which torch's functions give notice to: a clamp in place (``clip_grad_value_``) is done to
the rows, and the scalar is then their norm.  What neither multiplies nor clamps is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor

_CLAMPS = {"clamp_", "clip_", "clamp_min_", "clamp_max_", "nan_to_num_"}
_LISTS = {"_foreach_clamp_min_": Tensor.clamp_min_, "_foreach_clamp_max_": Tensor.clamp_max_}
_REFUSED = {
    *("clamp", "clip", "clamp_min", "clamp_max", "nan_to_num", "sign_", "add_", "sub_"),
    *("__iadd__", "__isub__", "_foreach_add_", "_foreach_sub_", "_foreach_sign_"),
}
_NORM = "linalg_vector_norm"


class Rows(Protocol):
    """A proxy parameter, as its gradient sees it."""

    def change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Puts ``change(rows)`` in the place of the pending rows, and sets ``grad`` to their
        norm.
        """

    def pending_rows(self) -> Tensor:
        """[u, dim], times the script's factors."""


class ProxyGradient(Tensor):
    """``proxy.grad``."""

    _rows: ref[Rows]

    @classmethod
    def of(cls, norm: Tensor, rows: Rows) -> ProxyGradient:
        """A gradient of this value, in the same memory.

        Args:
            norm: a scalar.
            rows: whose norm it is.
        """
        made = norm.as_subclass(cls)
        made._rows = ref(rows)
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Torch's call of a function with such a gradient among its arguments.

        Raises:
            TypeError: the function neither multiplies nor clamps.
        """
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        first = args[0] if args else None
        with torch._C.DisableTorchFunctionSubclass():
            if name in _REFUSED:
                raise TypeError(
                    f"{name.strip('_')}: the gradient of a table is the norm of its rows, which "
                    "can be multiplied, zeroed, or clamped in place: expected clamp_() or "
                    "clip_grad_value_, mul_() or clip_grad_norm_, or a change of the model's loss"
                )
            if name in _CLAMPS and isinstance(first, cls):
                first._change(lambda rows: func(rows, *args[1:], **kwargs))
                return first
            if name in _LISTS and isinstance(first, list | tuple):
                _clamp_each(first, _LISTS[name], *args[1:], **kwargs)
                return None
            if name == _NORM and isinstance(first, cls) and _order(args, kwargs) != 2:
                return func(first._present().pending_rows(), *args[1:], **kwargs)
            result = func(*args, **kwargs)
        data = name == "__get__" and getattr(func, "__self__", None) is Tensor.data
        if isinstance(first, cls) and (data or name == "detach"):
            return cls.of(result, first._present())
        return result

    def _present(self) -> Rows:
        rows = self._rows()
        assert rows is not None, "a gradient outlives its parameter"
        return rows

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        self._present().change_rows(change)


def _order(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return args[1] if len(args) > 1 else kwargs.get("ord", 2)


def _clamp_each(tensors: Sequence[Tensor], clamp: Any, bound: Any) -> None:
    for place, tensor in enumerate(tensors):
        own = bound[place] if isinstance(bound, list | tuple) else bound
        if isinstance(tensor, ProxyGradient):
            tensor._change(lambda rows, own=own: clamp(rows, own))  # type: ignore[misc]  # the loop's
        else:
            clamp(tensor, own)
