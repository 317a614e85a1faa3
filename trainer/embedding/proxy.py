"""The proxy parameter: one scalar by which a table appears in the script's optimizer.

Its ``.grad`` is the L2 norm of the table's row gradients.

[Note: a scalar gradient for rows]  A script clips by norm, unscales, accumulates and zeroes
gradients through ``p.grad``.  A table's gradient is some rows, which no parameter holds.  All these
uses read its norm, and then multiply it or drop it.  So after each backward ``proxy.grad`` is the
norm of all pending row gradients, and when the step takes the rows they are multiplied by
``proxy.grad`` / that norm; where ``proxy.grad`` is None there are none.  ``clip_grad_norm_`` and
``GradScaler`` thus count tables as they count parameters.  ``clip_grad_value_`` clamps the rows:
see [Note: clamps of a norm].

[Note: minus zero]  A script may put the proxy parameter itself into its loss, as a penalty on all
of ``model.parameters()`` does.  The proxy parameter is 0, so that the gradient of such a penalty is
0, and no row would get its part.  It shows by its sign: lookups give -0.0, and only a sum of these
alone is -0.0.

[Note: steps without servers]  The scalar itself stays 0.  An optimizer's step does not see its
gradient: just before, the rows take their step, by the table's own rule or the group's, where they
are in this process; just after, ``proxy.grad`` is back.  Two global step hooks of torch do this,
which the first proxy parameter of a process registers.  Changes that the optimizer's own step hooks
make to gradients are too late for tables.

[Note: a gradient that stays on a GPU]  There each number that the host reads costs a wait for all
that the GPU has to do before.  So rows whose proxy parameter is on the same GPU stay there, their
norm is a number of the GPU, and so is the question whether the gradient is from lookups alone.  A
step begins to copy the rows and the numbers of all its tables, and waits once.  So a penalty on a
proxy parameter is found by the step, and not by the backward.  A backward that adds to a gradient
reads the script's factor first, and waits.

[Note: clamps of a norm]  A multiplied norm determines the factor of the rows; a clamped one does
not determine their clamp.  So the gradient is a tensor of a class of its own, which intercepts
torch's functions: a clamp in place (``clip_grad_value_``) is applied to the rows, and the scalar is
then their norm.  A change that neither multiplies nor clamps is refused.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from pserver.table.gradient import RowGradient, total_of
from trainer.device_copies import Leaving, is_on_gpu
from trainer.row_optimizers import group_rule
from transpiler.ir.rules import Rule

# ---- proxy gradient ----
#
# The gradient of a proxy parameter: a scalar, the norm of a table's pending row gradients, whose
# clamps act on the rows.


_CLAMPS = {"clamp_", "clip_", "clamp_min_", "clamp_max_", "nan_to_num_"}
_LISTS = {"_foreach_clamp_min_": Tensor.clamp_min_, "_foreach_clamp_max_": Tensor.clamp_max_}
_REFUSED = {
    *("clamp", "clip", "clamp_min", "clamp_max", "nan_to_num", "sign_", "add_", "sub_"),
    *("__iadd__", "__isub__", "_foreach_add_", "_foreach_sub_", "_foreach_sign_"),
}
_NORM = "linalg_vector_norm"


class ProxyRows(Protocol):
    """A proxy parameter, as its gradient sees it."""

    def change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replaces the pending rows by ``change(rows)``, and sets ``grad`` to their norm."""

    def pending_rows(self) -> Tensor:
        """The rows of the pending gradient, [u, dim], times the script's factors."""


class ProxyGradient(Tensor):
    """The class of ``proxy.grad``."""

    _rows: ref[ProxyRows]

    @classmethod
    def of(cls, norm: Tensor, rows: ProxyRows) -> ProxyGradient:
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
        """Handles torch's call of a function with such a gradient among its arguments.

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

    def _present(self) -> ProxyRows:
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


# ---- proxy parameter ----


class ProxiedTable(Protocol):
    """The table of a proxy parameter, for a step in this process."""

    def steps_here(self) -> bool:
        """Whether the rows are in this process."""

    def rules(self, group: Callable[[], Rule]) -> list[tuple[int, int, Rule]]:
        """The present rules, by columns; ``group`` gives that of the proxy parameter's group."""

    def step(self, rules: list[tuple[int, int, Rule]], scale: float) -> None:
        """Steps the rows in this process; gradients are multiplied by ``scale``."""

    def whose(self) -> str:
        """The table, in words."""


