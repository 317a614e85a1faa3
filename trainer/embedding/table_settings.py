"""An embedding's settings: checked, as a plan has them, and the rules by which its rows are
updated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch

from trainer.embedding.bags import POOLINGS
from trainer.embedding.local_rows import LocalRows
from trainer.embedding.state_dict import RowState
from trainer.row_optimizers import RowOptimizer, Segments, row_optimizer
from transpiler.ir.rules import Rule
from transpiler.ir.tables import (
    MOST_COLUMNS,
    CountFilterEntry,
    Initial,
    Normal,
    ProbabilityEntry,
    Segment,
    ShowClickEntry,
    Table,
    TableEntry,
)

DTYPES = {torch.float32: "float32", torch.float64: "float64"}
UNNAMED = "unnamed"  # the table of an embedding that is a whole model


class TableSettings(RowState):
    """A module with the settings of its table; the arguments are those of
    :class:`trainer.embedding.embedding.DistributedEmbedding`.

    Attributes:
        known_as: the table's name in the job that it is part of; None outside of one.
        padding_idx: 0 or above where ``num_embeddings`` is given.
    """

    known_as: str | None = None
    _optimizer: RowOptimizer | Segments | None

    def __init__(
        self,
        *,
        embedding_dim: int,
        num_embeddings: int | None,
        name: str | None,
        init: Initial | None,
        optimizer: Any,
        entry: TableEntry | None,
        pooling: str | None,
        padding_idx: int | None,
        dtype: torch.dtype,
        seed: int,
        ttl: float | None,
        capacity: int | None,
        eviction: str,
        memory_bytes: int | None,
    ) -> None:
        super().__init__()
        check_whole(
            embedding_dim=embedding_dim,
            num_embeddings=num_embeddings,
            padding_idx=padding_idx,
            seed=seed,
            capacity=capacity,
            memory_bytes=memory_bytes,
        )
        if not 1 <= embedding_dim <= MOST_COLUMNS:
            raise ValueError(f"embedding_dim: expected 1 to {MOST_COLUMNS}, got {embedding_dim}")
        if num_embeddings is not None and num_embeddings < 1:
            raise ValueError(f"num_embeddings: expected 1 or more, got {num_embeddings}")
        if dtype not in DTYPES:
            raise ValueError(f"dtype: expected torch.float32 or torch.float64, got {dtype}")
        if pooling is not None and pooling not in POOLINGS:
            known = ", ".join(map(repr, POOLINGS))
            raise ValueError(f"pooling: expected None or one of {known}, got {pooling!r}")
        _check_kinds(init, entry)
        self.embedding_dim, self.num_embeddings, self.dtype = embedding_dim, num_embeddings, dtype
        self.padding_idx = _padding(padding_idx, num_embeddings)
        self.name, self.pooling, self.entry = name, pooling, entry
        self.init, self.seed = Normal() if init is None else init, seed
        self.ttl, self.capacity, self.eviction = ttl, capacity, eviction
        self.memory_bytes = memory_bytes
        self.optimizer = optimizer

    @property
    def optimizer(self) -> RowOptimizer | Segments | None:
        """The table's own optimizer; its hyper-parameters may be set at any time."""
        return self._optimizer

    @optimizer.setter
    def optimizer(self, given: Any) -> None:
        own = None if given is None else row_optimizer(given)
        if own is not None:
            own.segments(self.embedding_dim)
        self._optimizer = own

    def rules(self, group: Callable[[], Rule] | None = None) -> list[tuple[int, int, Rule]]:
        """The present rules: columns [begin, end) and the rule of each segment.

        Args:
            group: gives the rule of the proxy parameter's group; called where the table has no
                optimizer of its own.

        Raises:
            ValueError: there is neither.
        """
        if self._optimizer is not None:
            segments = self._optimizer.segments(self.embedding_dim)
            return [(begin, end, own.rule()) for begin, end, own in segments]
        if group is None:
            raise ValueError(
                f"{self.whose()}: expected the rule of its parameter group, for it has no "
                "optimizer of its own"
            )
        return [(0, self.embedding_dim, group())]

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
                [(0, self.embedding_dim)]
                if self._optimizer is None
                else [part[:2] for part in self._optimizer.segments(self.embedding_dim)]
            )
            segments = [(begin, end, index) for index, (begin, end) in enumerate(columns)]
        return Table(
            name=name or self.name or UNNAMED,
            dim=self.embedding_dim,
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
        """The first difference, in words, that keeps two modules from sharing one table; None:
        there is none.
        """
        mine, theirs = self.table("shared"), other.table("shared")
        for field in fields(Table):
            one, two = getattr(mine, field.name), getattr(theirs, field.name)
            if one != two:
                return f"{field.name} {one!r} and {two!r}"
        rules = [None if each._optimizer is None else each.rules() for each in (self, other)]
        if rules[0] == rules[1]:
            return None
        return f"optimizer {self._optimizer!r} and {other._optimizer!r}"

    def whose(self) -> str:
        """The table, in words."""
        name = self.name or self.known_as
        return f"table {name!r}" if name else f"DistributedEmbedding({self.embedding_dim})"

    def extra_repr(self) -> str:
        """What differs from the defaults, and where the rows are."""
        ids = "any int64" if self.num_embeddings is None else self.num_embeddings
        said = [f"{ids} -> {self.embedding_dim}"]
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
        here = isinstance(self.rows, LocalRows)
        return ", ".join([*said, "rows in this process" if here else "rows on servers"])


def check_whole(**numbers: int | None) -> None:
    """Arguments, by name, that are whole numbers or None.

    Raises:
        TypeError: one is something else.
    """
    for name, number in numbers.items():
        if number is not None and (not isinstance(number, int) or isinstance(number, bool)):
            raise TypeError(f"{name}: expected a whole number, got {number!r}")


def _check_kinds(init: Initial | None, entry: TableEntry | None) -> None:
    if init is not None and not isinstance(init, Initial):
        raise TypeError(f"init: expected Normal(...), Uniform(...) or Constant(...), got {init!r}")
    if entry is not None and not isinstance(
        entry, CountFilterEntry | ProbabilityEntry | ShowClickEntry
    ):
        raise TypeError(
            f"entry: expected CountFilterEntry, ProbabilityEntry or ShowClickEntry, got {entry!r}"
        )


def _padding(padding: int | None, rows: int | None) -> int | None:
    """The id that ``padding_idx`` means."""
    if padding is None or rows is None:
        return padding
    if not -rows <= padding < rows:
        raise ValueError(f"padding_idx: expected {-rows} to {rows - 1}, got {padding}")
    return padding % rows
