"""A model's forward in 16 bits, with gradients that are never seen scaled.

[Note: the loss scale stays inside]  Only the way from a model's outputs back to its parameters and
inputs is computed in float16, so only there gradients need the loss scale.  A forward therefore
takes its parameters and inputs through an identity whose backward divides by the scale, and gives
its outputs as float32 through one whose backward multiplies by it.  ``p.grad`` never has the scale
in it: accumulation, clipping, penalties outside the model, and gradients on their way to other
trainers are those of a script without mixed precision.  A parameter that the forward takes past its
modules' attributes would get a scaled gradient; the first training forward looks for such
parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from transpiler.ir.close_names import close_names
from transpiler.ir.loss_scale import LossScale
from transpiler.ir.table_ops import is_sparse
from transpiler.precision.ops import SIXTEEN, MixedPrecision, OpCasts, cast, precision_of
from transpiler.strategy.strategy import DistributedStrategy

_running: ContextVar[_Forward | None] = ContextVar("running", default=None)
_NORMS = (nn.modules.batchnorm._NormBase,)  # their statistics are float32, and so their weights


def mixed(model: nn.Module, strategy: DistributedStrategy) -> nn.Module:
    """Makes a model's forward run as ``strategy.amp_configs`` says; the module stays the same.

    Raises:
        ValueError: a setting names an op or a variable that does not exist.
    """
    plain(model)
    model.forward = MixedForward(model, precision_of(strategy))
    return model


def plain(model: nn.Module) -> None:
    """Undoes :func:`mixed`."""
    if mixed_forward(model) is not None:
        del model.__dict__["forward"]


def mixed_forward(model: nn.Module) -> MixedForward | None:
    """The :class:`MixedForward` of a model; None without one."""
    found = model.__dict__.get("forward")
    return found if isinstance(found, MixedForward) else None


@contextmanager
def fp16_guard() -> Iterator[None]:
    """Inside it ops run in float16, where ``use_pure_fp16`` goes with ``use_fp16_guard``.

    Elsewhere it has no effect.

    Example::

        def forward(self, x):
            with fp16_guard():
                x = self.body(x)
            return self.head(x)
    """
    forward = _running.get()
    if forward is None or not forward.precision.guarded:
        yield
        return
    with forward.in_sixteen():
        yield


def recompute_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The ``context_fn`` of torch.utils.checkpoint for a part of a mixed forward: backward runs the
    part again after the forward has ended, and it must see the same dtypes.

    Example::

        part = nn.Linear(4, 2)
        checkpoint = torch.utils.checkpoint.checkpoint
        checkpoint(part, torch.ones(1, 4), use_reentrant=False, context_fn=recompute_contexts)
    """
    forward = _running.get()
    return nullcontext(), nullcontext() if forward is None else forward.again()