class ProxyParameter(nn.Parameter):
    """A scalar parameter that stands for one table in an optimizer's groups; its module makes it.

    The backward passes of several threads may run at once only for different tables.
    """

    stands_for_table = True
    _owner: weakref.ref[ProxiedTable] | None
    # of the running backward passes, by autograd's number
    _parts: dict[int, list[RowGradient]]
    _pending: RowGradient | None
    # the norm of what is pending, as ``grad`` was set to it: on a GPU where the rows are
    _recorded: float | Tensor
    # on a GPU: whether a gradient was not from lookups alone, 0.0 or 1.0; None: none has come
    _foreign: Tensor | None
    _leaving: Leaving | None  # the pending rows, and three numbers, on their way from a GPU

    def __new__(cls, data: Tensor | None = None, requires_grad: bool = True) -> ProxyParameter:
        _register_step_hooks()
        proxy: ProxyParameter = super().__new__(
            cls, torch.zeros(()) if data is None else data, True
        )
        proxy._owner, proxy._parts, proxy._leaving = None, {}, None
        proxy.drop()
        proxy.register_hook(partial(_check_source, weakref.ref(proxy)))  # type: ignore[no-untyped-call]  # torch's own
        proxy.register_post_accumulate_grad_hook(_accumulated)  # type: ignore[no-untyped-call]  # torch's own
        proxy.requires_grad_(requires_grad)
        return proxy

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return ProxyParameter, (self.detach(), self.requires_grad)

    @property
    def owner(self) -> ProxiedTable | None:
        """The module, while it lives."""
        return None if self._owner is None else self._owner()

    def bind(self, owner: ProxiedTable) -> None:
        """Sets the module of this proxy parameter."""
        self._owner = weakref.ref(owner)

    def nothing(self) -> Tensor:
        """The gradient that autograd gets from a lookup: -0.0, see [Note: minus zero]."""
        return torch.full_like(self, -0.0)

    def receive(self, gradient: RowGradient) -> None:
        """Adds the gradient of one lookup's rows, on any device, in a backward pass; ``grad``
        follows when all lookups have added theirs.
        """
        rows = gradient.rows
        if not (rows.is_cpu or (is_on_gpu(rows) and rows.device == self.device)):
            gradient.rows = rows.cpu()
        task = torch._C._current_graph_task_id()
        if task not in self._parts:
            self._pending = self._scaled()
            if self.grad is None:
                self._recorded, self._foreign = 0.0, None
            elif self._pending is not None and is_on_gpu(self._pending.rows):
                self._recorded = self.grad.detach().clone()
            else:
                self._recorded = float(self.grad)
            self._parts[task] = []
        self._parts[task].append(gradient)

    def accumulate(self) -> None:
        """Sums the rows at the end of a backward pass, when autograd has added zeros to ``grad``:
        all lookups have added theirs.
        """
        parts = self._parts.pop(torch._C._current_graph_task_id(), [])
        if parts:
            parts = parts if self._pending is None else [self._pending, *parts]
            if len(parts) > 1 and len({part.rows.device for part in parts}) > 1:
                parts = [RowGradient(p.ids, p.rows.cpu(), p.statistics) for p in parts]
            self._pending = total_of(parts)
            self._show(self._pending)

    def _show(self, pending: RowGradient) -> None:
        """Sets ``grad`` to the norm of these rows."""
        norm = torch.linalg.vector_norm(pending.rows)
        if is_on_gpu(norm):
            norm = norm.to(self.dtype)
            self.grad, self._recorded = ProxyGradient.of(norm, self), norm.clone()
            return
        if norm.dtype is not self.dtype or not self.is_cpu:
            norm = norm.to(self.device, self.dtype)
        self.grad, self._recorded = ProxyGradient.of(norm, self), norm.item()

    def pending_rows(self) -> Tensor:
        """The rows of the pending gradient, times the script's factors on ``grad``."""
        scaled = self._scaled()
        return torch.zeros(0, dtype=self.dtype) if scaled is None else scaled.rows

    def change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replaces the pending rows by ``change(rows)``; the tensor in ``grad`` gets their norm."""
        scaled = self._scaled()
        if scaled is None or self.grad is None:
            return
        rows = change(scaled.rows.clone())
        self._pending = RowGradient(scaled.ids, rows, scaled.statistics)
        self.grad.copy_(torch.linalg.vector_norm(rows))
        self._recorded = self.grad.detach().clone() if is_on_gpu(rows) else float(self.grad)

    def waiting(self) -> RowGradient | None:
        """A copy of the pending gradient, on the CPU: the sum over all lookups since it was last
        zeroed, times the script's factors on ``grad``.

        Returns:
            None where ``grad`` is None; no rows where it was set to zero.

        Raises:
            RuntimeError: on a GPU, where a gradient was not from lookups alone.
        """
        self._parts.clear()  # of passes that were for other gradients, as of torch.autograd.grad
        if isinstance(self._recorded, Tensor) and self.grad is not None:
            return self._copied()
        if self._foreign is not None and self.grad is not None and float(self._foreign):
            raise RuntimeError(_other_gradients(self.owner))
        scaled = self._scaled()
        return scaled.clone() if scaled is not None and scaled is self._pending else scaled

    def begin_copy(self) -> bool:
        """Begins to copy the pending gradient from its GPU, with the numbers about it.

        Returns:
            Whether there is one.
        """
        recorded = self._recorded
        if not isinstance(recorded, Tensor) or self._pending is None or self.grad is None:
            return False
        foreign = torch.zeros_like(recorded) if self._foreign is None else self._foreign
        with torch._C.DisableTorchFunctionSubclass():
            # the script may have moved its model since the backward
            device = recorded.device
            numbers = torch.stack((self.grad.to(device), recorded, foreign.to(device)))
        self._leaving = Leaving((self._pending.rows, numbers))
        return True

    def end_copy(self) -> None:
        """Drops the copy: the script may change the gradient again."""
        self._leaving = None

    def _copied(self) -> RowGradient:
        if self._leaving is None:
            self.begin_copy()
        leaving, self._leaving = self._leaving, None
        assert self._pending is not None and leaving is not None, "it has begun"
        rows, numbers = leaving.wait()
        value, recorded, foreign = numbers.tolist()
        if foreign:
            raise RuntimeError(_other_gradients(self.owner))
        self._foreign = None
        copy = RowGradient(self._pending.ids, rows, self._pending.statistics)
        return _times(copy, value, recorded)

    @contextmanager
    def lend(self, gradient: RowGradient) -> Iterator[None]:
        """Makes ``gradient`` the pending one in this context; then restores the former one."""
        before = self._pending, self._recorded, self.grad
        self._pending = gradient
        self._show(gradient)
        try:
            yield
        finally:
            self._pending, self._recorded, self.grad = before

    def drop(self) -> None:
        """Drops the pending gradient."""
        self._pending, self._recorded, self._foreign = None, 0.0, None
        self._parts.clear()

    def _scaled(self) -> RowGradient | None:
        """The pending gradient, times the factor that ``grad`` was multiplied by: the same object
        where that is 1.
        """
        if self.grad is None or self._pending is None:
            return None
        with torch._C.DisableTorchFunctionSubclass():  # a plain number: the class need not know
            recorded = self._recorded
            if isinstance(recorded, Tensor):
                here = self.grad.to(recorded.device)  # the script may have moved its model
                value, recorded = torch.stack((here, recorded)).tolist()
            else:
                value = self.grad.item()
        return self._pending if value == recorded else _times(self._pending, value, recorded)

    def note_source(self, gradient: Tensor) -> None:
        """Notes a backward's gradient on a GPU, for the step to check its source."""
        foreign = (~torch.signbit(gradient)).to(self.dtype)
        if self._foreign is not None:
            foreign = foreign.maximum(self._foreign.to(foreign.device))
        self._foreign = foreign


