"""Looked-up rows in autograd: gathers, and the path of their gradient to the table's proxy
parameter.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from pserver.table.gradient import RowGradient
from trainer.embedding.proxy import ProxyParameter


def link_to_proxy(
    proxy: ProxyParameter, rows: Tensor, ids: Tensor, statistics: Tensor | None
) -> Tensor:
    """The rows, unchanged; each backward pass gives their gradient to the proxy parameter.

    Args:
        rows: [u, dim], on any device.
        ids: int64 [u], each once, on the CPU.
        statistics: float32 [u, 2], on the CPU.
    """
    linked: Tensor = _LinkToProxy.apply(proxy, rows, ids, statistics)  # type: ignore[no-untyped-call]  # torch's own
    return linked


def linked_rows(
    proxy: ProxyParameter, rows: Tensor, inverse: Tensor, ids: Tensor, statistics: Tensor | None
) -> Tensor:
    """Row ``inverse[i]`` for each i: [u, dim] -> [n, dim]; each backward pass gives the gradient of
    ``rows`` to the proxy parameter.

    Gradients of one row are summed in the order of occurrence.

    Args:
        inverse: int32 or int64 [n], on the rows' device.
        ids, statistics: as of :func:`link_to_proxy`.
    """
    if rows.device.type != "cpu":
        return F.embedding(inverse, link_to_proxy(proxy, rows, ids, statistics))
    gathered: Tensor = _LinkedRows.apply(proxy, rows, inverse, ids, statistics)  # type: ignore[no-untyped-call]  # torch's own
    return gathered


def gather_bags(rows: Tensor, inverse: Tensor, offsets: Tensor, sizes: Tensor, mode: str) -> Tensor:
    """The sum, or mean, of the rows of each bag: [u, dim] -> [bags, dim].  See
    :func:`torch.nn.functional.embedding_bag`.

    Args:
        inverse: int64 [n].
        offsets, sizes: int64 [bags].
        mode: "sum" or "mean".
    """
    if rows.device.type != "cpu":
        return F.embedding_bag(inverse, rows, offsets, mode=mode)
    gathered: Tensor = _GatherBags.apply(rows, inverse, offsets, sizes, mode)  # type: ignore[no-untyped-call]  # torch's own
    return gathered


class _LinkToProxy(torch.autograd.Function):
    """The identity on rows, with a proxy parameter as a further input: its gradient is a zero, so
    that autograd calls its hook when all lookups of a pass have delivered theirs.
    """

    @staticmethod
    def forward(
        ctx: Any, proxy: ProxyParameter, rows: Tensor, ids: Tensor, statistics: Tensor | None
    ) -> Tensor:
        ctx.proxy, ctx.ids, ctx.statistics = proxy, ids, statistics
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.proxy.receive(RowGradient(ctx.ids, gradient.contiguous(), ctx.statistics))
        return ctx.proxy.nothing(), None, None, None


class _LinkedRows(torch.autograd.Function):
    """Rows by index on the CPU, linked to a proxy parameter as :class:`_LinkToProxy` does it;
    backward sums with the table's own kernel.
    """

    @staticmethod
    def forward(
        ctx: Any,
        proxy: ProxyParameter,
        rows: Tensor,
        inverse: Tensor,
        ids: Tensor,
        statistics: Tensor | None,
    ) -> Tensor:
        ctx.proxy, ctx.inverse, ctx.ids, ctx.statistics = proxy, inverse, ids, statistics
        return rows.index_select(0, inverse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        from pserver.table.ids import merge  # imports numba

        merged = merge(ctx.inverse.numpy(), gradient.contiguous().numpy(), len(ctx.ids))
        ctx.proxy.receive(RowGradient(ctx.ids, torch.from_numpy(merged), ctx.statistics))
        return ctx.proxy.nothing(), None, None, None, None


class _GatherBags(torch.autograd.Function):
    """Bags of rows on the CPU; backward sums with the table's own kernel."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, inverse: Tensor, offsets: Tensor, sizes: Tensor, mode: str
    ) -> Tensor:
        ctx.count, ctx.mode = len(rows), mode
        ctx.save_for_backward(inverse, sizes)
        return F.embedding_bag(inverse, rows, offsets, mode=mode)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        from pserver.table.ids import merge  # imports numba

        inverse, sizes = ctx.saved_tensors
        if ctx.mode == "mean":
            gradient = gradient / sizes.clamp(min=1).to(gradient.dtype).unsqueeze(1)
        spread = gradient.repeat_interleave(sizes, 0)  # to the ids of each bag
        merged = torch.from_numpy(merge(inverse.numpy(), spread.numpy(), ctx.count))
        return merged, None, None, None, None
