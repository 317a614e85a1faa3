"""Emits a traced graph as the variables and ops of block 0, before clipping and updates.

Node by node, in the order of the graph.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import sympy  # type: ignore[import-untyped]  # has no stubs
import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload

from transpiler.ir.effects import changed
from transpiler.ir.graph import Argument, Literal, Op, Ref, Role, Symbol, Variable
from transpiler.ir.ops import check
from transpiler.ir.table_ops import gradient_variable
from transpiler.tracing.py_func import call_of as python_call_of
from transpiler.tracing.tables import GRADIENT, LOOKUP, NAMESPACE, CapturedTable
from transpiler.tracing.trace import TracedStep, ctc_call_of, recurrent_call_of

# ---- emit ops ----
#
# The op and the arguments of a graph node: torch's ops, arithmetic on sizes, plain values.


SIZE_OPS: Mapping[Any, str] = MappingProxyType(
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
ALIASES = ("aten::detach", "aten::alias")


def schema_name(node: fx.Node) -> str:
    """``"aten::view"`` for a node that calls the op of that name; "" for one that calls no op."""
    return node.target._schema.name if isinstance(node.target, OpOverload) else ""


def is_alias(node: fx.Node) -> bool:
    """Whether a node gives its argument a second name."""
    return schema_name(node) in ALIASES


def argument_of(value: Any, variable_of: Mapping[fx.Node, str], device: torch.device) -> Argument:
    """An argument of a node as a program holds it.

    Args:
        variable_of: the names of the variables that nodes have become.
        device: the model's, which a program calls ``executor``.

    Raises:
        TypeError: a program cannot hold the value.
    """
    if isinstance(value, fx.Node):
        return Ref(variable_of[value])
    if isinstance(value, list | tuple):
        return tuple(argument_of(item, variable_of, device) for item in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.device):
        same = value.type == device.type and value.index in (None, device.index)
        return Symbol("device", "executor" if same else str(value))
    for kind in (torch.dtype, torch.layout, torch.memory_format):
        if isinstance(value, kind):
            return Symbol(kind.__name__, str(value).removeprefix("torch."))
    raise TypeError(f"a program cannot hold an argument of type {type(value).__name__}")


def aten_call(
    node: fx.Node, argument: Callable[[Any], Argument]
) -> tuple[str, dict[str, Argument]]:
    """The type and the arguments of a call of one of torch's ops, without those at their default.

    Args:
        argument: turns a node's argument into a program's.

    Raises:
        TypeError: the op is not torch's own, or it changes a constant.
    """
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        raise TypeError(f"a program holds torch's own (aten) ops only, and the step uses {target}")
    schema = target._schema
    if schema.name == "aten::sym_size":
        return "sym.size", {"x": argument(node.args[0]), "dim": argument(node.args[1])}
    positional = zip((each.name for each in schema.arguments), node.args, strict=False)
    given = dict(positional) | node.kwargs
    for each in schema.arguments:
        if each.alias_info is not None and each.alias_info.is_write:
            _refuse_constant(node, given.get(each.name))
    defaults = {
        each.name: each.default_value for each in schema.arguments if each.has_default_value()
    }
    # pin_memory concerns host memory, and has no meaning in a program
    kept = {
        key: value
        for key, value in given.items()
        if key != "pin_memory" and not _is_default(key, value, defaults)
    }
    overload = f".{schema.overload_name}" if schema.overload_name else ""
    name = schema.name.replace("::", ".") + overload
    return name, {key: argument(value) for key, value in kept.items()}


def _refuse_constant(node: fx.Node, changed: Any) -> None:
    if isinstance(changed, fx.Node) and changed.op == "get_attr":
        raise TypeError(
            f"{node.target} changes a tensor that is neither an input nor a parameter or buffer of "
            "the model; register it as a buffer"
        )


def _is_default(name: str, value: Any, defaults: Mapping[str, Any]) -> bool:
    if name not in defaults or isinstance(value, fx.Node | list | tuple):
        return False
    default = defaults[name]
    return type(default) is type(value) and bool(default == value)


# ---- emit tables ----
#
# The lookups of a traced graph, and the gradients of their rows, as ops of a program.
#
# autograd adds the gradients of a table's lookups up in the table's proxy parameter.  In the graph
# these are additions of placeholders.  They are dropped: one op over all lookups takes their place,
# where the last lookup has its gradient.


# the ops between lookups and the gradient of a proxy parameter
_SUMS = ("aten::add", "aten::detach", "aten::alias", "aten::clone")


def kind_of(node: fx.Node) -> str:
    """``"lookup_table"`` or ``"lookup_table_grad"`` for such a node; "" for others."""
    if not isinstance(node.target, OpOverload) or node.target.namespace != NAMESPACE:
        return ""
    name: str = node.target._schema.name.partition("::")[2]
    return name if name in (LOOKUP, GRADIENT) else ""


def _given(node: fx.Node) -> dict[str, Any]:
    assert isinstance(node.target, OpOverload), "one of the two"
    return dict(
        zip((argument.name for argument in node.target._schema.arguments), node.args, strict=False)
    )


class TableNodes:
    """The nodes of a trace that look tables up, and those that compute the gradients of rows.

    Args:
        found: the trace, with the gradients of proxy parameters among those of parameters.
        tables: of the model.

    Attributes:
        proxies: the tables, by the names of their proxy parameters.
        looked_up: the names of the tables that the step looks up.
        skipped: nodes that do not become ops of their own.

    Raises:
        ValueError: the gradient of a proxy parameter is not a sum of gradients of lookups: the step
            uses a weight in another way as well.
    """

    def __init__(self, found: TracedStep, tables: Sequence[CapturedTable]) -> None:
        self.proxies = {table.proxy: table for table in tables}
        self.looked_up = {
            _given(node)["table"] for node in found.graph.nodes if kind_of(node) == LOOKUP
        }
        self.skipped: set[fx.Node] = set()
        self._last: dict[fx.Node, tuple[CapturedTable, list[fx.Node]]] = {}
        order = {node: place for place, node in enumerate(found.graph.nodes)}
        for node in found.graph.find_nodes(op="placeholder"):
            table = self.proxies.get(found.placeholders[node.name])
            if table is not None:
                _check_uses(node, table)
        for proxy, table in self.proxies.items():
            if proxy in found.gradients:
                parts = sorted(self._parts(found.gradients[proxy], table), key=order.__getitem__)
                self._last[parts[-1]] = (table, parts)
        self.skipped |= {node for node in found.graph.nodes if kind_of(node) == GRADIENT}

    def _parts(self, node: fx.Node, table: CapturedTable) -> list[fx.Node]:
        """The gradients of lookups whose sum a node is."""
        if kind_of(node) == GRADIENT and _given(node)["table"] == table.name:
            return [node]
        name = node.target._schema.name if isinstance(node.target, OpOverload) else ""
        if name not in _SUMS or not node.all_input_nodes:
            raise _tied(table)
        self.skipped.add(node)
        return [part for given in node.all_input_nodes for part in self._parts(given, table)]

    def lookup(
        self, node: fx.Node, argument: Callable[[Any], Argument]
    ) -> tuple[str, dict[str, Argument]]:
        """The op of a lookup: its type and its arguments."""
        given = _given(node)
        padding = {} if given.get("padding") is None else {"padding_idx": given["padding"]}
        return LOOKUP, {"w": Ref(given["table"]), "ids": argument(given["ids"]), **padding}

    def gradient(
        self, node: fx.Node, argument: Callable[[Any], Argument]
    ) -> tuple[CapturedTable, Op] | None:
        """The table and the op that computes its gradient, if this node is the last of the table's
        lookups in backward; None otherwise.
        """
        if node not in self._last:
            return None
        table, parts = self._last[node]
        given = [_given(part) for part in parts]
        arguments: dict[str, Argument] = {
            "w": Ref(table.name),
            "ids": tuple(argument(each["ids"]) for each in given),
            "grads": tuple(argument(each["grad"]) for each in given),
        }
        if all(each.get("counted") is not None for each in given):
            arguments["counted"] = tuple(argument(each["counted"]) for each in given)
        if any(each.get("padding") is not None for each in given):
            arguments["padding_idx"] = tuple(each.get("padding") for each in given)
        return table, Op(GRADIENT, arguments, (table.gradient,))


def _check_uses(proxy: fx.Node, table: CapturedTable) -> None:
    for user in proxy.users:
        if user.target is torch.ops.aten.detach.default:
            _check_uses(user, table)
        elif user.op != "output" and not kind_of(user):
            raise _tied(table)


def _tied(table: CapturedTable) -> ValueError:
    return ValueError(
        f"cannot capture this step: expected table {table.name!r} in lookups only, got another use "
        "(a weight that a layer shares?): its rows are no tensor; use sparse=False"
    )


# ---- variable names ----
#
# The names of an emitted program's variables, and of the sizes that stay free.


class VariableNames:
    """The name of each graph node's variable.

    Inputs, outputs, gradients and tensors named with ``name()`` have the names that the user asked
    for; every other variable has its node's name, made unique.

    Args:
        found: the trace.
        model: its parameters and buffers keep their names.
        inputs: the names of the inputs.
        above_one: the free sizes that must be 2 or more.
        tables: the lookups of the trace.

    Attributes:
        inputs: the names of the inputs.
        targets: the wanted nodes, by wanted name: outputs, gradients, named tensors.

    Raises:
        ValueError: two variables have the same name.
    """

    def __init__(
        self,
        found: TracedStep,
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

    def _name_symbols(self, found: TracedStep) -> dict[sympy.Symbol, str]:
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
        """A size as a program holds it: ``"batch"``, or ``"batch>=2"`` at an input for which one
        row is not enough.
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


# ---- emit ----


# Tracing leaves these behind where eager code needs them and a program does not.  All of them must
# be ops without any effect.
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
    found: TracedStep,
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
        above_one: the free sizes that must be 2 or more.
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
        found: TracedStep,
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
                "cannot capture this step: it reaches a parameter or buffer of the model in a way "
                "that tracing cannot follow, so its present value would be used forever"
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
        """Whether a node of a forward trace gives a result that autograd must not follow."""
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
        recurrent = recurrent_call_of(node)
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
        """Defines the variables of a node's results, and returns their names; "" for one that
        nothing reads.
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
        """Gives further names, by ``assign``, to nodes with more than one wanted name."""
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
