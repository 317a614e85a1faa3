"""Lowers a list of ops to one ``torch.fx.GraphModule``, whose generated code runs them in order.

The generated code frees each tensor after its last use.  It drops, merges and reorders nothing: an
op without results (``send``) stays in its place.  Aten ops and arithmetic on sizes need no kernel;
every other op needs one.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from transpiler.clip import KERNELS as CLIP_KERNELS
from transpiler.ir.graph import Argument, Literal, Op, Ref, Symbol
from transpiler.ir.ops import aten_overload
from transpiler.ir.python_functions import KERNELS as PYTHON_KERNELS
from transpiler.ir.recurrent import KERNELS as RECURRENT_KERNELS
from transpiler.ir.scaling_ops import KERNELS as SCALING_KERNELS
from transpiler.ir.schema import DTYPES
from transpiler.ir.sparse_rows import RowKernels
from transpiler.ir.table_ops import SEVERAL as SEVERAL_OF_TABLES

# the ops whose kernels return a list, even for a single result
SEVERAL = (
    frozenset({"split", "recv", *RECURRENT_KERNELS, *PYTHON_KERNELS, *SCALING_KERNELS})
    | SEVERAL_OF_TABLES
)

# Called with the op, then the op's arguments by name; returns its result, or a sequence of its
# results.
Kernel = Callable[..., Any]

_SIZES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "sym.add": operator.add,
        "sym.sub": operator.sub,
        "sym.mul": operator.mul,
        "sym.floordiv": operator.floordiv,
        "sym.truediv": operator.truediv,
        "sym.mod": operator.mod,
        "sym.pow": operator.pow,
        "sym.neg": operator.neg,
        "sym.max": torch.sym_max,
        "sym.min": torch.sym_min,
        "sym.float": torch.sym_float,
        "sym.int": torch.sym_int,
        "sym.ceil": math.ceil,
        "sym.floor": math.floor,
        "sym.sqrt": math.sqrt,
    }
)


def split(op: Op, x: Tensor, sections: Sequence[int]) -> list[Tensor]:
    """The kernel of ``split``.

    Args:
        sections: the elements of each slice; of a tensor of two or more dimensions, whole rows.

    Returns:
        The slices, as views.
    """
    if x.dim() < 2:
        return list(torch.split(x.reshape(-1), list(sections)))
    row = x[0].numel() if len(x) else 1
    return list(torch.split(x, [section // max(row, 1) for section in sections]))


KERNELS: Mapping[str, Kernel] = MappingProxyType(
    {
        **CLIP_KERNELS,
        **RowKernels().kernels(),
        **RECURRENT_KERNELS,
        **PYTHON_KERNELS,
        **SCALING_KERNELS,
        "split": split,
        "concat": lambda op, x, axis: torch.cat(x, dim=axis),
        "sum": lambda op, x: sum(x[1:], start=x[0]),
        "scale": lambda op, x, scale: x * scale,
    }
)


class _Bound:
    """A kernel bound to its op, with the names that fx needs to generate a call."""

    def __init__(self, op: Op, kernel: Kernel) -> None:
        self.__name__ = re.sub(r"\W", "_", op.type)
        self.__module__ = __name__
        self._op = op
        self._kernel = kernel

    def __call__(self, **arguments: Any) -> Any:
        return self._kernel(self._op, **arguments)


@dataclass(frozen=True)
class Lowered:
    """The generated code of a list of ops.

    Attributes:
        module: takes the values of ``inputs`` by position; returns a tuple of the values of
            ``outputs``.
        inputs: the names of the variables that the ops read from outside.
        outputs: the names of the wanted variables.
        lines: the op of each line of the generated code.
    """

    module: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    lines: Mapping[int, Op]

    def __call__(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """Runs the ops.

        Args:
            values: by name, of ``inputs`` at least.

        Returns:
            The values of ``outputs``.

        Raises:
            Exception: what an op raises, with the op and its line of the user's code added to the
                message.
        """
        try:
            return self.module.forward(*[values[name] for name in self.inputs])  # type: ignore[no-any-return]  # generated
        except Exception as error:
            self.explain(error)
            raise

    def explain(self, error: BaseException) -> None:
        """Adds to the error's message the op that was running, and its line."""
        file = self.module.forward.__code__.co_filename
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != file:
            trace = trace.tb_next
        op = self.lines.get(trace.tb_lineno) if trace is not None else None
        if op is None:
            return
        words = f"While executing {op.type}" + (f" at {op.location}" if op.location else "")
        if len(error.args) == 1 and isinstance(error.args[0], str):
            error.args = (f"{error.args[0]}\n{words}",)
        else:
            error.add_note(words)


def tensor_of(literal: Literal, device: torch.device) -> Tensor:
    """A constant as a tensor: a copy, row-major."""
    dtype = DTYPES[literal.dtype]
    if not literal.data:
        return torch.empty(literal.shape, dtype=dtype, device=device)
    flat = torch.frombuffer(bytearray(literal.data), dtype=dtype)
    return flat.reshape(literal.shape).to(device)


