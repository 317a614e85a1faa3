"""What a module says of its table: its settings as a plan has them, by which rules its rows are
updated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch

from trainer.embedding.local_rows import LocalRows
from trainer.embedding.state_dict import RowState
from trainer.row_optimizers import RowOptimizer, Segments, row_optimizer
from transpiler.ir.rules import Rule
from transpiler.ir.tables import Initial, Segment, Table, TableEntry

DTYPES = {torch.float32: "float32", torch.float64: "float64"}


class TableSettings(RowState):
    """See the module's docstring; what the attributes are is said by
    :class:`trainer.embedding.embedding.DistributedEmbedding`.
    """

    name: str | None
    known_as: str | None = None  # in the job that it is part of
    dim: int
    num_embeddings: int | None
    padding_idx: int | None
    pooling: str | None
    dtype: torch.dtype
    init: Initial
    entry: TableEntry | None
    ttl: float | None
    seed: int
    capacity: int | None
    eviction: str
    memory_bytes: int | None
    _own: RowOptimizer | Segments | None

    @property
    def optimizer(self) -> RowOptimizer | Segments | None:
        """The table's own optimizer; its numbers may be set at any time."""
        return self._own

    @optimizer.setter
    def optimizer(self, given: Any) -> None:
        own = None if given is None else row_optimizer(given)
        if own is not None:
            own.segments(self.dim)
        self._own = own

    def rules(self, group: Callable[[], Rule] | None = None) -> list[tuple[int, int, Rule]]:
        """The present rules: columns [begin, end) and the rule of each segment.

        Args:
            group: tells the rule of the anchor's parameter group; asked where the table has no
                optimizer of its own.

        Raises:
            ValueError: neither says one.
        """
        if self._own is not None:
            return [(begin, end, own.rule()) for begin, end, own in self._own.segments(self.dim)]
        if group is None:
            raise ValueError(
                f"{self.whose()}: expected the rule of its parameter group, for it has no "
                "optimizer of its own"
            )
        return [(0, self.dim, group())]

    def table(
        self,
        name: str | None = None,
        segments: Sequence[tuple[int, int, int]] | None = None,
        lane: int = 0,
    ) -> Table:
        """The table as a plan has it.

        Args:
            name: None: the module's.
            segments: columns [begin, end) and the plan's parameter group of each; None: counted up.
        """
        if segments is None:
            columns = (
                [(0, self.dim)]
                if self._own is None
                else [part[:2] for part in self._own.segments(self.dim)]
            )
            segments = [(begin, end, index) for index, (begin, end) in enumerate(columns)]
        return Table(
            name=name or self.name or "unnamed",
            dim=self.dim,
            segments=tuple(Segment(*segment) for segment in segments),
            dtype=DTYPES[self.dtype],
            rows=self.num_embeddings,
            lane=lane,
            seed=self.seed,
            initial=self.init,
            entry=self.entry,
            ttl=self.ttl,
            capacity=self.capacity,
            eviction=self.eviction,
            memory_bytes=self.memory_bytes,
        )

    def differs(self, other: TableSettings) -> str | None:
        """What keeps two modules from sharing one table, in words: the first difference; None:
        nothing.
        """
        mine, theirs = self.table("shared"), other.table("shared")
        for field in fields(Table):
            one, two = getattr(mine, field.name), getattr(theirs, field.name)
            if one != two:
                return f"{field.name} {one!r} and {two!r}"
        rules = [None if module._own is None else module.rules() for module in (self, other)]
        return None if rules[0] == rules[1] else f"optimizer {self._own!r} and {other._own!r}"

    def whose(self) -> str:
        """The table, in words."""
        name = self.name or self.known_as
        return f"table {name!r}" if name else f"DistributedEmbedding({self.dim})"

    def extra_repr(self) -> str:
        """What differs from the defaults, and where the rows are."""
        said = [
            f"{'any int64' if self.num_embeddings is None else self.num_embeddings} -> {self.dim}"
        ]
        usual = (
            "padding_idx",
            "pooling",
            "name",
            "optimizer",
            "entry",
            "ttl",
            "capacity",
            "memory_bytes",
        )
        said += [f"{key}={getattr(self, key)!r}" for key in usual if getattr(self, key) is not None]
        if self.dtype != torch.float32:
            said.append(f"dtype={self.dtype}")
        return ", ".join(
            [
                *said,
                "rows in this process" if isinstance(self.rows, LocalRows) else "rows on servers",
            ]
        )
