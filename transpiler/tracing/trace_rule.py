"""Traces an update that a user wrote, as the block of a registered rule.

[Note: tracing a rule]  The update runs on fake tensors, and its hparams are symbols, so that a
schedule may move them.  It runs twice, on float32 and on float64.  A rule holds no dtype: the same
ops must do for every parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    ShapeEnv,
)

from transpiler.ir import source_location
from transpiler.ir.graph import Argument, Block, Op, Ref, Role, Variable, freeze
from transpiler.ir.rules import Hparam
from transpiler.ir.update_block import NEW, inputs_of
from transpiler.tracing.emit import SIZE_OPS, argument_of, aten_call, is_alias
from transpiler.tracing.trace import NodeLines

Update = Callable[..., Any]
_UNKNOWN = (
    GuardOnDataDependentSymNode,
    DataDependentOutputException,
    DynamicOutputShapeException,
)
_ELEMENTS = 6  # of the example; any would do


class _Environment(ShapeEnv):
    """A ShapeEnv in which no hparam equals a number that torch's own code compares it with.

    torch 2.10's ``pow`` asks whether its exponent is 1, 2 or 0.5; a later one asks only what is
    known.  The recorded op is the same.
    """

    def evaluate_expr(self, orig_expr: sympy.Basic, *arguments: Any, **options: Any) -> sympy.Basic:
        """Decides as ShapeEnv does, where it can."""
        try:
            return super().evaluate_expr(orig_expr, *arguments, **options)
        except GuardOnDataDependentSymNode:
            asks = source_location.deciding_file()
            if isinstance(orig_expr, sympy.Equality) and source_location.is_torch(asks):
                return sympy.false
            raise


def trace_rule(
    update: Update,
    state: Sequence[str],
    scalars: Sequence[str],
    hparams: Mapping[str, Hparam],
) -> Block:
    """The block of an update, unchecked: ``update_block.check`` says whether servers run it.

    Args:
        update: as :func:`register_rule` describes it.
        state, scalars: the states' names.
        hparams: name -> a value.

    Raises:
        ValueError: the update is not a fixed list of ops; the message names the line.
    """
    variables = [
        Variable("param", ("n",), "float32", Role.PARAMETER),
        Variable("grad", ("n",), "float32", Role.GRADIENT),
        *(Variable(name, ("n",), "float32", Role.STATE) for name in state),
        *(Variable(name, (), "float32", Role.STATE) for name in scalars),
        *(
            Variable(name, (len(value),) if isinstance(value, tuple) else (), "float64", Role.INPUT)
            for name, value in hparams.items()
        ),
    ]
    block = Block(0, freeze({each.name: each for each in variables}), ())
    ops, others = (_ops(update, block, hparams, dtype) for dtype in (torch.float32, torch.float64))
    for op, other in zip(ops, others, strict=False):
        if op != other:
            raise ValueError(
                f"{op.location or other.location}: the update has {op.type} for float32 and "
                f"{other.type} for float64: leave out the conversion between dtypes"
            )
    return Block(0, block.variables, tuple(ops))


def _ops(
    update: Update, block: Block, hparams: Mapping[str, Hparam], dtype: torch.dtype
) -> list[Op]:
    states = block.variables_of(Role.STATE)
    names = inputs_of(block)
    environment, lines = _Environment(), NodeLines()
    with FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True):
        tensors = [torch.empty(_ELEMENTS, dtype=dtype) for _ in ("param", "grad")]
        tensors += [
            torch.empty(_ELEMENTS, dtype=dtype) if each.shape else torch.empty(())
            for each in states
        ]
    numbers = [environment.create_unbacked_symfloat() for _ in names[len(tensors) :]]

    def run(*values: Any) -> list[Tensor]:
        given = dict(zip(names, values, strict=True))
        with lines, torch.no_grad():
            result = source_location.call_step(
                update,
                given["param"],
                given["grad"],
                {each.name: given[each.name] for each in states},
                _hparams(given, hparams),
            )
        return _results(result, [each.name for each in states])

    graph = _traced(run, [*tensors, *numbers])
    return _emitted(graph, names, [each.name for each in states], lines.lines)


def _hparams(given: Mapping[str, Any], hparams: Mapping[str, Hparam]) -> dict[str, Any]:
    """The hparams as the update gets them: symbols, or tuples of symbols."""
    return {
        name: tuple(given[f"{name}.{index}"] for index in range(len(value)))
        if isinstance(value, tuple)
        else given[name]
        for name, value in hparams.items()
    }


def _results(result: Any, states: Sequence[str]) -> list[Tensor]:
    """The new parameter, then the new states."""
    param, new = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    expected = f"(parameter, {{{', '.join(map(repr, states))}}})" if states else "the parameter"
    fits = isinstance(param, Tensor) and isinstance(new, Mapping) and set(new) == set(states)
    if not fits or not all(isinstance(value, Tensor) for value in new.values()):
        got = sorted(new) if isinstance(new, Mapping) else type(new).__name__
        raise ValueError(
            f"expected it to return {expected}, tensors, got {type(param).__name__} and {got}"
        )
    return [param, *(new[name] for name in states)]


def _traced(run: Callable[..., list[Tensor]], values: Sequence[Any]) -> fx.Graph:
    try:
        pure = torch.func.functionalize(run)
        return make_fx(pure, _allow_non_fake_inputs=True)(*values).graph
    except Exception as error:
        line = source_location.of_error(error)
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, _UNKNOWN):
            cause = cause.__cause__ or cause.__context__
        why = str(error).strip().partition("\n")[0]
        if not isinstance(error, ValueError):
            why = f"{type(error).__name__}: {why}"
        if cause is not None:
            why = (
                "the update decides by a number, and a rule is the same ops at every step: use "
                "torch.where, or a second rule"
            )
        raise ValueError(f"{line}: {why}" if line else why) from error


def _emitted(
    graph: fx.Graph, names: Sequence[str], states: Sequence[str], lines: Mapping[str, str]
) -> list[Op]:
    variable_of: dict[fx.Node, str] = {}
    inputs, ops = iter(names), list[Op]()

    def argument(value: Any) -> Argument:
        return argument_of(value, variable_of, torch.device("cpu"))

    for node in graph.nodes:
        where = lines.get(node.name, "")
        if node.op == "placeholder":
            variable_of[node] = next(inputs)
        elif node.op == "get_attr":
            raise ValueError(f"{where}: expected a number, got a constant tensor")
        elif node.op == "call_function":
            if node.target is torch.ops.aten.copy_.default:
                changed = variable_of[node.args[0]]
                raise ValueError(f"the update changes {changed!r} in place: return the new value")
            variable_of[node] = f"t{len(ops)}"
            op_type, arguments = _call(node, argument)
            ops.append(Op(op_type, arguments, (variable_of[node],), where))
    (returned,) = (node for node in graph.nodes if node.op == "output")
    for name, node in zip(("param", *states), returned.args[0], strict=True):
        ops.append(Op("assign", {"x": Ref(variable_of[node])}, (name + NEW,)))
    return ops


def _call(node: fx.Node, argument: Callable[[Any], Argument]) -> tuple[str, dict[str, Argument]]:
    if is_alias(node):
        return "assign", {"x": argument(node.args[0])}
    if node.target in SIZE_OPS:
        keys = ("a", "b")[: len(node.args)]
        return SIZE_OPS[node.target], dict(zip(keys, map(argument, node.args), strict=True))
    return aten_call(node, argument)