def _other_gradients(owner: ProxiedTable | None) -> str:
    """The message about a gradient that is not from lookups alone."""
    return (
        f"{'a DistributedEmbedding' if owner is None else owner.whose()}: expected gradients of "
        "looked-up rows only, got one of its proxy parameter, which stands for the table in "
        "model.parameters() and holds no row.  For a penalty c * weight.square().sum() on all rows "
        "give this parameter weight_decay=2 * c in the optimizer, and leave it out of the penalty"
    )


def _times(gradient: RowGradient, value: float, recorded: float) -> RowGradient:
    """A gradient whose norm the script has changed, from ``recorded`` to ``value``: the same object
    where it has not.
    """
    if value == recorded or recorded == 0.0 or (math.isnan(value) and math.isnan(recorded)):
        return gradient
    if value == 0.0 or not math.isfinite(recorded):
        statistics = None if gradient.statistics is None else gradient.statistics[:0]
        return RowGradient(gradient.ids[:0], gradient.rows[:0], statistics)
    return RowGradient(gradient.ids, gradient.rows * (value / recorded), gradient.statistics)


@contextmanager
def copied_together(proxies: Iterable[ProxyParameter]) -> Iterator[None]:
    """In this context the pending gradients of GPUs are on their way: all have begun to cross
    before the host waits for the first.
    """
    # most often none is on a GPU, and each call counts for every table of a step
    begun = [p for p in proxies if isinstance(p._recorded, Tensor) and p.begin_copy()]
    try:
        yield
    finally:
        for proxy in begun:
            proxy.end_copy()


