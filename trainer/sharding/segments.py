"""Segments: units of a model whose parameters are gathered, used and freed together.

A unit alone is the finest segment, see [Note: units].  Larger ones need fewer collectives and more
memory.  Segments are runs of units in the order of their definition, by size or by the names of
their first modules::

    units       blocks.0  blocks.1  blocks.2  blocks.3  head
    by 2 units' size     | blocks.0  blocks.1 | blocks.2  blocks.3 | head |
    by anchors blocks.1  | blocks.0 | blocks.1  blocks.2  blocks.3  head |

A segment has parameters of one dtype, because they travel as one piece.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from trainer.sharding.units import units_of
from transpiler.ir.plain_names import named_modules, named_parameters

Segments = list[list[nn.Module]]
_MB = 2**20


def segments_by_size(model: nn.Module, parameters: set[nn.Parameter], megabytes: float) -> Segments:
    """Segments that end where their parameters reach a size; a repeated block above it is opened.

    Args:
        parameters: those that are sharded.
        megabytes: of whole parameters.
    """
    size = megabytes * _MB
    found: Segments = []
    filled = size  # of the last segment, in bytes
    for unit in units_of(model, parameters, most=size):
        if filled >= size or _dtypes(unit) != _dtypes(found[-1][-1]):
            found.append([])
            filled = 0
        found[-1].append(unit)
        filled += sum(
            p.numel() * p.element_size() for p in parameters.intersection(unit.parameters())
        )
    return found


def segments_by_anchors(
    model: nn.Module, parameters: set[nn.Parameter], anchors: Collection[str]
) -> Segments:
    """Segments that begin where the model and the given modules do.

    Args:
        parameters: those that are sharded.
        anchors: names of modules, as :func:`anchor_modules` gives them; what this part of the model
            lacks begins nothing.
    """
    opened = {
        module
        for name, module in named_modules(model)
        if any(anchor.startswith(f"{name}." if name else "") for anchor in anchors)
    }
    names = {module: name for name, module in named_modules(model)}
    found: Segments = []
    left = list(anchors)
    for unit in units_of(model, parameters, opened=opened):
        begins = [a for a in left if names[unit] == a or names[unit].startswith(f"{a}.")]
        if begins or not found or _dtypes(unit) != _dtypes(found[-1][-1]):
            found.append([])
            left = [anchor for anchor in left if anchor not in begins]
        found[-1].append(unit)
    return found


def _dtypes(unit: nn.Module) -> set[torch.dtype]:
    return {parameter.dtype for parameter in unit.parameters()}


def anchor_modules(model: nn.Module, anchors: Sequence[str]) -> tuple[str, ...]:
    """The names of the modules that anchors name, themselves or by a parameter.

    Raises:
        ValueError: the model has no module or parameter of a name, or the module has no parameter.
    """
    modules, parameters = dict(named_modules(model)), dict(named_parameters(model))
    found = []
    for anchor in anchors:
        name = anchor.rpartition(".")[0] if anchor in parameters else anchor
        if name not in modules or not name:
            known = ", ".join(name for name in modules if name)
            raise ValueError(
                f"segment_anchors: {anchor!r}: expected a module below the model, or a parameter "
                f"of one, got none of the model's, which has {known}"
            )
        if not any(True for _ in modules[name].parameters()):
            raise ValueError(
                f"segment_anchors: {anchor!r}: expected a module with parameters, got one without"
            )
        found.append(name)
    return tuple(found)
