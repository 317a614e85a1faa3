"""Lookups in a trace: a sparse embedding that is traced becomes one op, ``lookup_table``.

What such a module computes has sizes that depend on data (which ids differ, how many there are), so
a program cannot hold it.  The op takes the place of all of it; pooling is ordinary compute on its
result.  Neither this op nor its gradient ever runs: traces run on fake tensors, and programs have
kernels of their own (ir/sparse_rows.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transpiler.ir.table_ops import is_sparse

LOOKUP, GRADIENT = "lookup_table", "lookup_table_grad"
NAMESPACE = "pserver"

_library: Any = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]  # torch's own
_library.define(
    f"{LOOKUP}(Tensor proxy, Tensor ids, str table, int dim, ScalarType dtype, int? padding) -> "
    "Tensor"
)
_library.define(
    f"{GRADIENT}(Tensor proxy, Tensor ids, Tensor grad, Tensor? counted, str table, int? "
    "padding) -> Tensor"
)

# the tables that modules look up: names by the module's id; None: nothing is traced
_names: dict[int, str] | None = None


def _fake_lookup(
    proxy: Tensor, ids: Tensor, table: str, dim: int, dtype: torch.dtype, padding: int | None
) -> Tensor:
    return ids.new_empty((*ids.shape, dim), dtype=dtype)


def _fake_gradient(
    proxy: Tensor,
    ids: Tensor,
    grad: Tensor,
    counted: Tensor | None,
    table: str,
    padding: int | None,
) -> Tensor:
    return torch.empty_like(proxy)


for _name, _fake in ((LOOKUP, _fake_lookup), (GRADIENT, _fake_gradient)):
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=_library)


@dataclass(frozen=True, slots=True)
class Lookup:
    """One lookup in a step.

    Attributes:
        table: the table's name.
        proxy: the table's proxy parameter in the optimizer; its gradient is the sum of the
            lookups'.
        dim: columns of a row.
        dtype: of the rows.
        skipped: an id that is not looked up: it reads zeros.
        untrained: an id whose row gets no gradient.
    """

    table: str
    proxy: Tensor
    dim: int
    dtype: torch.dtype
    skipped: int | None = None
    untrained: int | None = None

    def rows(self, ids: Tensor, counted: Tensor | None = None) -> Tensor:
        """int64 ids of any shape -> [*shape, dim]."""
        found: Tensor = _Looked.apply(self.proxy, ids, counted, self)  # type: ignore[no-untyped-call]  # torch's own
        return found

    def pooled(
        self, ids: Tensor, weights: Tensor | None, pooling: str, counted: Tensor | None = None
    ) -> Tensor:
        """The rows of each bag of one size, pooled as :func:`trainer.embedding.bags.pool` does.

        Args:
            ids: int64 [bags, size].
            weights: [bags, size], of the ids; None: 1 each.
            pooling: "sum", "mean" or "sqrtn".
            counted: float32 [ids, 2], shows and clicks.

        Returns:
            [bags, dim].

        Raises:
            ValueError: ids have another shape.
        """
        if ids.dim() != 2:
            raise ValueError(
                f"table {self.table!r}: expected ids [bags, size], or [n] with offsets, got ids "
                f"{list(ids.shape)} and none"
            )
        rows, given = self.rows(ids, counted), None if weights is None else weights.to(self.dtype)
        counts = given
        if self.untrained is not None:
            stays = (ids != self.untrained).to(self.dtype)
            counts = stays if given is None else given * stays
        sums = rows.sum(1) if counts is None else (rows * counts.unsqueeze(2)).sum(1)
        if pooling == "sum":
            return sums
        if counts is None:
            return sums / (ids.shape[1] if pooling == "mean" else ids.shape[1] ** 0.5)
        total = counts.sum(1) if pooling == "mean" else counts.square().sum(1)
        # an empty bag, or one of zeros
        total = torch.where(total == 0, torch.ones_like(total), total)
        return sums / (total if pooling == "mean" else total.sqrt()).unsqueeze(1)

    def ragged(
        self,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        pooling: str,
        counted: Tensor | None = None,
        ends: bool = False,
    ) -> Tensor:
        """The rows of each bag of any size, pooled likewise.

        Args:
            ids: int64 [n].
            offsets: int64 [bags], where each bag begins.
            weights: [n], of the ids; None: 1 each.
            pooling: "sum", "mean" or "sqrtn".
            counted: float32 [ids, 2], shows and clicks.
            ends: there is one offset more, the end of the last bag.

        Returns:
            [bags, dim].

        Raises:
            ValueError: shapes do not fit.
        """
        if ids.dim() != 1 or offsets.dim() != 1:
            raise ValueError(
                f"table {self.table!r}: expected ids [n] and offsets [bags], got "
                f"{list(ids.shape)} and {list(offsets.shape)}"
            )
        rows, each = self.rows(ids, counted), torch.arange(ids.shape[0], device=ids.device)
        offsets = offsets.to(ids.dtype)
        counts = None if weights is None else weights.to(self.dtype)
        if self.untrained is not None:
            stays = (ids != self.untrained).to(self.dtype)
            counts = stays if counts is None else counts * stays
        mode = "mean" if pooling == "mean" and counts is None else "sum"
        sums = F.embedding_bag(
            each, rows, offsets, mode=mode, per_sample_weights=counts, include_last_offset=ends
        )
        if pooling == "sum" or mode == "mean":
            return sums
        begins = offsets[:-1] if ends else offsets
        counts = torch.ones_like(each, dtype=self.dtype) if counts is None else counts
        bag_of = torch.searchsorted(begins, each, right=True) - 1
        added = counts if pooling == "mean" else counts.square()
        total = torch.zeros_like(begins, dtype=self.dtype).index_add(0, bag_of, added)
        # an empty bag, or one of zeros
        total = torch.where(total == 0, torch.ones_like(total), total)
        return sums / (total if pooling == "mean" else total.sqrt()).unsqueeze(1)


class _Looked(torch.autograd.Function):
    """The lookup op in autograd: its gradient is that of the proxy parameter."""

    @staticmethod
    def forward(
        ctx: Any, proxy: Tensor, ids: Tensor, counted: Tensor | None, lookup: Lookup
    ) -> Tensor:
        """Puts the lookup op into the trace."""
        ctx.save_for_backward(proxy, ids, counted)
        ctx.lookup = lookup
        found: Tensor = torch.ops.pserver.lookup_table(
            proxy.detach(), ids, lookup.table, lookup.dim, lookup.dtype, lookup.skipped
        )
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Puts the op of the rows' gradient into the trace."""
        proxy, ids, counted = ctx.saved_tensors
        lookup = ctx.lookup
        return (
            torch.ops.pserver.lookup_table_grad(
                proxy, ids, grad, counted, lookup.table, lookup.untrained
            ),
            None,
            None,
            None,
        )


