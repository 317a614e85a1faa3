"""One step as an fx graph: forward and, where something is trained, loss and gradients, with free
sizes.

[Note: what stays free]  Tracing runs the step once on fake tensors.  A free size of an input
(dimension 0, if nothing else is said) is a symbol there, every other extent a number.  Python code
that looks at a symbol (``if x.shape[0] > 16``) is decided for the example, and torch records the
decision as a guard.  A decision of the user's code must hold for every size; otherwise the graph
would silently hold one branch of the model.  torch takes decisions of its own too (is this tensor
contiguous? which memory format does the convolution choose?).  They do not change the results, so
they are not errors by themselves; the equivalence check tests them at a size where they differ.

[Note: gradients as autograd stores them]  ``p.grad`` is not always the tensor that backward
computed: autograd copies one whose strides differ from the parameter's.  Reductions over it (a
norm) add in the order of memory, so the copy is part of the trace.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn

import sympy  # type: ignore[import-untyped]  # has no stubs
import torch
from torch import Tensor, fx, nn
from torch._C import DispatchKey
from torch._dynamo.source import LocalSource
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import (  # type: ignore[attr-defined]  # SLoc is not in __all__
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    SLoc,
    StatelessSymbolicContext,
)
from torch.utils._python_dispatch import TorchDispatchMode

from transpiler.ir import source_location
from transpiler.ir.recurrent import KINDS
from transpiler.tracing.autograd import gradients_of, python_functions
from transpiler.tracing.default_programs import recording
from transpiler.tracing.equivalence_check import outputs_of, results_of
from transpiler.tracing.input_spec import Inputs
from transpiler.tracing.tables import GRADIENT, LOOKUP, NAMESPACE, looking_up

# ---- node lines ----
#
# The line of the step for each node of a graph that is being traced, and whether autograd follows
# it.


_followed: ContextVar[bool] = ContextVar("_followed", default=False)


@contextmanager
def followed(tracked: bool) -> Iterator[None]:
    """A context for the forward of an autograd Function, whose ops run without autograd although it
    follows the Function.

    Args:
        tracked: whether it does: the Function was not called under ``torch.no_grad()``.
    """
    token = _followed.set(tracked)
    try:
        yield
    finally:
        _followed.reset(token)


class NodeLines(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's stubs
    """Records the line of the step for every node that an op makes; a backward op has the line of
    its forward op.

    Attributes:
        lines: by the node's name.
        constant: the names of the nodes of ops that ran without autograd, in the forward pass.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's stubs
        self.lines: dict[str, str] = {}
        self.constant: set[str] = set()
        self._forward: dict[int, str] = {}

    def _line(self) -> str:
        backward = torch._C._current_autograd_node()
        if backward is not None:
            return self._forward.get(backward._sequence_nr(), "")
        line = source_location.short()
        if line and torch.is_grad_enabled():
            self._forward.setdefault(torch.autograd._get_sequence_nr() - 1, line)
        return line

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        line, mode = self._line(), get_proxy_mode()
        tracked = torch.is_grad_enabled() or _followed.get()
        constant = not tracked and torch._C._current_autograd_node() is None
        if mode is None or not (line or constant):
            return func(*args, **(kwargs or {}))
        nodes = mode.tracer.graph.nodes
        before = next(iter(reversed(nodes)), None)
        result = func(*args, **(kwargs or {}))
        for node in reversed(nodes):
            if node is before:
                break
            self.lines[node.name] = line
            if constant:
                self.constant.add(node.name)
        return result


# ---- lookups ----
#
# The ops of embeddings, which tables.py puts into a trace.


_library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's own
_library.define(
    f"{LOOKUP}(Tensor proxy, Tensor ids, str table, int dim, ScalarType dtype, int? padding) -> "
    "Tensor"
)
_library.define(
    f"{GRADIENT}(Tensor proxy, Tensor ids, Tensor grad, Tensor? counted, str table, int? "
    "padding) -> Tensor"
)