def _check_source(proxy: weakref.ref[ProxyParameter], gradient: Tensor) -> None:
    """Checks that a backward's gradient is from lookups alone; see [Note: minus zero].

    Raises:
        RuntimeError: it is not.
    """
    present = proxy()
    if present is not None and is_on_gpu(gradient):
        present.note_source(gradient)
    elif math.copysign(1.0, gradient.item()) > 0:
        raise RuntimeError(_other_gradients(None if present is None else present.owner))


def _accumulated(proxy: Tensor) -> None:
    assert isinstance(proxy, ProxyParameter), "the hook of a proxy parameter"
    proxy.accumulate()


# ---- step hooks; see [Note: steps without servers] ----

# during a step: its optimizer's proxy parameters, and their gradients
_hidden: weakref.WeakKeyDictionary[Optimizer, list[tuple[ProxyParameter, Tensor]]] = (
    weakref.WeakKeyDictionary()
)


def proxy_parameters(optimizer: Optimizer) -> Iterator[tuple[int, ProxyParameter]]:
    """The proxy parameters of an optimizer, each with the index of its group."""
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if isinstance(parameter, ProxyParameter):
                yield index, parameter


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any] | None:
    if (
        isinstance(getattr(optimizer, "inner", None), Optimizer)
        or next(proxy_parameters(optimizer), None) is None
    ):
        return None  # a wrapper of another optimizer, whose step calls this hook, too
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS evaluates the loss several times a step: it cannot step a DistributedEmbedding"
        )
    if closure is None:
        _step_rows(optimizer)
        return None

    def then_rows() -> Any:
        loss = closure()
        _step_rows(optimizer)
        return loss

    if len(args) > 1:
        return (args[0], then_rows, *args[2:]), kwargs
    return args, {**kwargs, "closure": then_rows}


def _step_rows(optimizer: Optimizer) -> None:
    here = []
    for index, proxy in proxy_parameters(optimizer):
        owner = proxy.owner
        if owner is not None and proxy.grad is not None and owner.steps_here():
            group = optimizer.param_groups[index]
            rules = owner.rules(partial(group_rule, optimizer, group, owner.whose()))
            here.append((proxy, owner, rules))
    scale, overflow = _left_to_optimizer(optimizer)
    if not overflow:
        with copied_together(proxy for proxy, _, _ in here):
            for _, owner, rules in here:
                owner.step(rules, scale)
    hidden = _hidden[optimizer] = []
    for _, proxy in proxy_parameters(optimizer):
        if proxy.grad is not None:
            hidden.append((proxy, proxy.grad))
            proxy.grad = None


def _left_to_optimizer(optimizer: Optimizer) -> tuple[float, bool]:
    """The factor that unscales, and whether to skip the step: GradScaler leaves both to optimizers
    with ``fused=True``.
    """
    scale, found = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    return 1.0 if scale is None else 1.0 / float(scale), found is not None and bool(float(found))


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for proxy, gradient in _hidden.pop(optimizer, ()):
        proxy.grad = gradient


_registering = threading.Lock()  # guards _registered
_registered = False


def _register_step_hooks() -> None:
    """Registers the two hooks with torch, once in a process."""
    global _registered
    with _registering:
        if not _registered:
            register_optimizer_step_pre_hook(_before_step)
            register_optimizer_step_post_hook(_after_step)
            _registered = True
