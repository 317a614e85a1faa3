"""One step as an fx graph: forward and, where something is trained, loss and gradients, with the
sizes free that are said to be.

[Note: what stays free]  Tracing runs the step once on fake tensors.  A free size of an input
(dimension 0, if nothing else is said) is a symbol there, every other extent a number.  Python code
that looks at a symbol (``if x.shape[0] > 16``) is decided for the example, and torch records the
decision as a guard.  A decision of the user's code must hold for every size; otherwise the graph
would silently hold one branch of the model.  torch takes decisions of its own too (is this tensor
contiguous? which memory format does the convolution choose?).  They do not change what is computed,
so they are no error by themselves; the equivalence check tests them at a size where they fall
otherwise.

[Note: gradients as autograd stores them]  ``p.grad`` is not always the tensor that backward
computed: autograd copies one whose strides differ from the parameter's.  Reductions over it (a
norm) add in the order of memory, so the copy is part of the trace.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import sympy  # type: ignore[import-untyped]  # has no stubs
import torch
from torch import Tensor, fx, nn
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (  # type: ignore[attr-defined]  # SLoc is not in __all__
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    SLoc,
    StatelessSymbolicContext,
)

from transpiler.ir import source_location
from transpiler.tracing.autograd import gradients_of, python_functions
from transpiler.tracing.decompositions import as_eager
from transpiler.tracing.default_programs import recording
from transpiler.tracing.embedding_lookup import looking_up
from transpiler.tracing.equivalence_check import outputs_of, results_of
from transpiler.tracing.input_spec import Inputs
from transpiler.tracing.node_lines import NodeLines

Step = Callable[..., Any]
_DATA_DEPENDENT = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)


@dataclass(frozen=True)
class Guard:
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
class Trace:
    """What tracing found.  Tensors in the metadata of nodes are fake.

    Attributes:
        graph: the step; every node below is one of it.
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
    guards: list[Guard] = field(default_factory=list)
    hints: dict[sympy.Symbol, int] = field(default_factory=dict)


class _Environment(ShapeEnv):
    """A ShapeEnv that knows whose code asked about a size.

    Attributes:
        asked: every decision that the model's own code asked for, also one whose answer followed
            from a decision that torch took before.
    """

    def __init__(self) -> None:
        super().__init__(
            specialize_zero_one=False,
            duck_shape=False,
            allow_dynamic_output_shape_ops=False,
            allow_scalar_outputs=False,
        )
        self.asked: list[Guard] = []

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
                Guard(orig_expr if answer else sympy.Not(orig_expr), source_location.here(), False)
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
) -> Trace:
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
    """Sizes of one name have one value."""
    known: dict[str, Any] = {}
    for free, tensor in zip(inputs.free, fed, strict=True):
        for size, name in zip(tensor.shape, free, strict=True):
            if name:
                torch._check(size == known.setdefault(name, size))  # type: ignore[no-untyped-call]


@contextmanager
def _explained() -> Iterator[None]:
    """Turns what tracing raises into a ValueError that names the line of the step."""
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
) -> Trace:
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
    return Trace(
        graph, constants, placeholders, parts["outputs"], parts["gradients"], parts["named"], lines
    )


def _read_sizes(
    made: Trace, environment: _Environment, fed: list[FakeTensor], inputs: Inputs
) -> None:
    """Reads the sizes and the guards; an extent that tracing fixed is an error."""
    raised = [(guard.expr, guard.sloc) for guard in environment.guards]
    decided = [
        Guard(expression, where.maybe_user_loc or "", where.framework_loc == "torch")
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
                made.hints[each] = int(environment.backed_var_to_val[each])
        made.sizes.append(tuple(found))
    for guard in [*environment.asked, *decided]:
        made.guards.append(Guard(environment.replace(guard.expression), guard.line, guard.internal))


def _symbol(tensor: Tensor, dim: int) -> sympy.Symbol:
    size = tensor.size(dim)
    assert isinstance(size, torch.SymInt), "a free dimension of an input is symbolic"
    return size.node._expr  # as made, before any replacement


def _fixed(
    name: str, dim: int, size: sympy.Basic, symbol: sympy.Symbol, decided: Sequence[Guard]
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
