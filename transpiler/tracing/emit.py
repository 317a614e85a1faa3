"""Emits a traced graph as the variables and ops of block 0, before clipping and updates.

Node by node, in the order of the graph: what a node is called is in ``variable_names.py``, which op
and arguments it becomes in ``emit_ops.py``, lookups of tables in ``emit_tables.py``.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy  # type: ignore[import-untyped]  # has no stubs
import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload

from transpiler.ir.effects import changed
from transpiler.ir.graph import Argument, Literal, Op, Ref, Role, Variable
from transpiler.ir.ops import check
from transpiler.ir.table_ops import gradient_variable
from transpiler.tracing.ctc import call_of as ctc_call_of
from transpiler.tracing.embedding_tables import CapturedTable
from transpiler.tracing.emit_ops import (
    ALIASES,
    SIZE_OPS,
    argument_of,
    aten_call,
    is_alias,
    schema_name,
)
from transpiler.tracing.emit_tables import TableNodes, kind_of
from transpiler.tracing.py_func import call_of as python_call_of
from transpiler.tracing.recurrent import call_of
from transpiler.tracing.trace import Trace
from transpiler.tracing.variable_names import VariableNames

# Tracing leaves these behind where eager code needs them and a program does not.  Only ops without
# any effect may stand here.
_DROPPABLE = (
    *ALIASES,
    "aten::empty",
    "aten::t",
    "aten::view",
    "aten::transpose",
    "aten::permute",
    "aten::sym_size",
)


@dataclass
class Emitted:
    """Block 0 of a program, before clipping and optimizer ops."""

    variables: dict[str, Variable] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)


def emit(
    found: Trace,
    model: nn.Module,
    names: Sequence[str],
    trained: set[str],
    above_one: Collection[sympy.Symbol] = (),
    tables: Sequence[CapturedTable] = (),
) -> Emitted:
    """Emits a trace.

    Args:
        names: of the inputs.
        trained: the parameters that are trained; the others are buffers to the program.
        above_one: the free sizes for which the graph holds from 2 on.
        tables: of the model.

    Raises:
        ValueError: an op is not in the catalogue, or changes a tensor that is neither an input nor
            the model's.
    """
    return _Emitter(found, model, names, trained, above_one, TableNodes(found, tables)).emit()


class _Emitter:
    """One run of :func:`emit`."""

    def __init__(
        self,
        found: Trace,
        model: nn.Module,
        names: Sequence[str],
        trained: set[str],
        above_one: Collection[sympy.Symbol],
        tables: TableNodes,
    ) -> None:
        self._found = found
        self._tables = tables
        self._trained = trained
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        held = [*model.parameters(), *model.buffers()]
        self._storages = {tensor.untyped_storage().data_ptr() for tensor in held if tensor.numel()}
        self._names = VariableNames(found, model, names, above_one, tables)
        self._emitted = Emitted()
        self._variable_of: dict[fx.Node, str] = {}

    def emit(self) -> Emitted:
        """Emits every node that has an effect or is read.

        Raises:
            ValueError: see :func:`emit`.
        """
        self._inputs()
        nodes = [
            node for node in self._found.graph.nodes if node.op in ("call_function", "get_attr")
        ]
        unused = self._unused(nodes)
        for node in nodes:
            if node in self._tables.skipped:
                self._gradient_of_rows(node)
            elif node not in unused:
                self._constant(node) if node.op == "get_attr" else self._call(node)
        self._second_names()
        for op in self._emitted.ops:
            check(op)
        return self._emitted

    def _inputs(self) -> None:
        for node in self._found.graph.find_nodes(op="placeholder"):
            name = self._found.placeholders[node.name]
            if name in self._tables.proxies:
                self._table(node, self._tables.proxies[name])
                continue
            role = (
                Role.INPUT
                if name in self._names.inputs
                else Role.PARAMETER
                if name in self._trained
                else Role.BUFFER
            )
            self._define(node, name, node.meta["val"], role)

    def _table(self, proxy: fx.Node, table: CapturedTable) -> None:
        """Puts a table in the place of its proxy parameter, if the step looks it up."""
        self._variable_of[proxy] = table.name
        if table.name in self._tables.looked_up:
            self._emitted.variables[table.name] = table.variable
            self._emitted.ops.append(table.declared())

    def _gradient_of_rows(self, node: fx.Node) -> None:
        found = self._tables.gradient(node, self._argument)
        if found is not None:
            table, op = found
            self._emitted.variables[table.gradient] = gradient_variable(table.table, table.gradient)
            self._emitted.ops.append(replace(op, location=self._found.lines.get(node.name, "")))

    def _define(self, node: fx.Node, name: str, value: Any, role: Role) -> None:
        self._variable_of[node] = name
        if isinstance(value, Tensor):
            shape = tuple(self._names.extent(size, role is Role.INPUT) for size in value.shape)
            of = name.removesuffix("@GRAD") if role is Role.GRADIENT else ""
            self._emitted.variables[name] = Variable(
                name, shape, str(value.dtype).removeprefix("torch."), role, of
            )
        else:
            self._emitted.variables[name] = Variable(name, (), "size", Role.SIZE)

    def _unused(self, nodes: Sequence[fx.Node]) -> set[fx.Node]:
        """Nodes without effect whose results nothing reads."""
        kept = {*self._names.targets.values()}
        unused: set[fx.Node] = set()
        for node in reversed(nodes):
            pure = (
                node.op == "get_attr"
                or node.target in SIZE_OPS
                or node.target is operator.getitem
                or schema_name(node) in _DROPPABLE
            )
            if pure and node not in kept and all(user in unused for user in node.users):
                unused.add(node)
        return unused

    def _constant(self, node: fx.Node) -> None:
        constant = self._found.constants[str(node.target)].detach()
        if constant.numel() and constant.untyped_storage().data_ptr() in self._storages:
            raise ValueError(
                "cannot capture this step: it reaches a parameter or buffer of the model by a way "
                "that tracing cannot follow, so its present value would be used for ever"
            )
        tensor = constant.cpu().contiguous()
        name = self._names.fresh("constant")
        data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        literal = Literal(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)
        self._define(node, name, tensor, Role.TEMPORARY)
        self._emitted.ops.append(Op("assign_value", {"value": literal}, (name,)))

    def _call(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            return  # defined with the op that has the results
        if is_alias(node) and not self._stops_gradients(node):
            self._variable_of[node] = self._variable_of[node.args[0]]  # type: ignore[index]  # an alias of a tensor
            return
        line = self._found.lines.get(node.name, "")
        try:
            op_type, arguments = self._type_and_arguments(node)
            self._emitted.ops.append(Op(op_type, arguments, self._results(node), line))
            if self._is_constant(node):
                self._detach(self._emitted.ops.pop())
        except TypeError as error:
            raise ValueError(
                f"{line or 'in the backward pass'}: cannot capture this step: {error}"
            ) from error

    def _stops_gradients(self, node: fx.Node) -> bool:
        """Whether a node of a forward trace is a ``detach()`` of the user's, which stays, for a
        program that is differentiated later.
        """
        if self._found.gradients or schema_name(node) != "aten::detach":
            return False
        given = node.args[0]
        assert isinstance(given, fx.Node), "a tensor"
        table = self._found.placeholders.get(given.name) in self._tables.proxies
        return not table and bool(node.meta["val"].is_floating_point())

    def _is_constant(self, node: fx.Node) -> bool:
        """Whether a node of a forward trace gives what autograd must not follow."""
        return (
            not self._found.gradients
            and node.name in self._found.constant
            and not kind_of(node)
            and schema_name(node) != "aten::detach"
        )

    def _detach(self, op: Op) -> None:
        """Appends an op whose floating-point results are detached."""
        if changed(op):
            self._emitted.ops.append(op)
            return
        raw, detached = list(op.outputs), []
        for index, name in enumerate(op.outputs):
            variable = self._emitted.variables.get(name)
            if variable is None or not variable.dtype.startswith(("float", "bfloat", "complex")):
                continue
            raw[index] = self._names.fresh(f"{name}_raw")
            self._emitted.variables[raw[index]] = replace(
                variable, name=raw[index], role=Role.TEMPORARY
            )
            detached.append(Op("aten.detach", {"self": Ref(raw[index])}, (name,), op.location))
        self._emitted.ops += [replace(op, outputs=tuple(raw)), *detached]

    def _type_and_arguments(self, node: fx.Node) -> tuple[str, dict[str, Argument]]:
        if node.target in SIZE_OPS:
            given = zip("ab", node.args, strict=False)
            return SIZE_OPS[node.target], {key: self._argument(value) for key, value in given}
        recurrent = call_of(node)
        if recurrent is not None:
            op_type, values = recurrent
            trains = op_type == "recurrent" and (bool(self._found.gradients) or values["train"])
            tracked: dict[str, Argument] = {"tracked": True} if trains else {}
            return op_type, {k: self._argument(each) for k, each in values.items()} | tracked
        found = ctc_call_of(node) or python_call_of(node)
        if found is not None:
            return found[0], {key: self._argument(each) for key, each in found[1].items()}
        if kind_of(node):
            return self._tables.lookup(node, self._argument)
        return aten_call(node, self._argument)

    def _results(self, node: fx.Node) -> tuple[str, ...]:
        """Defines the variables of a node's results, and gives their names; "" for one that nothing
        reads.
        """
        value = node.meta.get("val")
        if isinstance(node.target, OpOverload) and not node.target._schema.returns:
            return ()
        if not isinstance(value, tuple | list):
            name, role = self._names.of(node)
            self._define(node, name, value, role)
            return (name,)
        read: dict[int, fx.Node] = {}
        names = [""] * len(value)
        for user in self._getitems(node):
            index = int(user.args[1])  # type: ignore[arg-type]  # getitem's index is a plain number
            if not user.users and not self._names.is_wanted(user):
                continue
            if index in read:
                self._variable_of[user] = names[index]
                continue
            read[index] = user
            names[index], role = self._names.of(user, f"{node.name}_{index}")
            self._define(user, names[index], value[index], role)
        return tuple(names)

    def _getitems(self, node: fx.Node) -> Iterator[fx.Node]:
        """The readers of single results, those with a wanted name first."""
        users = [user for user in node.users if user.target is operator.getitem]
        return iter(sorted(users, key=lambda user: not self._names.is_wanted(user)))

    def _second_names(self) -> None:
        """Gives further names, by ``assign``, to nodes that are wanted under more than one."""
        for name, node in self._names.targets.items():
            if name in self._emitted.variables:
                continue
            source = self._emitted.variables[self._variable_of[node]]
            gradient = name.removesuffix("@GRAD") if name.endswith("@GRAD") else ""
            role = (
                Role.OUTPUT
                if name in self._found.outputs
                else Role.GRADIENT
                if gradient
                else Role.TEMPORARY
            )
            shape = tuple(
                str(size).split(">")[0] if isinstance(size, str) else size for size in source.shape
            )
            self._emitted.variables[name] = Variable(
                name, shape, source.dtype, role, gradient if role is Role.GRADIENT else ""
            )
            self._emitted.ops.append(
                Op("assign", {"x": Ref(source.name)}, (name,), self._found.lines.get(node.name, ""))
            )

    def _argument(self, value: Any) -> Argument:
        return argument_of(value, self._variable_of, self._device)
