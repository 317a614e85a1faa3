"""The lookups of a traced graph, and the gradients of what they read, as ops of a program.

autograd adds the gradients of a table's lookups up in the table's proxy parameter.  In the graph
these are additions of placeholders.  They are dropped: one op over all lookups takes their place,
where the last lookup has its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from transpiler.ir.graph import Argument, Op, Ref
from transpiler.tracing.embedding_lookup import GRADIENT, LOOKUP, NAMESPACE
from transpiler.tracing.embedding_tables import CapturedTable
from transpiler.tracing.trace import Trace

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
        skipped: nodes that become no op of their own.

    Raises:
        ValueError: the gradient of a proxy parameter is not a sum of gradients of lookups: the step
            uses a weight in another way as well.
    """

    def __init__(self, found: Trace, tables: Sequence[CapturedTable]) -> None:
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
