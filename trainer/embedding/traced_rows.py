"""An embedding's forward in a step that is captured: an op of the program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from trainer.embedding.inputs import shows_and_clicks, whole_numbers
from trainer.embedding.proxy_parameter import ProxyParameter
from trainer.embedding.table_settings import TableSettings
from transpiler.tracing.tables import Lookup


class Traced(Protocol):
    """The embedding, as far as its op says it."""

    settings: TableSettings
    proxy: ProxyParameter
    padding_row: Tensor | None
    include_last_offset: bool


def traced_rows(
    module: Traced,
    table: str,
    ids: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
    statistics: Mapping[str, Tensor],
) -> Tensor:
    """An op in place of the lookup, which finds ids out of range when it runs.

    Args:
        table: its name in the program; the others as of forward.

    Returns:
        As forward, in the dtype that rows are computed in.

    Raises:
        TypeError, ValueError: as of forward.
    """
    own = module.settings
    ids = whole_numbers(own.whose(), ids)
    counted = shows_and_clicks(own.whose(), own.entry, ids, statistics)
    if own.pooling is None and (offsets is not None or weights is not None):
        raise ValueError(
            f"{own.whose()}: offsets and per_sample_weights are for a table with pooling"
        )
    padding = own.padding_idx
    lookup = Lookup(table, module.proxy, own.embedding_dim, own.computes_in, padding, padding)
    if own.pooling is not None and offsets is not None:
        ends = module.include_last_offset
        return lookup.ragged(ids, offsets, weights, own.pooling, counted, ends)
    if own.pooling is not None:
        return lookup.pooled(ids, weights, own.pooling, counted)
    rows = lookup.rows(ids, counted)
    if module.padding_row is None or padding is None:
        return rows
    padded = torch.eq(ids, padding).unsqueeze(-1)
    return torch.where(padded, module.padding_row.to(rows), rows)
