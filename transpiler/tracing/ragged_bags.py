"""Inputs that are offsets of bags of ids, or of sequences: how they change when a batch gets
another size.

The equivalence check runs at sizes that are not the example's, and repeats or leaves out rows of
inputs for that.  Offsets made so would be invalid, as they would decrease.  So they are made anew.

An input is known as offsets by the op that reads it: a bag of embeddings, or a search for the
places 0, 1, 2, ... among them, by which ``trainer.nn`` finds the sequence of each value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]  # has no stubs
import torch
from torch import Tensor, fx
from torch._ops import OpOverload

_BAGS = ("aten::_embedding_bag", "aten::_embedding_bag_forward_only")
_SEARCH, _PLACES = "aten::searchsorted", "aten::arange"
_SAME = ("aten::_to_copy", "aten::alias", "aten::clone", "aten::detach", "aten::view")


@dataclass(frozen=True)
class Offsets:
    """An input of the offsets at which bags begin.

    Attributes:
        ids: the number of ids in all bags.
        ends: whether the last offset is the end of the last bag, not the beginning of one.
    """

    ids: sympy.Basic
    ends: bool

    def regular(self, count: int, values: Mapping[sympy.Symbol, int], like: Tensor) -> Tensor:
        """Offsets of bags of equal size, up to rounding.

        Args:
            count: the number of offsets.
            values: of the free sizes.
            like: gives dtype and device.

        Raises:
            ValueError: the only offset would be the end of no bag, which torch does not check.
        """
        if self.ends and count < 2:
            raise ValueError("offsets that include the last one: expected two or more")
        ids = int(self.ids.xreplace({key: sympy.Integer(value) for key, value in values.items()}))
        places = torch.arange(count, device=like.device)
        bags = max(count - 1 if self.ends else count, 1)
        return (places * ids // bags).to(like.dtype)


def offsets_of(graph: fx.Graph, placeholders: Mapping[str, str]) -> dict[str, Offsets]:
    """The inputs of a trace that are offsets, by name.

    Args:
        placeholders: the name of the variable, by the placeholder's name.
    """
    found: dict[str, Offsets] = {}
    for node in graph.nodes:
        if not isinstance(node.target, OpOverload):
            continue
        if node.target._schema.name == _SEARCH:
            found |= _searched(node, placeholders)
        if node.target._schema.name not in _BAGS:
            continue
        arguments = node.target._schema.arguments
        given: dict[str, Any] = dict(zip((a.name for a in arguments), node.args, strict=False))
        given |= node.kwargs
        offsets = _source(given["offsets"])
        if offsets.op == "placeholder":
            size = given["indices"].meta["val"].shape[0]
            ends = bool(given.get("include_last_offset", False))
            found[placeholders[offsets.name]] = Offsets(_extent(size), ends)
    return found


def _searched(node: fx.Node, placeholders: Mapping[str, str]) -> dict[str, Offsets]:
    """The offsets among which a node searches for places, by name; empty for other searches."""
    offsets, places = (_source(argument) for argument in node.all_input_nodes[:2])
    counted = isinstance(places.target, OpOverload) and places.target._schema.name == _PLACES
    if offsets.op != "placeholder" or not counted:
        return {}
    return {placeholders[offsets.name]: Offsets(_extent(node.meta["val"].shape[0]), False)}


def _extent(size: int | torch.SymInt) -> sympy.Basic:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def _source(node: fx.Node) -> fx.Node:
    """The first node that has the same numbers."""
    while isinstance(node.target, OpOverload) and node.target._schema.name in _SAME:
        node = node.all_input_nodes[0]
    return node


def with_regular_bags(
    batch: Sequence[Tensor],
    names: Sequence[str],
    offsets: Mapping[str, Offsets],
    values: Mapping[sympy.Symbol, int],
    example: Mapping[sympy.Symbol, int],
) -> list[Tensor]:
    """The batch, with offsets that fit its sizes.

    Args:
        batch: of these sizes.
        names: of its tensors.
        values: of the free sizes; at those of ``example`` the batch is left as it is.

    Raises:
        ValueError: there are too few offsets.
    """
    if not offsets or values == example:
        return list(batch)
    return [
        offsets[name].regular(len(tensor), values, tensor) if name in offsets else tensor
        for name, tensor in zip(names, batch, strict=True)
    ]