class MixedForward:
    """A model's forward with mixed precision, which replaces ``model.forward``.

    Args:
        model: its class has the forward.
        precision: that of the strategy.

    Attributes:
        scale: the loss scale; None: gradients are not scaled.
        calls: the number of calls of the forward.

    Raises:
        ValueError: ``custom_black_varnames`` names no parameter or buffer.
    """

    def __init__(self, model: nn.Module, precision: MixedPrecision) -> None:
        self.precision = precision
        self.scale = None if precision.course is None else LossScale(precision.course)
        self._model, self._looked, self.calls = model, False, 0
        names = [*dict(model.named_parameters()), *dict(model.named_buffers())]
        for name in sorted(precision.kept.difference(names)):
            raise ValueError(
                "strategy.amp_configs['custom_black_varnames']: expected names of parameters and "
                f"buffers, got {name!r}; the model has {close_names(name, names)}"
            )

    @property
    def __wrapped__(self) -> Any:
        """The model's own forward, whose signature this has."""
        return type(self._model).forward.__get__(self._model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs; those of 16 bits as float32."""
        if _running.get() is not None and _running.get().model is self._model:  # type: ignore[union-attr]
            return self.__wrapped__(*args, **kwargs)
        self.calls += 1
        scale = self.scale.value if self.scale is not None and torch.is_grad_enabled() else None
        forward = _Forward(self._model, self.precision, scale)
        with forward:
            forward.change_kept(forward.entered)
            args, kwargs = tree_map(forward.entered, (args, kwargs))
            outputs = self.__wrapped__(*args, **kwargs)
        if self.precision.guarded and not forward.guards:
            raise ValueError(
                "strategy.amp_configs: use_pure_fp16 with use_fp16_guard: expected ops inside "
                "fp16_guard() in the model's forward, got none, so nothing would run in float16; "
                "write `with fp16_guard():` there, or set use_fp16_guard to False"
            )
        if scale is not None and not self._looked:
            _look_for_ways_past(self._model, outputs)
            self._looked = True
        forward.change_kept(forward.left)
        return _map(forward.left, outputs)


class _Forward:
    """One forward: its parameters are exchanged while it runs.

    Args:
        scale: of the loss; None where it is not scaled, or nothing is differentiated.
    """

    def __init__(self, model: nn.Module, precision: MixedPrecision, scale: float | None) -> None:
        self.model, self.precision, self._scale = model, precision, scale
        self.guards, self._guarded = 0, False
        device = next((p.device.type for p in model.parameters()), "cpu")
        # a weight is cast at each use, as it is where its gradient is scaled and in a program; the
        # gradients of its uses are then summed in float32
        self._autocast = torch.autocast(device, precision.dtype, cache_enabled=False)
        self._casts = OpCasts(precision.dtype, device, precision.white, precision.black)
        self._stack = ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            token = _running.set(self)
            stack.callback(_running.reset, token)
            if self._scale is not None:
                self._exchange(stack, self._unscaled)
                self._unscale_rows(stack)
            if self.precision.guarded:
                self._casts.rest = torch.float32
            else:
                if self.precision.pure:
                    self._exchange(stack, self._sixteen)
                stack.enter_context(self._autocast)
            if self.precision.guarded or self.precision.lists:
                self._keep()
                stack.enter_context(self._casts)
            self._stack = stack.pop_all()

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @contextmanager
    def in_sixteen(self) -> Iterator[None]:
        """Inside :func:`fp16_guard`."""
        self.guards += 1
        with ExitStack() as stack:
            stack.callback(setattr, self, "_guarded", self._guarded)
            self._guarded = True
            self._exchange(stack, self._sixteen)
            stack.enter_context(self._autocast)
            rest, self._casts.rest = self._casts.rest, self.precision.dtype
            kept = self._casts.kept
            self._keep()
            try:
                yield
            finally:
                self._casts.rest, self._casts.kept = rest, kept

    def again(self) -> AbstractContextManager[None]:
        """A context with this forward's present state, to be entered after it has ended."""
        other, guarded = _Forward(self.model, self.precision, None), self._guarded

        @contextmanager
        def entered() -> Iterator[None]:
            with other, other.in_sixteen() if guarded else nullcontext():
                yield

        return entered()

    # ---- parameters ----

    def _exchange(self, stack: ExitStack, change: Any) -> None:
        """Puts ``change(owner, name, parameter)`` in each parameter's place, until the stack is
        closed.
        """
        made: dict[int, Any] = {}  # a parameter that modules share stays shared
        for prefix, owner in self.model.named_modules():
            places = owner._parameters
            former = dict(places)
            for name, parameter in former.items():
                if parameter is None or _is_proxy(parameter):
                    continue
                full = f"{prefix}.{name}" if prefix else name
                if id(parameter) not in made:
                    made[id(parameter)] = change(owner, full, parameter)
                places[name] = made[id(parameter)]
            if former:
                stack.callback(_put_back, owner, former)
                _flatten(owner)

    def _unscaled(self, owner: nn.Module, name: str, parameter: Tensor) -> Tensor:
        if not parameter.requires_grad or not parameter.is_floating_point():
            return parameter
        assert self._scale is not None, "asked by the caller"
        unscaled: Tensor = _Unscale.apply(parameter, 1.0 / self._scale)  # type: ignore[no-untyped-call]  # torch's own
        return unscaled

    def _sixteen(self, owner: nn.Module, name: str, parameter: Tensor) -> Tensor:
        if isinstance(owner, _NORMS) or is_sparse(owner) or name in self.precision.kept:
            return parameter
        return parameter.to(self.precision.dtype) if parameter.dtype == torch.float32 else parameter

    def _unscale_rows(self, stack: ExitStack) -> None:
        """Rows of tables are unscaled where they come in: their parameter is a proxy."""
        for module in self.model.modules():
            if any(map(_is_proxy, module._parameters.values())):
                hook = module.register_forward_hook(lambda _, args, rows: self.entered(rows))
                stack.callback(hook.remove)

    def _keep(self) -> None:
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        self._casts.kept = {id(each) for name, each in named if name in self.precision.kept}

    # ---- inputs and outputs ----

    def entered(self, value: Any) -> Any:
        """An input of the forward; one that is differentiated gets an unscaled gradient."""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        if self._scale is not None and value.requires_grad:
            value = _Unscale.apply(value, 1.0 / self._scale)  # type: ignore[no-untyped-call]  # torch's own
        if self.precision.pure and not self.precision.guarded:
            value = cast(value, self.precision.dtype)
        return value

    def change_kept(self, change: Any) -> None:
        """Changes the results that modules keep as attributes, as for a loss beside the outputs:
        they leave a forward as outputs do, and come into the next one as inputs.
        """
        if self._scale is None:
            return
        for module in self.model.modules():
            own = vars(module)
            for name, value in list(own.items()):
                if isinstance(value, Tensor) and value.grad_fn is not None:
                    own[name] = change(value)

    def left(self, value: Any) -> Any:
        """An output, in float32, whose gradient is scaled from there on."""
        if isinstance(value, Tensor):
            if self._scale is not None and value.requires_grad and value.is_floating_point():
                return _Scale.apply(value, self._scale)  # type: ignore[no-untyped-call]  # torch's own
            return value.float() if value.dtype in SIXTEEN else value
        if self._scale is not None and not isinstance(value, str | int | float | complex | None):
            raise TypeError(
                "strategy.amp: expected a model whose outputs are tensors in tuples, lists, dicts "
                f"or dataclasses, got {type(value).__name__} among them: gradients through it "
                "would pass by the loss scale"
            )
        return value


def _is_proxy(parameter: Any) -> bool:
    """Whether a parameter stands for a table, whose rows take another way."""
    return getattr(parameter, "stands_for_table", False)


def _put_back(owner: nn.Module, former: dict[str, Any]) -> None:
    owner._parameters.update(former)
    _flatten(owner)


def _flatten(owner: nn.Module) -> None:
    """torch's recurrent modules keep their parameters in a list as well."""
    if isinstance(owner, nn.RNNBase):
        owner._flat_weights = [getattr(owner, name, None) for name in owner._flat_weights_names]


def _map(change: Any, outputs: Any) -> Any:
    """``change`` of every leaf; of a dataclass those of its fields."""
    if dataclasses.is_dataclass(outputs) and not isinstance(outputs, type):
        own = {field.name: getattr(outputs, field.name) for field in dataclasses.fields(outputs)}
        return dataclasses.replace(outputs, **{k: _map(change, v) for k, v in own.items()})
    inside = tree_map(
        lambda leaf: _map(change, leaf) if dataclasses.is_dataclass(leaf) else change(leaf), outputs
    )
    return inside


class _Unscale(torch.autograd.Function):
    """The identity, whose gradient is multiplied by the inverse of the loss scale."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, inverse: float) -> Tensor:
        ctx.inverse = inverse
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.inverse, None


class _Scale(torch.autograd.Function):
    """A float32 copy, or one of a wider dtype, whose gradient is multiplied by the loss scale."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.dtype = scale, value.dtype
        return value.float() if value.dtype in SIXTEEN else value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return (gradient * ctx.scale).to(ctx.dtype), None


def _look_for_ways_past(model: nn.Module, outputs: Any) -> None:
    """Checks that every leaf of autograd is reached from the outputs through an _Unscale.

    Raises:
        RuntimeError: a parameter, or another tensor, would get a scaled gradient.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    waiting: list[Any] = []
    _map(lambda leaf: waiting.append(getattr(leaf, "grad_fn", None)), outputs)
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node in seen or isinstance(node, _Unscale._backward_cls):
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            raise RuntimeError(
                "strategy.amp: expected the forward to take its parameters as attributes of its "
                f"modules, got {names.get(id(leaf), 'a tensor that is no parameter')!r} in another "
                "way: its gradient would have the loss scale in it"
            )
        waiting.extend(following for following, _ in node.next_functions)
