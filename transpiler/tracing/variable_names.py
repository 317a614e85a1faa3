"""The names of an emitted program's variables, and of the sizes that stay free."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import sympy  # type: ignore[import-untyped]  # has no stubs
import torch
from torch import fx, nn

from transpiler.ir.graph import Role
from transpiler.tracing.emit_ops import is_alias
from transpiler.tracing.emit_tables import TableNodes
from transpiler.tracing.trace import Trace


class VariableNames:
    """Which name the variable of each graph node gets.

    Inputs, outputs, gradients and tensors named with ``name()`` have the names that the user asked
    for; every other variable has its node's name, made unique.

    Args:
        found: the trace.
        model: whose parameters and buffers keep their names.
        inputs: the names of the inputs.
        above_one: the free sizes for which the graph holds from 2 on.
        tables: the lookups of the trace.

    Attributes:
        inputs: the names of the inputs.
        targets: the nodes that are wanted, by wanted name: outputs, gradients, named tensors.

    Raises:
        ValueError: two variables have the same name.
    """

    def __init__(
        self,
        found: Trace,
        model: nn.Module,
        inputs: Sequence[str],
        above_one: Collection[sympy.Symbol],
        tables: TableNodes,
    ) -> None:
        self.inputs = tuple(inputs)
        self._outputs = found.outputs
        self._above_one = set(above_one)
        self._symbols = self._name_symbols(found)
        gradients = {
            f"{name}@GRAD": node
            for name, node in found.gradients.items()
            if name not in tables.proxies
        }
        self.targets = {**found.outputs, **gradients, **found.named}
        held = {*dict(model.named_parameters()), *dict(model.named_buffers()), *tables.looked_up}
        if len(self.targets) != len(found.outputs) + len(gradients) + len(found.named):
            raise ValueError("capture: an output and a tensor named with name() have the same name")
        for name in (*inputs, *self.targets):
            if name in held or (name in inputs and name in self.targets):
                raise ValueError(
                    f"capture: the name {name!r} belongs to two variables (of inputs, outputs, "
                    "name(), the model)"
                )
        self._taken = {*held, *inputs, *self.targets}
        # the first wanted name of a node; it gets the others by assign ops
        self._wanted: dict[fx.Node, str] = {}
        for name, node in self.targets.items():
            if node.op == "call_function" and not is_alias(node):
                self._wanted.setdefault(node, name)

    def _name_symbols(self, found: Trace) -> dict[sympy.Symbol, str]:
        """The names that the user gave; otherwise ``batch`` for the first input's dimension 0,
        ``<input>_rows`` for the others', ``<input>_1`` for dimension 1 of an input, and so on.
        """
        free: dict[sympy.Symbol, str] = {}
        given = {name for names in found.free for name in names if name}
        for sizes, names in zip(found.sizes, found.free, strict=True):
            free |= {
                size: name
                for size, name in zip(sizes, names, strict=True)
                if name and size is not None and size.is_Symbol
            }
        for input_, sizes in zip(self.inputs, found.sizes, strict=True):
            for dim, size in enumerate(sizes):
                for symbol in sorted(size.free_symbols, key=str) if size is not None else ():
                    name = f"{input_}_{dim}" if dim else f"{input_}_rows"
                    if dim == 0 and "batch" not in {*free.values(), *given}:
                        name = "batch"
                    free.setdefault(symbol, name)
        return free

    def extent(self, size: int | torch.SymInt, of_input: bool) -> int | str:
        """A size as a program holds it: ``"batch"``, or ``"batch>=2"`` at an input where one row is
        not enough.
        """
        if isinstance(size, int):
            return size
        expression = size.node.expr
        if expression.is_number:
            return int(expression)
        renamed = expression.xreplace(
            {symbol: sympy.Symbol(name) for symbol, name in self._symbols.items()}
        )
        suffix = ">=2" if of_input and expression in self._above_one else ""
        return str(renamed).replace(" ", "") + suffix

    def is_wanted(self, node: fx.Node) -> bool:
        """Whether a node's variable has a wanted name."""
        return node in self._wanted

    def fresh(self, name: str) -> str:
        """The name, or the first of ``name_1``, ``name_2``, ... that is free; it is taken then."""
        found, count = name, 1
        while found in self._taken:
            found, count = f"{name}_{count}", count + 1
        self._taken.add(found)
        return found

    def of(self, node: fx.Node, otherwise: str = "") -> tuple[str, Role]:
        """The name and the role of a node's variable.

        Args:
            otherwise: the name to make unique if none is wanted; "" is the node's own.
        """
        wanted = self._wanted.get(node)
        if wanted is None:
            return self.fresh(otherwise or node.name), Role.TEMPORARY
        # name() refuses an "@", and no output has one
        if wanted.endswith("@GRAD"):
            return wanted, Role.GRADIENT
        return wanted, Role.OUTPUT if wanted in self._outputs else Role.TEMPORARY
