"""The value of a table's variable while a program runs."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from transpiler.ir.sparse_rows import SparseRows


class TableHandle(Protocol):
    """The value of a table's variable: lookups pull rows from it, optimizer ops step them."""

    def pull(self, ids: Tensor) -> Tensor:
        """Rows of unique ids, int64 [u] on the CPU -> [u, dim]."""

    def stepping(self, gradient: SparseRows) -> Any:
        """A context manager within which the user's optimizer, if there is one, steps these rows;
        where there is none, entering it steps them.
        """
