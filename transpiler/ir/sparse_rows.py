"""Rows of a table as values of a program: what a lookup reads, and the gradient of the rows that a
step has touched.

The kernels here are plain torch; what runs programs brings faster arithmetic for the two questions
that all of them ask: which ids differ, and what are the sums of what was meant for the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor


class Rows(Protocol):
    """The value of a variable of role TABLE."""

    def pull(self, ids: Tensor) -> Tensor:
        """The rows of ids, int64 [u] on the CPU, each once -> [u, dim]."""


@dataclass(frozen=True, slots=True)
class SparseRows:
    """The value of a table's gradient: one row for each of some ids.

    Attributes:
        ids: int64 [u], each once, on the CPU.
        rows: [u, dim], on the CPU.
        statistics: float32 [u, 2], how often each id was shown and clicked; None where the table
            does not count that.
    """

    ids: Tensor
    rows: Tensor
    statistics: Tensor | None = None

    def sorted(self) -> SparseRows:
        """The same, by id."""
        ids, order = self.ids.sort()
        return SparseRows(
            ids, self.rows[order], None if self.statistics is None else self.statistics[order]
        )


def rows_of(gradient: Tensor | SparseRows) -> Tensor:
    """The numbers of a gradient: all that clipping asks for, for the rows that are not there are
    zero.
    """
    return gradient.rows if isinstance(gradient, SparseRows) else gradient


def on_rows(
    change: Callable[[Tensor], Tensor], gradient: Tensor | SparseRows
) -> Tensor | SparseRows:
    """A gradient with its numbers changed."""
    return (
        replace(gradient, rows=change(gradient.rows))
        if isinstance(gradient, SparseRows)
        else change(gradient)
    )


class RowKernels:
    """What the ops of lookups do."""

    def unique(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The ids that differ, and which of them each is: int64 [n] on the CPU -> [u], [n]."""
        found, inverse = torch.unique(ids, return_inverse=True)
        return found, inverse

    def merge(self, inverse: Tensor, values: Tensor, count: int) -> Tensor:
        """The sums of the rows of each unique id, in the order of occurrence: [n, d] -> [count,
        d].
        """
        return values.new_zeros((count, values.shape[1])).index_add_(0, inverse, values)

    def kernels(self) -> Mapping[str, Callable[..., Any]]:
        """By op type."""
        return {"lookup_table": self._lookup, "lookup_table_grad": self._gradient}

    def wanted(self, ids: Sequence[Tensor], padding: int | None) -> tuple[Tensor, Tensor | None]:
        """The ids of lookups, one after the other, flat on the CPU, without the padding's; which
        stay, None for all.
        """
        flat = torch.cat([each.detach().reshape(-1).to("cpu", torch.int64) for each in ids])
        stays = None if padding is None else flat != padding
        return (flat, None) if stays is None or bool(stays.all()) else (flat[stays], stays)

    def spread(
        self, rows: Tensor, inverse: Tensor, stays: Tensor | None, ids: Sequence[Tensor]
    ) -> list[Tensor]:
        """The rows of each lookup, on its ids' device: those of the padding's ids are zero."""
        found = rows.index_select(0, inverse.to(torch.int64))
        if stays is not None:
            found = found.new_zeros((len(stays), rows.shape[1])).masked_scatter_(
                stays.unsqueeze(1), found
            )
        parts = torch.split(found, [each.numel() for each in ids])
        return [
            part.reshape(*each.shape, rows.shape[1]).to(each.device)
            for part, each in zip(parts, ids, strict=True)
        ]

    def _lookup(self, op: Any, w: Rows, ids: Tensor, padding_idx: int | None = None) -> Tensor:
        wanted, stays = self.wanted([ids], padding_idx)
        unique, inverse = self.unique(wanted)
        return self.spread(w.pull(unique), inverse, stays, [ids])[0]

    def _gradient(
        self,
        op: Any,
        w: Rows,
        ids: Sequence[Tensor],
        grads: Sequence[Tensor],
        counted: Sequence[Tensor] | None = None,
        padding_idx: Sequence[int | None] | None = None,
    ) -> SparseRows:
        """Summed lookup by lookup and then over lookups, as the backward of an eager step does."""
        paddings = [None] * len(ids) if padding_idx is None else padding_idx
        numbers = [None] * len(ids) if counted is None else counted
        parts = [self._of_one(*each) for each in zip(ids, grads, numbers, paddings, strict=True)]
        if len(parts) == 1:
            return parts[0]
        unique, inverse = self.unique(torch.cat([part.ids for part in parts]))
        rows = self.merge(inverse, torch.cat([part.rows for part in parts]), len(unique))
        several = [part.statistics for part in parts if part.statistics is not None]
        statistics = self.merge(inverse, torch.cat(several), len(unique)) if several else None
        return SparseRows(unique, rows, statistics)

    def _of_one(
        self, ids: Tensor, grad: Tensor, counted: Tensor | None, padding: int | None
    ) -> SparseRows:
        wanted, stays = self.wanted([ids], padding)
        values = grad.detach().reshape(ids.numel(), grad.shape[-1]).cpu().contiguous()
        numbers = None if counted is None else counted.detach().cpu().contiguous()
        if stays is not None:
            values, numbers = values[stays], None if numbers is None else numbers[stays]
        unique, inverse = self.unique(wanted)
        statistics = None if numbers is None else self.merge(inverse, numbers, len(unique))
        return SparseRows(unique, self.merge(inverse, values, len(unique)), statistics)
