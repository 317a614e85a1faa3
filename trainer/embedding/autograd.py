"""Pulled rows in autograd: what a backward pass has for them goes to the table's anchor."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from pserver.table import ids as id_arithmetic
from pserver.table.gradient import RowGradient
from trainer.embedding.proxy_parameter import ProxyParameter


def attach(anchor: ProxyParameter, rows: Tensor, ids: Tensor, statistics: Tensor | None) -> Tensor:
    """The same rows, of which each backward pass tells the anchor the gradient.

    Args:
        rows: [u, dim], on any device.
        ids: int64 [u], each once, on the CPU.
        statistics: float32 [u, 2], on the CPU.
    """
    attached: Tensor = _Attached.apply(anchor, rows, ids, statistics)  # type: ignore[no-untyped-call]  # torch's own
    return attached


def gather(rows: Tensor, inverse: Tensor) -> Tensor:
    """Row ``inverse[i]`` for each i: [u, dim] -> [n, dim].

    Gradients of one row are summed in the order of occurrence.
    """
    if rows.device.type != "cpu":
        return F.embedding(inverse, rows)
    gathered: Tensor = _Gathered.apply(rows, inverse)  # type: ignore[no-untyped-call]  # torch's own
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
    gathered: Tensor = _GatheredBags.apply(rows, inverse, offsets, sizes, mode)  # type: ignore[no-untyped-call]  # torch's own
    return gathered


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: ProxyParameter, rows: Tensor, ids: Tensor, statistics: Tensor | None
    ) -> Tensor:
        ctx.anchor, ctx.ids, ctx.statistics = anchor, ids, statistics
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.anchor.receive(RowGradient(ctx.ids, gradient.cpu().contiguous(), ctx.statistics))
        return torch.zeros_like(ctx.anchor), None, None, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, inverse: Tensor) -> Tensor:
        ctx.count = len(rows)
        ctx.save_for_backward(inverse)
        return rows.index_select(0, inverse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (inverse,) = ctx.saved_tensors
        return torch.from_numpy(
            id_arithmetic.merge(inverse.numpy(), gradient.contiguous().numpy(), ctx.count)
        ), None


class _GatheredBags(torch.autograd.Function):
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
        inverse, sizes = ctx.saved_tensors
        if ctx.mode == "mean":
            gradient = gradient / sizes.clamp(min=1).to(gradient.dtype).unsqueeze(1)
        spread = gradient.repeat_interleave(sizes, 0)  # to the ids of each bag
        return (
            torch.from_numpy(id_arithmetic.merge(inverse.numpy(), spread.numpy(), ctx.count)),
            None,
            None,
            None,
            None,
        )
