"""A traced graph, written down as the variables and ops of a program."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import sympy  # type: ignore[import-untyped]  # has no stubs
import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload

from transpiler.ir.graph import Argument, Literal, Op, Ref, Role, Symbol, Variable
from transpiler.ir.ops import check
from transpiler.ir.table_ops import gradient_variable
from transpiler.tracing.embedding_tables import Captured
from transpiler.tracing.emit_tables import TableNodes, kind_of
from transpiler.tracing.trace import Trace

_SIZE_OPS: Mapping[Any, str] = MappingProxyType(
    {
        operator.add: "sym.add",
        operator.sub: "sym.sub",
        operator.mul: "sym.mul",
        operator.floordiv: "sym.floordiv",
        operator.truediv: "sym.truediv",
        operator.mod: "sym.mod",
        operator.pow: "sym.pow",
        pow: "sym.pow",
        operator.neg: "sym.neg",
        torch.sym_max: "sym.max",
        torch.sym_min: "sym.min",
        torch.sym_float: "sym.float",
        torch.sym_int: "sym.int",
        math.ceil: "sym.ceil",
        math.floor: "sym.floor",
        math.sqrt: "sym.sqrt",
        torch._sym_sqrt: "sym.sqrt",  # type: ignore[attr-defined]  # made at run time
    }
)
_ALIASES = ("aten::detach", "aten::alias")
# Tracing leaves these behind where eager code needs them and a program does not.  Only ops without
# any effect may stand here.
_DROPPABLE = (
    *_ALIASES,
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


def write(
    found: Trace,
    model: nn.Module,
    names: Sequence[str],
    trained: set[str],
    minimum: int,
    tables: Sequence[Captured] = (),
) -> Emitted:
    """Writes a trace down.

    Args:
        trained: the parameters that the optimizer updates; the others are buffers to the program.
        minimum: the smallest batch for which the graph holds.
        tables: of the model.

    Raises:
        ValueError: an op is not in the catalogue, or changes a tensor that is neither an input nor
            the model's.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return _Emitter(found, names, trained, minimum, device, TableNodes(found, tables)).write(model)


