"""An embedding's settings: their checks, their form in a plan, and the update rules of its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from pserver.table.string_ids import HASHES
from trainer.embedding.bags import POOLINGS
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

# shown in a module's text, where they are set
SHOWN = (
    "padding_idx",
    "pooling",
    "hash",
    "name",
    "optimizer",
    "entry",
    "ttl",
    "capacity",
    "memory_bytes",
)
# the dtypes of rows, and those that they are computed in
DTYPES = {
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}
_KNOWN = ", ".join(map(str, DTYPES))
UNNAMED = "unnamed"  # the table of an embedding that is a whole model


@dataclass(kw_only=True, eq=False)
class TableSettings:
    """The settings of a table; the arguments are those of
    :class:`trainer.embedding.embedding.DistributedEmbedding`.

    Attributes:
        optimizer: the table's own; its hyper-parameters may be set at any time.
        known_as: the table's name in the job that it is part of; None outside of one.
        padding_idx: 0 or above where ``num_embeddings`` is given.

    Raises:
        TypeError: one is of the wrong kind.
        ValueError: a number is out of its range.
    """

    embedding_dim: int
    num_embeddings: int | None = None
    name: str | None = None
    init: Initial = field(default_factory=Normal)
    optimizer: RowOptimizer | Segments | None = None
    entry: TableEntry | None = None
    pooling: str | None = None
    padding_idx: int | None = None
    dtype: torch.dtype = torch.float32
    seed: int = 0
    ttl: float | None = None
    capacity: int | None = None
    eviction: str = "lru"
    memory_bytes: int | None = None
    hash: str | None = None
    known_as: str | None = None

    def __post_init__(self) -> None:
        numbers = "embedding_dim", "num_embeddings", "padding_idx", "seed", "capacity"
        check_whole(**{name: getattr(self, name) for name in (*numbers, "memory_bytes")})
        if not 1 <= self.embedding_dim <= MOST_COLUMNS:
            raise ValueError(
                f"embedding_dim: expected 1 to {MOST_COLUMNS}, got {self.embedding_dim}"
            )
        if self.num_embeddings is not None and self.num_embeddings < 1:
            raise ValueError(f"num_embeddings: expected 1 or more, got {self.num_embeddings}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: expected one of {_KNOWN}, got {self.dtype}")
        if self.pooling is not None and self.pooling not in POOLINGS:
            known = ", ".join(map(repr, POOLINGS))
            raise ValueError(f"pooling: expected None or one of {known}, got {self.pooling!r}")
        _check_kinds(self.init, self.entry)
        _check_hash(self.hash, self.padding_idx)
        self.padding_idx = _padding(self.padding_idx, self.num_embeddings)
        self.follow(self.optimizer)

    @property
    def computes_in(self) -> torch.dtype:
        """The dtype that rows are looked up, and computed, in."""
        return DTYPES[self.dtype]

    def follow(self, given: Any) -> None:
        """Sets the table's own optimizer; None: rows follow that of their group.

        Raises:
            TypeError: it is no optimizer of rows.
            ValueError: its segments are not those of the table's columns.
        """
        own = None if given is None else row_optimizer(given)
        if own is not None:
            own.segments(self.embedding_dim)
        self.optimizer = own

    def rules(self, group: Callable[[], Rule] | None = None) -> list[tuple[int, int, Rule]]:
        """The present rules: columns [begin, end) and the rule of each segment.

        Args:
            group: gives the rule of the proxy parameter's group; called where the table has no
                optimizer of its own.

        Raises:
            ValueError: there is neither.
        """
        if self.optimizer is not None:
            segments = self.optimizer.segments(self.embedding_dim)
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
                if self.optimizer is None
                else [part[:2] for part in self.optimizer.segments(self.embedding_dim)]
            )
            segments = [(begin, end, index) for index, (begin, end) in enumerate(columns)]
        return Table(
            name=name or self.name or UNNAMED,
            dim=self.embedding_dim,
            segments=tuple(Segment(*segment) for segment in segments),
            dtype=str(self.dtype).removeprefix("torch."),
            rows=self.num_embeddings,
            lane=lane,
            seed=self.seed,
            initial=self.init,
            entry=self.entry,
            ttl=None if self.ttl is None else float(self.ttl),  # as a message has it
            capacity=self.capacity,
            eviction=self.eviction,
            memory_bytes=self.memory_bytes,
        )

    def differs(self, other: TableSettings) -> str | None:
        """The first difference, in words, that keeps two modules from sharing one table; None:
        there is none.
        """
        mine, theirs = self.table("shared"), other.table("shared")
        for each in fields(Table):
            one, two = getattr(mine, each.name), getattr(theirs, each.name)
            if one != two:
                return f"{each.name} {one!r} and {two!r}"
        if self.hash != other.hash:
            return f"hash {self.hash!r} and {other.hash!r}"
        rules = [None if each.optimizer is None else each.rules() for each in (self, other)]
        if rules[0] == rules[1]:
            return None
        return f"optimizer {self.optimizer!r} and {other.optimizer!r}"

    def whose(self) -> str:
        """The table, in words."""
        name = self.name or self.known_as
        return f"table {name!r}" if name else f"DistributedEmbedding({self.embedding_dim})"

    def __str__(self) -> str:
        """The settings that differ from the defaults."""
        ids = "any int64" if self.num_embeddings is None else self.num_embeddings
        shown = [f"{ids} -> {self.embedding_dim}"]
        shown += [f"{key}={value!r}" for key in SHOWN if (value := getattr(self, key)) is not None]
        if self.dtype != torch.float32:
            shown.append(f"dtype={self.dtype}")
        return ", ".join(shown)


def check_whole(**numbers: int | None) -> None:
    """Checks that arguments, by name, are whole numbers or None.

    Raises:
        TypeError: one is something else.
    """
    for name, number in numbers.items():
        if number is not None and (not isinstance(number, int) or isinstance(number, bool)):
            raise TypeError(f"{name}: expected a whole number, got {number!r}")


def _check_kinds(init: Initial, entry: TableEntry | None) -> None:
    if not isinstance(init, Initial):
        raise TypeError(f"init: expected Normal(...), Uniform(...) or Constant(...), got {init!r}")
    if entry is not None and not isinstance(
        entry, CountFilterEntry | ProbabilityEntry | ShowClickEntry
    ):
        raise TypeError(
            f"entry: expected CountFilterEntry, ProbabilityEntry or ShowClickEntry, got {entry!r}"
        )


def _check_hash(name: str | None, padding: int | None) -> None:
    if name is not None and name not in HASHES:
        raise ValueError(f"hash: expected None or one of {', '.join(HASHES)}, got {name!r}")
    if name is not None and padding is not None:
        raise ValueError("padding_idx: expected None with hash, by which any id may be a string's")


def _padding(padding: int | None, rows: int | None) -> int | None:
    """The id that ``padding_idx`` means."""
    if padding is None or rows is None:
        return padding
    if not -rows <= padding < rows:
        raise ValueError(f"padding_idx: expected {-rows} to {rows - 1}, got {padding}")
    return padding % rows
