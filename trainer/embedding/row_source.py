"""Where an embedding's rows come from: one protocol, whoever holds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Arrived:
    """Rows that servers have given ahead, in one answer with those of other tables.

    Attributes:
        ids: int64 [u], each once, on the CPU.
        rows: [u, embedding_dim].
    """

    ids: Tensor
    rows: Tensor

    def of(self, ids: Tensor) -> Tensor | None:
        """The rows, where they are those of exactly these ids, in this order; otherwise None."""
        return self.rows if torch.equal(self.ids, ids) else None


class RowSource(Protocol):
    """Gives the present rows of a table: this process's, or the servers'.

    Ids are int64 [u], each once, on the CPU.
    """

    def pull(self, ids: Tensor, arrived: Arrived | None = None) -> Tensor:
        """The rows of ids, [u, embedding_dim] in the table's dtype, on the CPU.

        Args:
            arrived: rows of what :meth:`asks` has named for these ids.  A source takes them where
                it would ask for the same ids now, and otherwise asks.
        """

    def asks(self, ids: Tensor) -> Tensor:
        """Those of the ids for which :meth:`pull` would ask servers now."""