def _fake_lookup(
    proxy: Tensor, ids: Tensor, table: str, dim: int, dtype: torch.dtype, padding: int | None
) -> Tensor:
    return ids.new_empty((*ids.shape, dim), dtype=dtype)


def _fake_gradient(
    proxy: Tensor,
    ids: Tensor,
    grad: Tensor,
    counted: Tensor | None,
    table: str,
    padding: int | None,
) -> Tensor:
    return torch.empty_like(proxy)


torch.library.register_fake(f"{NAMESPACE}::{LOOKUP}", _fake_lookup, lib=_library)
torch.library.register_fake(f"{NAMESPACE}::{GRADIENT}", _fake_gradient, lib=_library)


# ---- ctc ----
#
# ``ctc_loss`` in a trace: the sizes of the values that torch keeps for its backward depend on data.
#
# A program holds torch's own two ops.  Those here run on fake tensors alone, and give an upper
# bound of the size.


CTC_FORWARD, CTC_GRAD = "ctc_loss", "ctc_loss_backward"
_TYPES: Mapping[str, str] = MappingProxyType(
    {CTC_FORWARD: "aten._ctc_loss.Tensor", CTC_GRAD: "aten._ctc_loss_backward.Tensor"}
)
_GIVEN = "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths"
_MEAN, _SUM = 1, 2  # torch's numbers of reductions

_library.define(f"{CTC_FORWARD}({_GIVEN}, int blank, bool zero_infinity) -> (Tensor, Tensor)")
_library.define(
    f"{CTC_GRAD}(Tensor grad, {_GIVEN}, Tensor neg_log_likelihood, Tensor log_alpha, int blank, "
    "bool zero_infinity) -> Tensor"
)


