"""The gradient of some rows of a table, which trainers send and servers merge.

numba takes a moment to import, and a job without tables does not need it.  So this module, which
every job imports, imports the kernels in its functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pserver.finite import is_finite


@dataclass(slots=True)
class RowGradient:
    """One gradient row for each of some ids.

    Attributes:
        ids: int64 [u], each once.
        rows: [u, dim], in the table's dtype; a trainer may have them on a GPU until it steps.
        statistics: float32 [u, 2], the shows and clicks of each id; None where the table does not
            count them.
    """

    ids: torch.Tensor
    rows: torch.Tensor
    statistics: torch.Tensor | None = None

    def clone(self) -> RowGradient:
        """A copy with rows of its own; it shares ids and statistics, which never change."""
        return RowGradient(self.ids, self.rows.clone(), self.statistics)

    def add_(self, other: RowGradient) -> RowGradient:
        """Adds another gradient in place, and returns this one.

        Rows of the same id are summed, this one's first; ids stand in the order of their first
        occurrence.
        """
        total = total_of([self, other])
        self.ids, self.rows, self.statistics = total.ids, total.rows, total.statistics
        return self

    def mul_(self, factor: float) -> RowGradient:
        """Multiplies the rows in place, not the statistics, which stay counts; returns this one."""
        if factor != 1.0:  # 1: most often the mean over one trainer
            self.rows.mul_(factor)
        return self

    def divide(self, servers: int) -> list[RowGradient]:
        """Divides the gradient by server: the part of each has the ids that it holds."""
        if servers == 1:
            return [self]
        from pserver.table.ids import partition  # imports numba

        order, offsets = partition(self.ids.numpy(), servers)
        parts = []
        for server in range(servers):
            own = torch.from_numpy(order[offsets[server] : offsets[server + 1]])
            parts.append(
                RowGradient(
                    self.ids[own],
                    self.rows[own],
                    None if self.statistics is None else self.statistics[own],
                )
            )
        return parts

    def is_finite(self) -> bool:
        """Whether no row, and no count, has a NaN or an infinity in it."""
        return is_finite(self.rows) and (self.statistics is None or is_finite(self.statistics))

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return (
            self.ids.nbytes
            + self.rows.nbytes
            + (0 if self.statistics is None else self.statistics.nbytes)
        )


@dataclass(frozen=True, slots=True)
class RowsBefore:
    """The rows of a gradient as its trainer has read them.

    Attributes:
        rows: [u, dim].
        known: bool[u]: whether it has read each of them lately.
    """

    rows: torch.Tensor
    known: torch.Tensor


def total_of(gradients: Sequence[RowGradient]) -> RowGradient:
    """The sum of several gradients.

    Args:
        gradients: at least one, of one table, with rows on one device.

    Returns:
        One row for each id, summed in the order of the gradients, so that a run repeats to the bit.
        (Of one gradient: that gradient itself.)
    """
    if len(gradients) == 1:
        return gradients[0]
    from pserver.table.ids import merge, unique  # imports numba

    found, inverse = unique(torch.cat([gradient.ids for gradient in gradients]).numpy())
    if gradients[0].rows.is_cpu:
        merged = merge(
            inverse, torch.cat([gradient.rows for gradient in gradients]).numpy(), len(found)
        )
        rows = torch.from_numpy(merged)
    else:
        rows = _added(gradients, torch.from_numpy(inverse), len(found))
    statistics = None
    if all(gradient.statistics is not None for gradient in gradients):
        counted = torch.cat(
            [gradient.statistics for gradient in gradients if gradient.statistics is not None]
        )
        statistics = torch.from_numpy(merge(inverse, counted.numpy(), len(found)))
    return RowGradient(torch.from_numpy(found), rows, statistics)


def _added(gradients: Sequence[RowGradient], places: torch.Tensor, count: int) -> torch.Tensor:
    """The sum of rows on a GPU: [count, dim].

    Args:
        places: [rows of all], those of the sum.
    """
    first = gradients[0].rows
    total = torch.zeros((count, first.shape[1]), dtype=first.dtype, device=first.device)
    runs = torch.split(places, [len(each.ids) for each in gradients])
    for gradient, run in zip(gradients, runs, strict=True):
        # the ids of one gradient differ, so that no two of its rows meet
        total.index_add_(0, run.to(total.device, non_blocking=True), gradient.rows)
    return total
