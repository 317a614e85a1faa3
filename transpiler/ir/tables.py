"""The data of sparse tables: settings, initial values, entry rules and segments of columns.

A table is a map from int64 ids to rows of ``dim`` values.  Row ``id`` is on server ``owner(id,
servers)``.  The arithmetic is in pserver/table/.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

WHOLE = ("float32", "float64")
HALVES = ("bfloat16", "float16")  # rows of these are computed with as float32
DTYPES = WHOLE + HALVES
ROW_COMPRESSIONS = ("", *HALVES)  # of gradients
EVICTIONS = ("lru", "lfu")
MOST_COLUMNS = 65536


@dataclass(frozen=True, slots=True)
class Initial:
    """The distribution of a table's initial values.

    The values of a row depend on the table's seed and the row's id only.

    Attributes:
        kind: "constant" (``low`` everywhere), "uniform" (``low`` to ``high``) or "normal" (mean
            ``low``, deviation ``high``).
    """

    kind: str = "normal"
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in ("constant", "uniform", "normal"):
            raise ValueError(f"init: expected constant, uniform or normal, got {self.kind!r}")
        if not (math.isfinite(self.low) and math.isfinite(self.high)):
            raise ValueError(f"init: expected finite numbers, got {self.low} and {self.high}")
        if self.kind == "uniform" and self.low > self.high:
            raise ValueError(f"init: expected low <= high, got {self.low} and {self.high}")
        if self.kind == "normal" and self.high < 0:
            raise ValueError(f"init: expected a deviation of 0 or more, got {self.high}")


def Constant(value: float) -> Initial:
    """Initial values that are all ``value``."""
    return Initial("constant", float(value))


def Uniform(low: float, high: float) -> Initial:
    """Initial values that are uniform between ``low`` and ``high``."""
    return Initial("uniform", float(low), float(high))


def Normal(mean: float = 0.0, std: float = 1.0) -> Initial:
    """Normal initial values; the defaults are torch.nn.Embedding's."""
    return Initial("normal", float(mean), float(std))


@dataclass(frozen=True, slots=True)
class CountFilterEntry:
    """Admits an id with its ``count``-th push, which is the first that is applied.

    Raises:
        TypeError: ``count`` is not a whole number.
        ValueError: it is below 1.
    """

    count: int

    def __post_init__(self) -> None:
        if not isinstance(self.count, int) or isinstance(self.count, bool):
            raise TypeError(f"CountFilterEntry: expected a whole number, got {self.count!r}")
        if not 1 <= self.count < 2**24:
            raise ValueError(f"CountFilterEntry: expected 1 to 2**24 - 1, got {self.count}")


@dataclass(frozen=True, slots=True)
class ProbabilityEntry:
    """Admits an id with this probability.

    Which ids are admitted depends on the table's seed and the id only.

    Raises:
        TypeError: ``probability`` is not a float.
        ValueError: it is not between 0 and 1, both excluded.
    """

    probability: float

    def __post_init__(self) -> None:
        if not isinstance(self.probability, float):
            raise TypeError(
                f"ProbabilityEntry: expected a float above 0 and below 1, got {self.probability!r}"
            )
        if not 0.0 < self.probability < 1.0:
            raise ValueError(
                f"ProbabilityEntry: expected a number above 0 and below 1, got {self.probability}"
            )


@dataclass(frozen=True, slots=True)
class ShowClickEntry:
    """Admits and keeps ids by how often they were shown and clicked.

    The score of a row is (show - click) * nonclk_coeff + click * click_coeff.  An id is admitted
    once its score reaches ``threshold``.  ``shrink`` multiplies show and click by ``decay``, then
    removes rows whose score is below ``delete_threshold`` and rows that were not pushed for more
    than ``delete_after_unseen_days`` days.

    Args:
        show, click: the names of the two keyword arguments of the embedding's forward that hold the
            statistics, one number for each id: how often it was shown (1 where absent), and
            clicked (0 where absent).
        threshold: the score from which an id is admitted.
        nonclk_coeff, click_coeff: the weights of a show without a click, and of a click.
        decay: of the statistics, at each ``shrink``.
        delete_threshold: the score below which ``shrink`` removes a row.
        delete_after_unseen_days: days without a push after which ``shrink`` removes a row.

    Raises:
        TypeError: a name is not a string.
        ValueError: the names are equal or empty, or a number is out of range.
    """

    show: str
    click: str
    threshold: float = 0.0
    nonclk_coeff: float = 0.1
    click_coeff: float = 1.0
    decay: float = 0.98
    delete_threshold: float = 0.8
    delete_after_unseen_days: float = 30.0

    def __post_init__(self) -> None:
        for name, value in (("show", self.show), ("click", self.click)):
            if not isinstance(value, str):
                raise TypeError(f"ShowClickEntry: {name}: expected a name, got {value!r}")
        if not self.show.isidentifier() or not self.click.isidentifier() or self.show == self.click:
            raise ValueError(
                f"ShowClickEntry: expected two different names, got {self.show!r} and "
                f"{self.click!r}"
            )
        if not 0.0 < self.decay <= 1.0:
            raise ValueError(
                f"ShowClickEntry: decay: expected a number above 0 and up to 1, got {self.decay}"
            )
        for name in (
            "threshold",
            "nonclk_coeff",
            "click_coeff",
            "delete_threshold",
            "delete_after_unseen_days",
        ):
            if not getattr(self, name) >= 0.0:
                raise ValueError(
                    f"ShowClickEntry: {name}: expected 0 or more, got {getattr(self, name)}"
                )


