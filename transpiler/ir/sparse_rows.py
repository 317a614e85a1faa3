"""Rows of a table as values of a program: those that a lookup reads, and the gradient of rows.

The kernels here are plain torch.  The trainer's executor overrides ``unique`` and ``merge`` with
faster ones: the distinct ids of a batch, and the sums of the rows of each distinct id.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor


class PullableRows(Protocol):
    """The value of a variable of role TABLE: something that rows can be pulled from."""

    def pull(self, ids: Tensor) -> Tensor:
        """The rows of some ids.

        Args:
            ids: int64 [u] on the CPU, each once.

        Returns:
            [u, dim], on the CPU.
        """


@dataclass(frozen=True, slots=True)
class SparseRows:
    """The value of a table's gradient: one row for each touched id.

    Attributes:
        ids: int64 [u], each once, on the CPU.
        rows: [u, dim], on the CPU.
        statistics: float32 [u, 2], how often each id was shown and clicked; None where the table
            does not count them.
    """

    ids: Tensor
    rows: Tensor
    statistics: Tensor | None = None

    def sorted(self) -> SparseRows:
        """The same gradient with its ids in ascending order."""
        ids, order = self.ids.sort()
        return SparseRows(
            ids, self.rows[order], None if self.statistics is None else self.statistics[order]
        )


def rows_of(gradient: Tensor | SparseRows) -> Tensor:
    """The values of a gradient, which suffice for clipping: absent rows are zero."""
    return gradient.rows if isinstance(gradient, SparseRows) else gradient


def on_rows(
    change: Callable[[Tensor], Tensor], gradient: Tensor | SparseRows
) -> Tensor | SparseRows:
    """A gradient with its values replaced by ``change``."""
    return (
        replace(gradient, rows=change(gradient.rows))
        if isinstance(gradient, SparseRows)
        else change(gradient)
    )


class RowKernels:
    """The kernels of ``lookup_table`` and ``lookup_table_grad``."""

    def unique(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The distinct ids, and the place of each id among them.

        Args:
            ids: int64 [n] on the CPU.

        Returns:
            Distinct ids, int64 [u], and places, int64 [n].
        """
        found, inverse = torch.unique(ids, return_inverse=True)
        return found, inverse

    def merge(self, inverse: Tensor, values: Tensor, count: int) -> Tensor:
        """The sums of the rows of each distinct id, added in the order of occurrence.

        Args:
            inverse: int64 [n], the place of each row's id among the distinct ones.
            values: [n, d].
            count: the number of distinct ids.

        Returns:
            [count, d].
        """
        return values.new_zeros((count, values.shape[1])).index_add_(0, inverse, values)

    def kernels(self) -> Mapping[str, Callable[..., Any]]:
        """The kernels by op type."""
        return {"lookup_table": self._lookup, "lookup_table_grad": self._gradient}

    def wanted(self, ids: Sequence[Tensor], padding: int | None) -> tuple[Tensor, Tensor | None]:
        """The ids of lookups that need rows.

        Args:
            ids: integers of any shape, one tensor for each lookup.
            padding: the id that is not looked up; None: every id is.

        Returns:
            The ids of all lookups in order, without the padding's, int64 [n] on the CPU; and a bool
            mask [all ids] of those that remain, None if all do.
        """
        flat = torch.cat([each.detach().reshape(-1).to("cpu", torch.int64) for each in ids])
        stays = None if padding is None else flat != padding
        return (flat, None) if stays is None or bool(stays.all()) else (flat[stays], stays)

    def spread(
        self, rows: Tensor, inverse: Tensor, stays: Tensor | None, ids: Sequence[Tensor]
    ) -> list[Tensor]:
        """The rows of each lookup, on its ids' device; the padding's are zero.

        Args:
            rows: [u, dim], of the distinct ids.
            inverse: the place of each wanted id among the distinct ones.
            stays: the mask that :meth:`wanted` gave.
            ids: of the lookups.

        Returns:
            [*ids.shape, dim] for each lookup.
        """
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

    def _lookup(
        self, op: Any, w: PullableRows, ids: Tensor, padding_idx: int | None = None
    ) -> Tensor:
        wanted, stays = self.wanted([ids], padding_idx)
        unique, inverse = self.unique(wanted)
        return self.spread(w.pull(unique), inverse, stays, [ids])[0]

    def _gradient(
        self,
        op: Any,
        w: PullableRows,
        ids: Sequence[Tensor],
        grads: Sequence[Tensor],
        counted: Sequence[Tensor] | None = None,
        padding_idx: Sequence[int | None] | None = None,
    ) -> SparseRows:
        """The gradient of the rows: summed in each lookup, then over lookups, as in eager's
        backward.
        """
        paddings = [None] * len(ids) if padding_idx is None else padding_idx
        counts = [None] * len(ids) if counted is None else counted
        parts = [self._of_one(*each) for each in zip(ids, grads, counts, paddings, strict=True)]
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
        counts = None if counted is None else counted.detach().cpu().contiguous()
        if stays is not None:
            values, counts = values[stays], None if counts is None else counts[stays]
        unique, inverse = self.unique(wanted)
        statistics = None if counts is None else self.merge(inverse, counts, len(unique))
        return SparseRows(unique, self.merge(inverse, values, len(unique)), statistics)