def _fake_ctc(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> tuple[Tensor, Tensor]:
    steps, rows = log_probs.shape[0], log_probs.shape[1]
    longest = 2 * targets.shape[-1] + 1
    return log_probs.new_empty((rows,)), log_probs.new_empty((rows, steps, longest))


def _fake_ctc_gradient(grad: Tensor, log_probs: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


torch.library.register_fake(f"{NAMESPACE}::{CTC_FORWARD}", _fake_ctc, lib=_library)
torch.library.register_fake(f"{NAMESPACE}::{CTC_GRAD}", _fake_ctc_gradient, lib=_library)


class _Losses(torch.autograd.Function):
    """The op in autograd: the loss of each row."""

    @staticmethod
    def forward(
        ctx: Any,
        tracked: bool,
        log_probs: Tensor,
        targets: Tensor,
        input_lengths: Tensor,
        target_lengths: Tensor,
        blank: int,
        zero_infinity: bool,
    ) -> Tensor:
        """Puts the op into the trace."""
        given = (log_probs, targets, input_lengths, target_lengths)
        with followed(tracked):
            found = torch.ops.pserver.ctc_loss(*given, blank, zero_infinity)
        losses: Tensor = found[0]
        ctx.save_for_backward(*given, losses, found[1])
        ctx.settings = (blank, zero_infinity)
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Puts the op of the gradient into the trace."""
        found = torch.ops.pserver.ctc_loss_backward(grad, *ctx.saved_tensors, *ctx.settings)
        return (None, found, None, None, None, None, None)


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    reduction: int = _MEAN,
    zero_infinity: bool = False,
) -> Tensor:
    """``torch.ctc_loss`` for a trace; the reduction is ordinary compute."""
    batched = log_probs.dim() == 3
    each: Tensor = _Losses.apply(  # type: ignore[no-untyped-call]  # torch's own
        torch.is_grad_enabled(),
        log_probs if batched else log_probs.unsqueeze(1),
        targets,
        input_lengths,
        target_lengths,
        blank,
        zero_infinity,
    )
    if zero_infinity:
        each = torch.where(each == float("inf"), each.new_zeros(()), each)
    if reduction == _MEAN:
        return (each / target_lengths.to(each).clamp_min(1)).mean()
    if reduction == _SUM:
        return each.sum()
    return each if batched else each.squeeze(0)


def ctc_call_of(node: fx.Node) -> tuple[str, Mapping[str, Any]] | None:
    """The op's type and arguments, for a node of such an op; None for others."""
    if not isinstance(node.target, OpOverload) or node.target.namespace != NAMESPACE:
        return None
    schema = node.target._schema
    op_type = _TYPES.get(schema.name.partition("::")[2])
    if op_type is None:
        return None
    named = dict(zip((each.name for each in schema.arguments), node.args, strict=False))
    return op_type, {**named, **node.kwargs}


# ---- recurrent ----
#
# A recurrent layer over a free time in a trace: one op, and one for its gradients.
#
# The ops here run on fake tensors alone; programs have kernels of their own (ir/recurrent.py).


RECURRENT_FORWARD, RECURRENT_GRAD = "recurrent", "recurrent_grad"
_LAYER = (
    "Tensor input, Tensor[] hx, Tensor[] params, str kind, bool has_biases, int num_layers, "
    "bool train, bool bidirectional, bool batch_first"
)

_library.define(f"{RECURRENT_FORWARD}({_LAYER}) -> Tensor[]")
_library.define(f"{RECURRENT_GRAD}({_LAYER}, Tensor?[] grads) -> Tensor[]")


def _fake_recurrent(
    input: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    kind: str,
    has_biases: bool,
    num_layers: int,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> list[Tensor]:
    """Outputs as torch lays them out: time first in memory."""
    rows, time = (0, 1) if batch_first else (1, 0)
    width = hx[0].shape[2] * (2 if bidirectional else 1)
    output = input.new_empty((input.shape[time], input.shape[rows], width))
    final = [torch.empty_like(state, memory_format=torch.contiguous_format) for state in hx]
    return [output.transpose(0, 1) if batch_first else output, *final]


def _fake_recurrent_gradient(
    input: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], *settings: Any
) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in (input, *hx, *params)]


torch.library.register_fake(f"{NAMESPACE}::{RECURRENT_FORWARD}", _fake_recurrent, lib=_library)
torch.library.register_fake(
    f"{NAMESPACE}::{RECURRENT_GRAD}", _fake_recurrent_gradient, lib=_library
)


class _Recurrent(torch.autograd.Function):
    """The op in autograd."""

    @staticmethod
    def forward(
        ctx: Any, tracked: bool, states: int, settings: tuple[Any, ...], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Puts the op into the trace."""
        ctx.save_for_backward(*tensors)
        ctx.states, ctx.settings = states, settings
        input, hx, params = tensors[0], list(tensors[1 : 1 + states]), list(tensors[1 + states :])
        with followed(tracked):
            found = torch.ops.pserver.recurrent(input, hx, params, *settings)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Puts the op of the gradients into the trace."""
        tensors, states = ctx.saved_tensors, ctx.states
        input, hx, params = tensors[0], list(tensors[1 : 1 + states]), list(tensors[1 + states :])
        found = torch.ops.pserver.recurrent_grad(input, hx, params, *ctx.settings, list(grads))
        return (None, None, None, *found)


def traced(
    kind: str, input: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], *settings: Any
) -> tuple[Tensor, ...]:
    """One layer or more, without dropout, as one op of the trace.

    Args:
        settings: has_biases, num_layers, train, bidirectional, batch_first.

    Returns:
        The outputs of all time steps, and each final state.
    """
    found: tuple[Tensor, ...] = _Recurrent.apply(  # type: ignore[no-untyped-call]  # torch's own
        torch.is_grad_enabled(), len(hx), (kind, *settings), input, *hx, *params
    )
    return found


def recurrent_call_of(node: fx.Node) -> tuple[str, Mapping[str, Any]] | None:
    """The op's type and arguments, for a node of such an op; None for others."""
    if not isinstance(node.target, OpOverload) or node.target.namespace != NAMESPACE:
        return None
    schema = node.target._schema
    op_type = schema.name.partition("::")[2]
    if op_type not in (RECURRENT_FORWARD, RECURRENT_GRAD):
        return None
    named = dict(zip((each.name for each in schema.arguments), node.args, strict=False))
    return op_type, {**named, **node.kwargs}


# ---- decompositions ----
#
# Decompositions for tracing that compute what eager computes, where torch's own do not.
#
# - ``dropout``: torch traces another op in its place, which draws the mask in another order where a
#   tensor is not row-major.  Without that replacement torch's own composition runs.
# - Recurrent layers with ``dropout`` between them: torch 2.13's decomposition loses the dropout.
#    Run layer by layer they keep it.
# - Recurrent layers over a free time: torch's decomposition loops over the steps, whose number a
#   program does not know; one op takes its place.
# - ``one_hot`` without a number of classes, and packed sequences: a size depends on data, and the
#   refusal says what to write instead.
# - ``ctc_loss``: the values kept for its backward have a size that depends on data (see above).


Kernel = Callable[..., Any]


@contextmanager
def as_eager() -> Iterator[None]:
    """Traces composite ops inside as the ops that eager runs."""
    aten = torch.ops.aten
    with ExitStack() as stack:
        stack.enter_context(_replaced(aten.dropout.default, lambda kernel: None))
        for kind in KINDS:
            overload = getattr(aten, kind).input
            stack.enter_context(_replaced(overload, partial(_by_layer, kind)))
        stack.enter_context(_given(aten.ctc_loss.Tensor, ctc_loss))
        stack.enter_context(_given(aten.one_hot.default, _one_hot))
        stack.enter_context(_given(aten._pack_padded_sequence.default, _pack_padded_sequence))
        yield


@contextmanager
def _replaced(overload: OpOverload, change: Callable[[Kernel], Kernel | None]) -> Iterator[None]:
    """Changes, or with None takes away, the Python kernels that torch would trace through."""
    kernels = dict(overload.py_kernels)
    changed = {key: change(kernel) for key, kernel in kernels.items() if key in _TRACED}
    _set(
        overload,
        {key: kernel for key, kernel in {**kernels, **changed}.items() if kernel is not None},
    )
    try:
        yield
    finally:
        _set(overload, kernels)


@contextmanager
def _given(overload: OpOverload, kernel: Kernel) -> Iterator[None]:
    """Gives a Python kernel to a composite op that has none."""
    kernels = dict(overload.py_kernels)
    _set(overload, {**kernels, DispatchKey.CompositeImplicitAutograd: kernel})
    try:
        yield
    finally:
        _set(overload, kernels)


def _one_hot(ids: Tensor, num_classes: int = -1) -> Tensor:
    """torch's own op, with the number of classes.

    Raises:
        ValueError: there is no number of classes, so that the batch's largest id would decide it.
    """
    if num_classes < 0:
        raise ValueError(
            "one_hot without num_classes makes as many columns as the largest id of the batch "
            "says, which a program cannot know: write one_hot(ids, num_classes=...)"
        )
    found: Tensor = torch.ops.aten.one_hot.default._op_dk(
        DispatchKey.CompositeImplicitAutograd, ids, num_classes
    )
    return found


def _pack_padded_sequence(*arguments: Any) -> NoReturn:
    """Refuses packed sequences.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        "a packed sequence has as many rows as the lengths of the batch say, which a program "
        "cannot know: give the layer the padded batch, whose steps after a sequence's end change "
        "none before it; mask its outputs by the lengths, and take the last state of each "
        "sequence with outputs[torch.arange(lengths.shape[0]), lengths - 1].  The backward "
        "direction of a bidirectional layer needs each sequence reversed within its length"
    )


_TRACED = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)


def _set(overload: OpOverload, kernels: dict[Any, Any]) -> None:
    overload.py_kernels.clear()
    overload.py_kernels.update(kernels)
    overload._dispatch_cache.clear()


def _over_free_time(kind: str, kernel: Kernel) -> Kernel:
    """A recurrent op without dropout, as one op of the trace where time is free."""

    def run(
        input: Tensor,
        hx: Tensor | Sequence[Tensor],
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, ...]:
        time = input.shape[1 if batch_first else 0]
        if not isinstance(time, torch.SymInt) or not time.node.expr.free_symbols:
            return tuple(
                kernel(
                    input,
                    hx,
                    params,
                    has_biases,
                    num_layers,
                    dropout,
                    train,
                    bidirectional,
                    batch_first,
                )
            )
        states = [hx] if isinstance(hx, Tensor) else list(hx)
        return traced(
            kind, input, states, params, has_biases, num_layers, train, bidirectional, batch_first
        )

    return run


def _by_layer(kind: str, unrolled: Kernel) -> Kernel:
    """A recurrent op (``torch.lstm``'s arguments) that runs once per layer where there is dropout
    in between.
    """
    kernel = _over_free_time(kind, unrolled)

    def run(
        input: Tensor,
        hx: Tensor | Sequence[Tensor],
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, ...]:
        if not (dropout and train and num_layers > 1):
            return tuple(
                kernel(
                    input,
                    hx,
                    params,
                    has_biases,
                    num_layers,
                    dropout,
                    train,
                    bidirectional,
                    batch_first,
                )
            )
        directions, each = (2 if bidirectional else 1), len(params) // num_layers
        states = [hx] if isinstance(hx, Tensor) else list(hx)
        finals: list[tuple[Tensor, ...]] = []
        value = input.transpose(0, 1) if batch_first else input
        for layer in range(num_layers):
            of_layer = [state[layer * directions : (layer + 1) * directions] for state in states]
            mine = params[layer * each : (layer + 1) * each]
            given = of_layer[0] if isinstance(hx, Tensor) else of_layer
            value, *final = kernel(
                value, given, mine, has_biases, 1, 0.0, train, bidirectional, False
            )
            finals.append(tuple(final))
            if layer < num_layers - 1:
                value = torch.dropout(value, dropout, train=True)
        ends = [torch.cat([final[index] for final in finals]) for index in range(len(states))]
        return (value.transpose(0, 1) if batch_first else value, *ends)

    return run


# ---- trace ----


Step = Callable[..., Any]
_DATA_DEPENDENT = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)


@dataclass(frozen=True)
class SizeGuard:
    """A decision about sizes that tracing took for the example.

    Attributes:
        expression: was true for the example's sizes.
        line: the line of the step, ``"train.py:12"``; "" if unknown.
        internal: torch's own code asked, not the model's.
    """

    expression: sympy.Basic
    line: str
    internal: bool


@dataclass
class TracedStep:
    """The result of tracing.  Tensors in the metadata of nodes are fake.

    Attributes:
        graph: the step; every node below is one of its nodes.
        constants: by the target of the get_attr node.
        placeholders: the name of the variable, by the node's name.
        outputs: by name, "loss" first.
        gradients: by parameter.
        named: by the label of ``name()``.
        lines: the line of the step, ``"train.py:12"``, by the node's name.
        sizes: the extents of each input; None where one is fixed.
        free: the names that the user gave to them, as in :class:`Inputs`.
        constant: the names of the nodes that autograd must not follow.
        opaque: of a forward trace, the functions whose backward is the user's own Python code.
        guards: the decisions about sizes.
        hints: the example's sizes, by free symbol.
    """

    graph: fx.Graph
    constants: Mapping[str, Tensor]
    placeholders: Mapping[str, str]
    outputs: Mapping[str, fx.Node]
    gradients: Mapping[str, fx.Node]
    named: Mapping[str, fx.Node]
    lines: Mapping[str, str]
    sizes: list[tuple[sympy.Basic | None, ...]] = field(default_factory=list)
    free: tuple[tuple[str | None, ...], ...] = ()
    constant: set[str] = field(default_factory=set)
    opaque: tuple[str, ...] = ()
    guards: list[SizeGuard] = field(default_factory=list)
    hints: dict[sympy.Symbol, int] = field(default_factory=dict)


class _Environment(ShapeEnv):
    """A ShapeEnv that records whether the model's code or torch's asked about a size.

    Attributes:
        asked: every decision that the model's own code asked for, even if its answer followed from
            an earlier decision of torch.
    """

    def __init__(self) -> None:
        super().__init__(
            specialize_zero_one=False,
            duck_shape=False,
            allow_dynamic_output_shape_ops=False,
            allow_scalar_outputs=False,
        )
        self.asked: list[SizeGuard] = []

    def traced_value(self, symbol: sympy.Symbol) -> int:
        """The value of a symbol while tracing."""
        # torch 2.10 has another name for it
        values = "backed_var_to_val" if hasattr(self, "backed_var_to_val") else "var_to_val"
        return int(getattr(self, values)[symbol])

    def _get_stack_summary(
        self, is_debug: bool = False, framework_loc: str | None = None
    ) -> tuple[SLoc, str]:
        return SLoc("torch" if _internal() else "model", source_location.here()), ""

    def evaluate_expr(self, orig_expr: sympy.Basic, *arguments: Any, **options: Any) -> sympy.Basic:
        """Decides as ShapeEnv does, and records decisions that the model's code asked for."""
        answer = super().evaluate_expr(orig_expr, *arguments, **options)
        if (
            isinstance(orig_expr, sympy.logic.boolalg.Boolean)
            and orig_expr.free_symbols
            and not _internal()
        ):
            self.asked.append(
                SizeGuard(
                    orig_expr if answer else sympy.Not(orig_expr), source_location.here(), False
                )
            )
        return answer


def _internal() -> bool:
    file = source_location.deciding_file()
    return source_location.is_torch(file) or not file


class _Step(nn.Module):
    """A step and its backward pass as a module, so that ``functional_call`` can swap the model's
    tensors.

    The backward pass belongs inside: a checkpointed part of the model runs again there, and must
    find the swapped tensors.
    """

    def __init__(
        self,
        model: nn.Module,
        step: Step,
        given: Mapping[str, Tensor],
        trained: Sequence[str],
        names: Sequence[str],
        targets: Sequence[str],
    ) -> None:
        super().__init__()
        self.model = model
        self.step = step
        self.given = dict(given)
        self.trained = trained  # nothing: there is no backward pass
        self.names = names
        self.targets = targets
        self.opaque: tuple[str, ...] = ()

    def forward(self, *batch: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Runs the step: its outputs by name, and the gradients by parameter."""
        fed = dict(zip(self.names, batch, strict=True))
        fed |= {name: fed[name].detach().requires_grad_() for name in self.trained if name in fed}
        result = source_location.call_step(self.step, self.model, *fed.values())
        losses = self.trained and not self.targets
        outputs = outputs_of(result) if losses else results_of(result)
        self._keep_buffers()
        if not self.trained:
            self.opaque = python_functions(outputs.values())
            return outputs, {}
        wanted = {**self.given, **fed}
        found = gradients_of(
            [outputs[name] for name in self.targets or ("loss",)],
            [wanted[name] for name in self.trained],
        )
        pairs = [
            (name, grad) for name, grad in zip(self.trained, found, strict=True) if grad is not None
        ]
        return outputs, {name: _as_stored(grad, wanted[name]) for name, grad in pairs}

    def _keep_buffers(self) -> None:
        """Copies a buffer that the module replaced, instead of changing it, into the tensor that
        holds it.
        """
        for name, buffer in self.model.named_buffers():
            held = self.given.get(name)
            if held is None:
                raise ValueError(
                    f"the step makes the buffer {name}: expected it before capture; run the model "
                    "once first"
                )
            if held is buffer:
                continue
            if (held.shape, held.dtype) != (buffer.shape, buffer.dtype) or buffer.requires_grad:
                came = f"{buffer.dtype} {tuple(buffer.shape)}" + (
                    " with a gradient history" if buffer.requires_grad else ""
                )
                raise ValueError(
                    f"the step re-assigns the buffer {name}: expected {held.dtype} "
                    f"{tuple(held.shape)}, got {came}"
                )
            with torch.no_grad():
                held.copy_(buffer)


def _as_stored(grad: Tensor, param: Tensor) -> Tensor:
    """The gradient in the strides in which autograd stores it.

    See [Note: gradients as autograd stores them].
    """
    if grad.layout != torch.strided:
        raise ValueError(f"expected dense gradients, got a {grad.layout} one")
    same = all(
        size == 1 or mine == theirs
        for size, mine, theirs in zip(param.shape, grad.stride(), param.stride(), strict=True)
    )
    if same or param.numel() == 0:
        return grad
    stored = torch.empty_strided(param.shape, param.stride(), dtype=grad.dtype, device=grad.device)
    return stored.copy_(grad)


def trace(
    model: nn.Module,
    step: Step,
    trained: Sequence[str],
    inputs: Inputs,
    tables: Mapping[str, list[nn.Module]] = MappingProxyType({}),
    targets: Sequence[str] = (),
) -> TracedStep:
    """Traces one step.

    Args:
        trained: the parameters, and inputs, whose gradients are wanted; none: forward alone is
            traced.
        inputs: of two rows or more, and likewise in every other free dimension.
        tables: the modules that look up each table, by the table's name.
        targets: the outputs whose sum is differentiated; none: the loss.

    Raises:
        ValueError: the step cannot be captured; the message names the line of the step.
    """
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    environment = _Environment()
    mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
    held = [
        mode.from_tensor(tensor, static_shapes=True, source=LocalSource(key))
        for key, tensor in state.items()
    ]
    fed = [
        _fake_input(mode, f"input_{index}", tensor, free)
        for index, (tensor, free) in enumerate(zip(inputs.batch, inputs.free, strict=True))
    ]
    keys: dict[str, list[str]] = {}
    lines, opaque = NodeLines(), list[str]()

    def run(held: list[Tensor], fed: list[Tensor]) -> list[Tensor]:
        given = dict(zip(state, held, strict=True))
        with as_eager(), recording() as named, lines, torch.enable_grad(), looking_up(tables):
            wrapped = _Step(model, step, given, trained, inputs.names, targets)
            swapped = {f"model.{key}": value for key, value in given.items()}
            _equate(inputs, fed)
            outputs, grads = torch.func.functional_call(wrapped, swapped, tuple(fed))
        opaque.extend(wrapped.opaque)
        keys.update(outputs=list(outputs), gradients=list(grads), named=list(named))
        return [*outputs.values(), *grads.values(), *named.values()]

    with _explained():
        module = make_fx(run, tracing_mode="symbolic")(held, fed)
    made = _collect(module, keys, [*state, *inputs.names], lines.lines)
    _read_sizes(made, environment, fed, inputs)
    made.constant, made.opaque = lines.constant, tuple(dict.fromkeys(opaque))
    return made


def _fake_input(
    mode: FakeTensorMode, name: str, tensor: Tensor, free: Sequence[str | None]
) -> FakeTensor:
    dynamic = [DimDynamic.STATIC if size is None else DimDynamic.DYNAMIC for size in free]
    context: Any = StatelessSymbolicContext(dynamic_sizes=dynamic)
    return mode.from_tensor(tensor.detach(), symbolic_context=context, source=LocalSource(name))


def _equate(inputs: Inputs, fed: Sequence[Tensor]) -> None:
    """Makes sizes of one name equal."""
    known: dict[str, Any] = {}
    for free, tensor in zip(inputs.free, fed, strict=True):
        for size, name in zip(tensor.shape, free, strict=True):
            if name:
                torch._check(size == known.setdefault(name, size))  # type: ignore[no-untyped-call]


@contextmanager
def _explained() -> Iterator[None]:
    """Turns an error of tracing into a ValueError that names the line of the step."""
    try:
        yield
    except Exception as error:
        line = source_location.of_error(error)
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, _DATA_DEPENDENT):
            cause = cause.__cause__ or cause.__context__
        if cause is not None:
            why = (
                "control flow or a size depends on the values in a tensor, which a program "
                "cannot express"
            )
            line = line or source_location.of_error(cause)
        else:
            kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
            why = kind + str(error).strip().partition(chr(10))[0]
        raise ValueError(
            f"{line or 'in the backward pass'}: cannot capture this step: {why}"
        ) from error


def _collect(
    module: fx.GraphModule,
    keys: Mapping[str, list[str]],
    inputs: list[str],
    lines: Mapping[str, str],
) -> TracedStep:
    graph = module.graph
    placeholders = {
        node.name: name
        for node, name in zip(graph.find_nodes(op="placeholder"), inputs, strict=True)
    }
    results: list[Any] = list(graph.output_node().args[0])  # type: ignore[arg-type]  # run returns a list
    parts: dict[str, dict[str, fx.Node]] = {}
    for part in ("outputs", "gradients", "named"):
        parts[part] = {key: results.pop(0) for key in keys[part]}
    constants = {
        str(node.target): operator.attrgetter(str(node.target))(module)
        for node in graph.find_nodes(op="get_attr")
    }
    return TracedStep(
        graph, constants, placeholders, parts["outputs"], parts["gradients"], parts["named"], lines
    )


def _read_sizes(
    made: TracedStep, environment: _Environment, fed: list[FakeTensor], inputs: Inputs
) -> None:
    """Reads the sizes and the guards; an extent that tracing fixed is an error."""
    raised = [(guard.expr, guard.sloc) for guard in environment.guards]
    decided = [
        SizeGuard(expression, where.maybe_user_loc or "", where.framework_loc == "torch")
        for expression, where in raised
    ]
    made.free = inputs.free
    for name, tensor, free in zip(inputs.names, fed, inputs.free, strict=True):
        found: list[sympy.Basic | None] = []
        for dim, of in enumerate(free):
            symbol = None if of is None else _symbol(tensor, dim)
            size = None if symbol is None else environment.replace(symbol)
            if size is not None and not size.free_symbols:
                raise _fixed(name, dim, size, symbol, decided)
            found.append(size)
            for each in size.free_symbols if size is not None else ():
                made.hints[each] = environment.traced_value(each)
        made.sizes.append(tuple(found))
    for guard in [*environment.asked, *decided]:
        made.guards.append(
            SizeGuard(environment.replace(guard.expression), guard.line, guard.internal)
        )


def _symbol(tensor: Tensor, dim: int) -> sympy.Symbol:
    size = tensor.size(dim)
    assert isinstance(size, torch.SymInt), "a free dimension of an input is symbolic"
    return size.node._expr  # as made, before any replacement


def _fixed(
    name: str, dim: int, size: sympy.Basic, symbol: sympy.Symbol, decided: Sequence[SizeGuard]
) -> ValueError:
    """The error for an extent that tracing fixed, with the line that did."""
    lines = [guard.line for guard in decided if guard.line]
    own = [g.line for g in decided if g.line and symbol in g.expression.free_symbols]
    line = next(reversed([*lines, *own]), "")
    advice = (
        "put the batch first, where time or another axis is; and write x.shape[0], where len(x), "
        "int() or range() makes a plain number of it"
        if dim == 0
        else f"write x.shape[{dim}], where int(), range() or a loop makes a plain number of it, or "
        "give the input's InputSpec a fixed size there"
    )
    return ValueError(
        f"{line + ': ' if line else ''}the step fixes dimension {dim} of the input {name!r} to "
        f"{size}, but it must stay free: {advice}"
    )