TableEntry = CountFilterEntry | ProbabilityEntry | ShowClickEntry


@dataclass(frozen=True, slots=True)
class Segment:
    """Columns of every row with one update rule.

    Attributes:
        begin, end: columns [begin, end).
        group: the parameter group of the plan whose rule updates them.
    """

    begin: int
    end: int
    group: int


@dataclass(frozen=True, slots=True)
class Table:
    """One table of a plan.

    Attributes:
        name: unique among the plan's variables and tables.
        dim: columns of a row.
        segments: cover all columns, in order.
        dtype: of the values, as servers hold them and as they travel: one of ``DTYPES``.  States
            are float32 where values are one of ``HALVES``.
        rows: ids are 0 to rows - 1; None: any int64.
        lane: index of its lane in the plan.
        seed: of initial values and of probability entries.
        initial: the distribution of initial values.
        entry: the rule that admits ids; None: all are admitted.
        ttl: seconds without a push after which a row is removed; None: never.
        capacity: the most rows on all servers together; beyond it rows are evicted; None: no bound.
        eviction: evicts the least recently ("lru") or the least often ("lfu") pushed rows.
        memory_bytes: bytes of rows that stay in memory, on all servers together; the other rows are
            on the servers' disks; None: all stay in memory.
        compression: the dtype as which rows of float32 gradients travel: "" (uncompressed),
            "bfloat16" or "float16".

    Raises:
        ValueError: a setting is out of range, or two contradict each other.
    """

    name: str
    dim: int
    segments: tuple[Segment, ...]
    dtype: str = "float32"
    rows: int | None = None
    lane: int = 0
    seed: int = 0
    initial: Initial = Initial()
    entry: TableEntry | None = None
    ttl: float | None = None
    capacity: int | None = None
    eviction: str = "lru"
    memory_bytes: int | None = None
    compression: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("table: expected a name, got an empty one")
        if not 1 <= self.dim <= MOST_COLUMNS:
            said = (
                f"expected 1 to {MOST_COLUMNS} columns, got {self.dim} (dim comes before "
                "num_embeddings)"
            )
            raise ValueError(f"table {self.name!r}: dim: {said}")
        self._check_dtypes()
        if self.eviction not in EVICTIONS:
            raise ValueError(
                f"table {self.name!r}: eviction: expected one of {', '.join(EVICTIONS)}, got "
                f"{self.eviction!r}"
            )
        if self.eviction != "lru" and self.capacity is None:
            raise ValueError(
                f"table {self.name!r}: eviction={self.eviction!r} has no effect without a capacity"
            )
        bounds = (
            ("rows", self.rows),
            ("capacity", self.capacity),
            ("ttl", self.ttl),
            ("memory_bytes", self.memory_bytes),
        )
        for what, bound in bounds:
            if bound is not None and not bound > 0:
                raise ValueError(
                    f"table {self.name!r}: {what}: expected a number above 0, got {bound}"
                )
        if self.capacity is not None and self.memory_bytes is not None:
            raise ValueError(
                f"table {self.name!r}: capacity and memory_bytes: expected one of the two, got both"
            )
        begin = 0
        for segment in self.segments:
            if segment.begin != begin or segment.end <= begin:
                raise ValueError(
                    f"table {self.name!r}: expected a segment of columns from {begin} on, got "
                    f"{segment}"
                )
            begin = segment.end
        if begin != self.dim:
            raise ValueError(
                f"table {self.name!r}: expected segments of all {self.dim} columns, got {begin}"
            )

    def _check_dtypes(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(
                f"table {self.name!r}: dtype: expected one of {', '.join(DTYPES)}, got "
                f"{self.dtype!r}"
            )
        if self.compression not in ROW_COMPRESSIONS:
            raise ValueError(
                f"table {self.name!r}: compression: expected one of "
                f"{', '.join(map(repr, ROW_COMPRESSIONS))}, got {self.compression!r}"
            )
        if self.compression and self.computes_in != "float32":
            raise ValueError(
                f"table {self.name!r}: compression: expected gradients of float32, got "
                f"{self.computes_in}"
            )

    @property
    def computes_in(self) -> str:
        """The dtype that rows are computed in, and that their states have."""
        return computed_in(self.dtype)

    @property
    def gradients_in(self) -> str:
        """The dtype in which the rows of gradients travel: where values are one of ``HALVES``,
        bfloat16, which has the range of float32.
        """
        return self.compression or ("bfloat16" if self.dtype in HALVES else self.dtype)


def computed_in(dtype: str) -> str:
    """The dtype that rows of a dtype are computed in.

    Example:
        >>> computed_in("bfloat16")
        'float32'
    """
    return "float32" if dtype in HALVES else dtype