class _Lowering:
    """One run of :func:`lower`."""

    def __init__(self, kernels: Mapping[str, Kernel], device: torch.device) -> None:
        self.graph = fx.Graph()
        self.root = torch.nn.Module()
        self.values: dict[str, fx.Node] = {}
        self.op_of: dict[str, Op] = {}  # by node name
        self._kernels = {**KERNELS, **kernels}
        self._device = device
        self._constants: dict[Literal, str] = {}

    def argument(self, argument: Argument) -> Any:
        """A program's argument as an argument of an fx node."""
        if isinstance(argument, Ref):
            return self.values[argument.name]
        if isinstance(argument, tuple):
            return [self.argument(item) for item in argument]
        if isinstance(argument, Symbol):
            return self._word(argument)
        assert not isinstance(argument, Literal), "constants stand in assign_value ops"
        return argument

    def _word(self, symbol: Symbol) -> Any:
        if symbol.kind == "dtype":
            return DTYPES[symbol.value]
        if symbol.kind == "device":
            return self._device if symbol.value == "executor" else torch.device(symbol.value)
        # "strided", "contiguous_format": checked against the catalogue
        return getattr(torch, symbol.value)

    def emit(self, op: Op) -> None:
        """Adds one op to the graph."""
        if op.type == "assign":
            self.values[op.outputs[0]] = self.argument(op.arguments["x"])
        elif op.type == "assign_value":
            self.values[op.outputs[0]] = self._constant(op)
        elif op.type == "sym.size":
            arguments = tuple(self.argument(op.arguments[key]) for key in ("x", "dim"))
            self._define(op, self.graph.call_method("size", arguments), False)
        elif op.type in _SIZES:
            arguments = tuple(
                self.argument(op.arguments[key]) for key in ("a", "b") if key in op.arguments
            )
            self._define(op, self.graph.call_function(_SIZES[op.type], arguments), False)
        elif op.type.startswith("aten."):
            self._aten(op)
        else:
            self._own(op)

    def _constant(self, op: Op) -> fx.Node:
        literal = op.arguments["value"]
        assert isinstance(literal, Literal), "checked against the schema"
        if literal not in self._constants:
            self._constants[literal] = f"constant_{len(self._constants)}"
            self.root.register_buffer(self._constants[literal], tensor_of(literal, self._device))
        return self.graph.get_attr(self._constants[literal])

    def _aten(self, op: Op) -> None:
        overload = aten_overload(op.type)
        positional: list[Any] = []
        named: dict[str, Any] = {}
        gap = False
        for argument in overload._schema.arguments:
            gap = gap or argument.kwarg_only or argument.name not in op.arguments
            if argument.name in op.arguments and gap:
                named[argument.name] = self.argument(op.arguments[argument.name])
            elif not gap:
                positional.append(self.argument(op.arguments[argument.name]))
        returns = overload._schema.returns
        several = len(returns) > 1 or any("List" in str(each.type) for each in returns)
        self._define(op, self.graph.call_function(overload, tuple(positional), named), several)

    def _own(self, op: Op) -> None:
        if op.type not in self._kernels:
            raise ValueError(
                f"op {op.type!r}: expected an op that this process can run, got one without a "
                "kernel"
            )
        # fx may name a plain string or number; lists of names stay lists
        arguments = {key: self.argument(value) for key, value in op.arguments.items()}
        several = len(op.outputs) > 1 or op.type in SEVERAL
        self._define(
            op, self.graph.call_function(_Bound(op, self._kernels[op.type]), (), arguments), several
        )

    def _define(self, op: Op, node: fx.Node, several: bool) -> None:
        self.op_of[node.name] = op
        if not several:
            self.values.update({name: node for name in op.outputs if name})
            return
        for index, name in enumerate(op.outputs):
            if name:
                self.values[name] = self.graph.call_function(operator.getitem, (node, index))
                self.op_of[self.values[name].name] = op


def free_inputs(ops: Iterable[Op]) -> list[str]:
    """The variables that the ops read before any of them defines it, in order."""
    defined: set[str] = set()
    found: dict[str, None] = {}
    for op in ops:
        found.update((name, None) for name in op.inputs if name not in defined)
        defined.update(op.outputs)
    return list(found)


def lower(
    ops: Sequence[Op],
    outputs: Sequence[str],
    device: torch.device,
    kernels: Mapping[str, Kernel] | None = None,
) -> Lowered:
    """Generates the code of a list of ops.

    Args:
        ops: in the order in which they run.
        outputs: the variables wanted; each is defined by an op, or is an input and passes through.
        device: the device that the ops' arguments call "executor"; constants are put there.
        kernels: by op type, for ops that are neither aten nor arithmetic on sizes; they take
            precedence over the kernels here.

    Raises:
        ValueError: torch lacks an op, or an op has no kernel.
    """
    lowering = _Lowering(kernels or {}, device)
    inputs = free_inputs(ops)
    written = {name for op in ops for name in op.outputs}
    inputs += [
        name for name in dict.fromkeys(outputs) if name not in written and name not in inputs
    ]
    for index, name in enumerate(inputs):
        lowering.values[name] = lowering.graph.placeholder(f"in_{index}")
    for op in ops:
        lowering.emit(op)
    lowering.graph.output(tuple(lowering.values[name] for name in outputs))
    module = fx.GraphModule(lowering.root, lowering.graph)
    return Lowered(module, tuple(inputs), tuple(outputs), _line_table(module, lowering.op_of))


def _line_table(module: fx.GraphModule, op_of: Mapping[str, Op]) -> dict[int, Op]:
    """The op of each line of the generated code; a line begins with the name of its node."""
    names = [re.match(r"\s*(\w+)(?:\s*:[^=]*)? = ", line) for line in module.code.splitlines()]
    return {
        number: op_of[match[1]]
        for number, match in enumerate(names, start=1)
        if match and match[1] in op_of
    }