def table_of(module: nn.Module) -> str | None:
    """The table that a module looks up in the step that is being traced; None while nothing is
    traced.
    """
    return None if _names is None else _names.get(id(module))


@contextmanager
def looking_up(tables: Mapping[str, list[nn.Module]]) -> Iterator[None]:
    """Lets modules put lookup ops into the step that is traced inside.

    Args:
        tables: the modules that look up each table, by the table's name.
    """
    global _names
    before, own = (
        _names,
        [module for modules in tables.values() for module in modules if is_sparse(module)],
    )
    _names = {id(module): name for name, modules in tables.items() for module in modules}
    for module in own:
        module.forward = partial(_of_torch, module)
    try:
        yield
    finally:
        _names = before
        for module in own:
            del module.forward


def _of_torch(
    module: Any,
    ids: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
) -> Tensor:
    """The forward of an embedding of torch's own."""
    table = table_of(module)
    assert table is not None, "it is being traced"
    lookup = Lookup(
        table, module.weight, module.embedding_dim, module.weight.dtype, None, module.padding_idx
    )
    if isinstance(module, nn.Embedding):
        return lookup.rows(ids)
    if offsets is not None:
        return lookup.ragged(
            ids, offsets, per_sample_weights, module.mode, ends=module.include_last_offset
        )
    return lookup.pooled(ids, per_sample_weights, module.mode)