class _Emitter:
    """One run of :func:`write`."""

    def __init__(
        self,
        found: Trace,
        names: Sequence[str],
        trained: set[str],
        minimum: int,
        device: torch.device,
        tables: TableNodes,
    ) -> None:
        self._found = found
        self._tables = tables
        self._names = names
        self._trained = trained
        self._device = device
        self._written = Emitted()
        self._variable_of: dict[fx.Node, str] = {}
        self._wanted: dict[fx.Node, str] = {}
        self._symbols = self._name_symbols(minimum)
        self._taken: set[str] = set()

    def _name_symbols(self, minimum: int) -> dict[sympy.Symbol, str]:
        """``batch`` for the first input's free size, ``<input>_rows`` for others; ``batch>=2``
        where one row is not enough.
        """
        self._free: dict[sympy.Symbol, str] = {}
        self._suffix = f">={minimum}" if minimum > 1 else ""
        for name, size in zip(self._names, self._found.sizes, strict=True):
            for symbol in sorted(size.free_symbols, key=str) if size is not None else ():
                self._free.setdefault(symbol, f"{name}_rows" if self._free else "batch")
        return self._free

    def write(self, model: nn.Module) -> Emitted:
        """The whole of it."""
        held = [*model.parameters(), *model.buffers()]
        self._storages = {tensor.untyped_storage().data_ptr() for tensor in held if tensor.numel()}
        self._reserve(model)
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
        for op in self._written.ops:
            check(op)
        return self._written

    def _reserve(self, model: nn.Module) -> None:
        """Chooses which node carries which wanted name; a node wanted twice gets the second name by
        ``assign``.
        """
        held = {
            *dict(model.named_parameters()),
            *dict(model.named_buffers()),
            *self._tables.looked_up,
        }
        self._targets = {
            **self._found.outputs,
            **{
                f"{name}@GRAD": node
                for name, node in self._found.gradients.items()
                if name not in self._tables.anchors
            },
            **self._found.named,
        }
        anchors = sum(name in self._tables.anchors for name in self._found.gradients)
        if (
            len(self._targets)
            != sum(map(len, (self._found.outputs, self._found.gradients, self._found.named)))
            - anchors
        ):
            raise ValueError("capture: an output and a tensor named with name() have the same name")
        for name in (*self._names, *self._targets):
            if name in held or (name in self._names and name in self._targets):
                raise ValueError(
                    f"capture: the name {name!r} belongs to two variables (of inputs, outputs, "
                    "name(), the model)"
                )
        self._taken = {*held, *self._names, *self._targets}
        for name, node in self._targets.items():
            if node.op == "call_function" and not self._is_alias(node):
                self._wanted.setdefault(node, name)

    def _inputs(self) -> None:
        inputs = set(self._names)
        for node in self._found.graph.find_nodes(op="placeholder"):
            name = self._found.placeholders[node.name]
            if name in self._tables.anchors:
                self._table(node, self._tables.anchors[name])
                continue
            role = (
                Role.INPUT
                if name in inputs
                else Role.PARAMETER
                if name in self._trained
                else Role.BUFFER
            )
            self._define(node, name, node.meta["val"], role)

    def _table(self, anchor: fx.Node, table: Captured) -> None:
        """A table stands in the place of its anchor, if the step looks it up."""
        self._variable_of[anchor] = table.name
        if table.name in self._tables.looked_up:
            self._written.variables[table.name] = table.variable
            self._written.ops.append(table.declared())

    def _gradient_of_rows(self, node: fx.Node) -> None:
        found = self._tables.gradient(node, self._argument)
        if found is not None:
            table, op = found
            self._written.variables[table.gradient] = gradient_variable(table.table, table.gradient)
            self._written.ops.append(replace(op, location=self._found.lines.get(node.name, "")))

    def _define(self, node: fx.Node, name: str, value: Any, role: Role) -> None:
        self._variable_of[node] = name
        if isinstance(value, Tensor):
            shape = tuple(self._extent(size, role is Role.INPUT) for size in value.shape)
            of = name.removesuffix("@GRAD") if role is Role.GRADIENT else ""
            self._written.variables[name] = Variable(
                name, shape, str(value.dtype).removeprefix("torch."), role, of
            )
        else:
            self._written.variables[name] = Variable(name, (), "size", Role.SIZE)

    def _extent(self, size: int | torch.SymInt, suffixed: bool) -> int | str:
        if isinstance(size, int):
            return size
        expression = size.node.expr
        if expression.is_number:
            return int(expression)
        renamed = expression.xreplace(
            {symbol: sympy.Symbol(name) for symbol, name in self._symbols.items()}
        )
        return str(renamed).replace(" ", "") + (
            self._suffix if suffixed and renamed.is_Symbol else ""
        )

    def _is_alias(self, node: fx.Node) -> bool:
        return isinstance(node.target, OpOverload) and node.target._schema.name in _ALIASES

    def _unused(self, nodes: Sequence[fx.Node]) -> set[fx.Node]:
        """Nodes without effect whose results nobody reads."""
        kept = {*self._targets.values()}
        unused: set[fx.Node] = set()
        for node in reversed(nodes):
            pure = (
                node.op == "get_attr" or node.target in _SIZE_OPS or node.target is operator.getitem
            )
            pure = (
                pure
                or isinstance(node.target, OpOverload)
                and node.target._schema.name in _DROPPABLE
            )
            if pure and node not in kept and all(user in unused for user in node.users):
                unused.add(node)
        return unused

    def _fresh(self, name: str) -> str:
        found, count = name, 1
        while found in self._taken:
            found, count = f"{name}_{count}", count + 1
        self._taken.add(found)
        return found

    def _name(self, node: fx.Node, otherwise: str = "") -> tuple[str, Role]:
        """The variable that a node defines."""
        wanted = self._wanted.get(node)
        if wanted is None:
            return self._fresh(otherwise or node.name), Role.TEMPORARY
        role = Role.OUTPUT if wanted in self._found.outputs else Role.TEMPORARY
        # name() refuses an "@", and no output has one
        return wanted, Role.GRADIENT if wanted.endswith("@GRAD") else role

    def _constant(self, node: fx.Node) -> None:
        constant = self._found.constants[str(node.target)].detach()
        if constant.numel() and constant.untyped_storage().data_ptr() in self._storages:
            raise ValueError(
                "cannot capture this step: it reaches a parameter or buffer of the model by a way "
                "that tracing cannot follow, so "
                "its present value would be used for ever"
            )
        tensor = constant.cpu().contiguous()
        name = self._fresh("constant")
        data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        literal = Literal(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)
        self._define(node, name, tensor, Role.TEMPORARY)
        self._written.ops.append(Op("assign_value", {"value": literal}, (name,)))

    def _call(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            return  # written with the op that has the results
        if self._is_alias(node):
            self._variable_of[node] = self._variable_of[node.args[0]]  # type: ignore[index]  # an alias of a tensor
            return
        line = self._found.lines.get(node.name, "")
        try:
            op_type, arguments = self._type_and_arguments(node)
            self._written.ops.append(Op(op_type, arguments, self._results(node), line))
        except TypeError as error:
            raise ValueError(
                f"{line or 'in the backward pass'}: cannot capture this step: {error}"
            ) from error

    def _type_and_arguments(self, node: fx.Node) -> tuple[str, dict[str, Argument]]:
        target = node.target
        if target in _SIZE_OPS:
            return _SIZE_OPS[target], {
                key: self._argument(value) for key, value in zip("ab", node.args, strict=False)
            }
        if kind_of(node):
            return self._tables.lookup(node, self._argument)
        if not isinstance(target, OpOverload) or target.namespace != "aten":
            raise TypeError(
                f"a program holds torch's own (aten) ops only, and the step uses {target}"
            )
        schema = target._schema
        if schema.name == "aten::sym_size":
            return "sym.size", {
                "x": self._argument(node.args[0]),
                "dim": self._argument(node.args[1]),
            }
        given = (
            dict(zip((argument.name for argument in schema.arguments), node.args, strict=False))
            | node.kwargs
        )
        for argument in schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._refuse_constant(node, given.get(argument.name))
        defaults = {
            argument.name: argument.default_value
            for argument in schema.arguments
            if argument.has_default_value()
        }
        # pin_memory is about where host memory lies, and means nothing to a program
        kept = {
            key: value
            for key, value in given.items()
            if key != "pin_memory" and not _is_default(key, value, defaults)
        }
        name = schema.name.replace("::", ".") + (
            f".{schema.overload_name}" if schema.overload_name else ""
        )
        return name, {key: self._argument(value) for key, value in kept.items()}

    def _refuse_constant(self, node: fx.Node, changed: Any) -> None:
        if isinstance(changed, fx.Node) and changed.op == "get_attr":
            raise TypeError(
                f"{node.target} changes a tensor that is neither an input nor a parameter or "
                "buffer of the model; "
                "register it as a buffer"
            )

    def _results(self, node: fx.Node) -> tuple[str, ...]:
        value = node.meta.get("val")
        if not isinstance(value, tuple | list):
            name, role = self._name(node)
            self._define(node, name, value, role)
            return (name,)
        read: dict[int, fx.Node] = {}
        names = [""] * len(value)
        for user in self._getitems(node):
            index = int(user.args[1])  # type: ignore[arg-type]  # getitem's index is a plain number
            if not user.users and user not in self._wanted:
                continue
            if index in read:
                self._variable_of[user] = names[index]
                continue
            read[index] = user
            names[index], role = self._name(user, f"{node.name}_{index}")
            self._define(user, names[index], value[index], role)
        return tuple(names)

    def _getitems(self, node: fx.Node) -> Iterator[fx.Node]:
        users = [user for user in node.users if user.target is operator.getitem]
        return iter(sorted(users, key=lambda user: user not in self._wanted))

    def _second_names(self) -> None:
        for name, node in self._targets.items():
            if name in self._written.variables:
                continue
            source = self._written.variables[self._variable_of[node]]
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
            self._written.variables[name] = Variable(
                name, shape, source.dtype, role, gradient if role is Role.GRADIENT else ""
            )
            self._written.ops.append(
                Op("assign", {"x": Ref(source.name)}, (name,), self._found.lines.get(node.name, ""))
            )

    def _argument(self, value: Any) -> Argument:
        if isinstance(value, fx.Node):
            return Ref(self._variable_of[value])
        if isinstance(value, list | tuple):
            return tuple(self._argument(item) for item in value)
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, torch.device):
            same = value.type == self._device.type and value.index in (None, self._device.index)
            return Symbol("device", "executor" if same else str(value))
        for kind in (torch.dtype, torch.layout, torch.memory_format):
            if isinstance(value, kind):
                return Symbol(kind.__name__, str(value).removeprefix("torch."))
        raise TypeError(f"a program cannot hold an argument of type {type(value).__name__}")


def _is_default(name: str, value: Any, defaults: Mapping[str, Any]) -> bool:
    if name not in defaults or isinstance(value, fx.Node):
        return False
    default = defaults[name]
    return (
        type(default) is type(value) and bool(default == value)
        if not isinstance(value, list | tuple)
        else False
    )
