"""A trainer's cache of pulled rows: it reads the hot ids of skewed data again without asking the
servers.

[Note: staleness of a cached row]  A row that was pulled in step t is read from the cache up to step
t + staleness, as it was pulled: later pushes, this trainer's own included, show when it is pulled
again.  (A trainer cannot know by which rule a server will update a row, or after which other
pushes; and if its own push dropped the row, every step would drop just the rows that it read.)  So
a forward of step t sees all pushes that were applied before step t - staleness: bounded staleness.

[Note: four to a set]  A row may lie in one of four places, which its id's hash gives; the one that
was read least recently is evicted.  So everything is done for all ids of a lookup at once, in
numpy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

# ---- row cache ----


WAYS = 4
NEVER = np.iinfo(np.int64).min // 2  # a step before any


class RowCache:
    """Rows by id, each readable for some steps after its pull.  Steps are whole numbers that never
    go down.  Not thread-safe.

    Args:
        rows: the most that are kept, at least 1; in whole sets of four, or one set of fewer.
        dim, dtype: of a row.
        staleness: the number of steps after its pull in which a row may be read; 0: in the step of
            the pull only.

    Raises:
        ValueError: ``rows`` is below 1, or ``staleness`` below 0.
    """

    def __init__(
        self, rows: int, dim: int, staleness: int, dtype: np.dtype | type = np.float32
    ) -> None:
        if rows < 1:
            raise ValueError(f"cache_rows: expected 1 or more, got {rows}")
        if staleness < 0:
            raise ValueError(f"cache_staleness: expected 0 steps or more, got {staleness}")
        self.staleness = staleness
        self._ways = min(rows, WAYS)
        self._sets = rows // self._ways
        places = self._sets * self._ways
        self._rows = np.zeros((places, dim), dtype)
        self._ids = np.zeros(places, np.int64)
        # the step in which the row was pulled; NEVER: the place is free
        self._pulled = np.full(places, NEVER)
        self._read = np.full(places, NEVER)  # the step in which it was last read
        self.hits = self.misses = self.evictions = 0

    def read(self, ids: np.ndarray, step: int, out: np.ndarray) -> np.ndarray:
        """Fills in the cached rows that are young enough.

        Args:
            ids: int64 [u], each once.
            out: [u, dim]; other rows stay as they are.

        Returns:
            The positions in ``ids`` of those to pull, int64 [m], in order.
        """
        places, here = self._young(ids, step)
        found = places[here]
        out[here] = self._rows[found]
        self._read[found] = step
        missing = np.flatnonzero(~here)
        self.hits += len(found)
        self.misses += len(missing)
        return missing

    def missing(self, ids: np.ndarray, step: int) -> np.ndarray:
        """The positions that :meth:`read` would return; nothing is counted as read."""
        return np.flatnonzero(~self._young(ids, step)[1])

    def _young(self, ids: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Each id's place, and whether its row is cached and may be read in this step."""
        places, here = self._find(ids)
        return places, here & (step - self._pulled[places] <= self.staleness)

    def keep(self, ids: np.ndarray, rows: np.ndarray, step: int) -> None:
        """Keeps rows that were pulled in this step: int64 [m], each once, and [m, dim].

        Where a set has no room for all ids of a call, the last one stays.
        """
        places, here = self._find(ids)
        others = np.flatnonzero(~here)
        chosen = self._room(ids[others])
        places[others] = chosen
        taken = np.unique(chosen)
        self.evictions += int((self._pulled[taken] != NEVER).sum())
        self._ids[places] = ids
        stays = self._ids[places] == ids
        kept = places[stays]
        self._rows[kept] = rows[stays]
        self._pulled[kept] = self._read[kept] = step

    def drop(self, ids: np.ndarray) -> None:
        """Forgets these ids' rows, int64 [u]: the next read pulls them."""
        places, here = self._find(ids)
        self._pulled[places[here]] = self._read[places[here]] = NEVER

    def clear(self) -> None:
        """Forgets all rows; the counters stay."""
        self._pulled.fill(NEVER)
        self._read.fill(NEVER)

    def __len__(self) -> int:
        return int((self._pulled != NEVER).sum())

    def counters(self) -> dict[str, int]:
        """Hits, misses and evictions since the beginning; rows now."""
        return {
            "hits": self.hits,
            "misses": self.misses,
            "evictions": self.evictions,
            "rows": len(self),
        }

    def _candidates(self, ids: np.ndarray) -> np.ndarray:
        """The places in which an id's row may lie: int64 [u, ways]."""
        return self._set_of(ids)[:, None] * self._ways + np.arange(self._ways)

    def _set_of(self, ids: np.ndarray) -> np.ndarray:
        mixed = ids.astype(np.uint64)  # the finalizer of splitmix64 (Steele, Lea, Flood, 2014)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((mixed ^ (mixed >> np.uint64(31))) % np.uint64(self._sets)).astype(np.int64)

    def _find(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Each id's place, and whether its row is cached, of any age."""
        candidates = self._candidates(ids)
        same = (self._ids[candidates] == ids[:, None]) & (self._pulled[candidates] != NEVER)
        return np.take_along_axis(candidates, same.argmax(1)[:, None], 1)[:, 0], same.any(1)

    def _room(self, ids: np.ndarray) -> np.ndarray:
        """A place for each id that has none: the least recently read one of its set; for the next
        id of the set the next one.
        """
        candidates = self._candidates(ids)
        by_age = np.take_along_axis(
            candidates, self._read[candidates].argsort(axis=1, kind="stable"), 1
        )
        sets = candidates[:, 0]
        order = np.argsort(sets, kind="stable")
        begins = np.flatnonzero(np.r_[True, np.diff(sets[order]) != 0]) if len(ids) else order
        rank = np.empty(len(ids), np.int64)
        rank[order] = np.arange(len(ids)) - np.repeat(begins, np.diff(np.r_[begins, len(ids)]))
        return by_age[np.arange(len(ids)), rank % self._ways]


def cache_of(rows: int, dim: int, staleness: int, dtype: torch.dtype) -> RowCache | None:
    """The cache that an embedding's arguments ask for; None where ``rows`` is 0.

    Raises:
        TypeError: ``rows`` is no whole number.
        ValueError: a number is below 0, or there is a staleness without rows.
    """
    if not isinstance(rows, int) or isinstance(rows, bool):
        raise TypeError(f"cache_rows: expected a whole number, got {rows!r}")
    if rows < 0:
        raise ValueError(f"cache_rows: expected 0 or more, got {rows}")
    if staleness and not rows:
        raise ValueError(
            "cache_staleness: expected cache_rows with it; without a cache every row is "
            "pulled when it is read"
        )
    numpy_dtype = torch.empty(0, dtype=dtype).numpy().dtype
    return RowCache(rows, dim, staleness, numpy_dtype) if rows else None


# ---- row source ----
#
# The protocol of an embedding's row source, in this process or on servers.


@dataclass(frozen=True, slots=True)
class Arrived:
    """Rows that servers have sent ahead, in one answer with those of other tables.

    Attributes:
        ids: int64 [u], each once, on the CPU.
        rows: [u, embedding_dim].
    """

    ids: Tensor
    rows: Tensor

    def of(self, ids: Tensor) -> Tensor | None:
        """The rows, where their ids are exactly these, in this order; otherwise None."""
        return self.rows if self.ids is ids or torch.equal(self.ids, ids) else None


class RowSource(Protocol):
    """A source of a table's present rows: this process, or the servers.

    Ids are int64 [u], each once, on the CPU.
    """

    def pull(self, ids: Tensor, arrived: Arrived | None = None) -> Tensor:
        """The rows of ids, [u, embedding_dim] in the table's dtype, on the CPU.

        Args:
            arrived: rows of the ids that :meth:`ids_to_pull` has returned for these ids.  A source
                takes them where it would ask for the same ids now, and otherwise asks.
        """

    def ids_to_pull(self, ids: Tensor) -> Tensor:
        """The ids for which :meth:`pull` would ask servers now."""


# ---- served rows ----
#
# Whether a ``state_dict`` has the rows that servers hold.
#
# Imports no numba: jobs without tables use this, too.


_wanted = ContextVar("_wanted", default=True)


def are_wanted() -> bool:
    """Whether ``state_dict()`` pulls the rows that servers hold."""
    return _wanted.get()


@contextmanager
def without_served_rows() -> Iterator[None]:
    """Makes ``state_dict()`` leave out the rows that servers hold, in this context."""
    token = _wanted.set(False)
    try:
        yield
    finally:
        _wanted.reset(token)
