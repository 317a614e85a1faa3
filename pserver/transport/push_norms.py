"""How large what a step brings of one parameter or table is; and what of it is far too large.

[Note: norms of 32 bits]  A norm is summed in 32 bits, at the speed of memory; in 64 bits torch
takes fifty times as long, and what it is compared with is a factor.  Squares leave the range of 32
bits above 1e19: where the sum has, it is taken again in 64 bits, of elements divided by the
largest.  Squares below 1e-45 are 0.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

ROWS = 8  # ids of a table's largest rows that travel
NAMED = 3  # outliers that a message names


def l2_norm(tensor: torch.Tensor) -> float:
    """The root of the sum of squares.

    Args:
        tensor: floats of 16 to 64 bits, of any shape, in main memory.

    Returns:
        NaN or an infinity where an element is.

    Example:
        >>> l2_norm(torch.tensor([3.0, 4.0])), l2_norm(torch.tensor([3e30, 4e30]))
        (5.0, 5e+30)
    """
    norm = float(torch.linalg.vector_norm(tensor, dtype=_summed(tensor)))
    if math.isfinite(norm):
        return norm
    wide = tensor.double()
    largest = float(wide.abs().max())
    if not math.isfinite(largest):
        return largest
    return min(largest * float(torch.linalg.vector_norm(wide / largest)), sys.float_info.max)


def _summed(tensor: torch.Tensor) -> torch.dtype:
    """In what squares are summed.  See [Note: norms of 32 bits]."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


@dataclass(frozen=True, slots=True)
class PushNorm:
    """How large what a step brings of a parameter or table is.

    Attributes:
        norm: L2 of a parameter's gradient (or change); of a table the root mean square of the L2
            norms of its rows, so that a step of more rows is no larger.
        rows: the ids of the largest rows, the largest first.
    """

    norm: float
    rows: tuple[int, ...] = ()

    @classmethod
    def of_rows(cls, ids: torch.Tensor, rows: torch.Tensor) -> PushNorm:
        """That of a table.

        Args:
            ids: int64 [u].
            rows: [u, dim].

        Example:
            >>> PushNorm.of_rows(torch.tensor([7, 8]), torch.tensor([[1.0], [7.0]]))
            PushNorm(norm=5.0, rows=(8, 7))
        """
        if not len(ids):
            return cls(0.0)
        norms = torch.linalg.vector_norm(rows, dim=1, dtype=_summed(rows))
        if not bool(norms.isfinite().all()):
            norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
        largest = ids[norms.topk(min(ROWS, len(ids))).indices]
        return cls(l2_norm(norms) / math.sqrt(len(ids)), tuple(largest.tolist()))

    def scaled(self, factor: float) -> PushNorm:
        """The same of a push that is so many times as large."""
        return PushNorm(self.norm * factor, self.rows)


@dataclass(frozen=True, slots=True)
class OutlierPush:
    """A norm in a trainer's step that is far beyond the history of this trainer and variable.

    Attributes:
        trainer, step: whose, and its number in the lane.
        variable: the parameter or table.
        norm: how large it is.
        history: how large it was expected to be.
    """

    trainer: int
    step: int
    variable: str
    norm: PushNorm
    history: float

    @property
    def found(self) -> str:
        """Norm, history and rows in words."""
        times = self.norm.norm / self.history
        text = f"the norm {self.norm.norm:.3g} of {self.variable!r}, {times:.3g} times its "
        text += f"history of {self.history:.3g}"
        return text + (f" (rows {', '.join(map(str, self.norm.rows))})" if self.norm.rows else "")


def listed(outliers: Collection[OutlierPush]) -> str:
    """What is too large in a step, the first few."""
    named = " and ".join(each.found for each in list(outliers)[:NAMED])
    more = len(outliers) - NAMED
    return named + (f" and {more} more" if more > 0 else "")


def said(outliers: Sequence[OutlierPush]) -> str:
    """The outliers of one trainer's step, at least one: ``step 3 of trainer 1 brings ...``."""
    first = outliers[0]
    return f"step {first.step} of trainer {first.trainer} brings {listed(outliers)}"
