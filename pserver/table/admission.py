"""The admission filter of a table: which ids get a row.

A table's entry is its admission rule.  An id that is pushed to and not admitted waits: the filter
keeps its counts until a later push admits it.
"""

from __future__ import annotations

import numpy as np

from pserver.table.ids import plain
from pserver.table.index import Index
from pserver.table.initializers import chance, seed_word
from pserver.table.kernels import Array, kernel
from pserver.table.memory import Memory
from transpiler.ir.tables import CountFilterEntry, ProbabilityEntry, ShowClickEntry, Table


@kernel
def _chosen(ids: Array, seed: np.uint64, probability: float, chosen: Array) -> None:
    """Writes which ids a ProbabilityEntry admits."""
    for i in range(len(ids)):
        chosen[i] = chance(seed, ids[i]) < probability


def score(entry: ShowClickEntry, statistics: Array) -> Array:
    """The scores of ids, float64[n].

    Args:
        entry: the admission rule.
        statistics: [n, 2 or more], how often each id was shown and clicked.
    """
    show, click = statistics[:, 0], statistics[:, 1]
    return (show - click) * entry.nonclk_coeff + click * entry.click_coeff


class AdmissionFilter:
    """Decides which ids get a row, and keeps those that wait for one.

    One caller at a time.

    Args:
        table: the table's description in the plan.

    Attributes:
        entry: the admission rule; None admits every id.
        index: of the ids that wait.
        names: the columns of ``records``: "count", or "show", "click" and "unseen"; and "pushed"
            where rows have a time to live.
    """

    def __init__(self, table: Table) -> None:
        self.entry, self._ttl, self._seed = table.entry, table.ttl, seed_word(table.seed)
        self.index = Index()
        names = (
            ("show", "click", "unseen") if isinstance(self.entry, ShowClickEntry) else ("count",)
        )
        self.names = (*names, *(("pushed",) if table.ttl is not None else ()))
        self._memory = Memory(len(self.names), np.float64)

    @property
    def delays(self) -> bool:
        """Whether ids of this table may have to wait."""
        entry = self.entry
        return (isinstance(entry, CountFilterEntry) and entry.count > 1) or (
            isinstance(entry, ShowClickEntry) and entry.threshold > 0
        )

    @property
    def records(self) -> Array:
        """float64[slots, names]: what is known of each id that waits; the memory itself."""
        return self._memory.array

    @property
    def bytes_held(self) -> int:
        """Memory of records and index, in bytes."""
        return self.index.used * self._memory.row_bytes + self.index.bytes_held

    def admit(
        self, ids: Array, statistics: Array | None, now: float, epoch: int
    ) -> tuple[Array, Array]:
        """Counts a push to ids without a row, and admits those that are due.

        Args:
            ids: int64[m], which differ.
            statistics: float32[m, 2] of this push, where the table has statistics.
            now: seconds.
            epoch: of the table's saves.

        Returns:
            bool[m]: whether they get a row now; float64[m, 2]: their statistics of earlier pushes.
        """
        earlier = np.zeros((len(ids), 2))
        if isinstance(self.entry, ProbabilityEntry):
            chosen = np.zeros(len(ids), np.bool_)
            _chosen(plain(ids, "admit"), self._seed, self.entry.probability, chosen)
            return chosen, earlier
        if not self.delays:
            return np.ones(len(ids), np.bool_), earlier
        slots = self._known(ids, now, epoch)
        held = self.records[slots]
        if isinstance(self.entry, ShowClickEntry):
            assert statistics is not None, "a table with this entry has statistics"
            earlier = held[:, :2].copy()
            held[:, :2] += statistics
            held[:, 2] = 0.0
            admitted = score(self.entry, held) >= self.entry.threshold
        else:
            assert isinstance(self.entry, CountFilterEntry)
            held[:, 0] += 1
            admitted = held[:, 0] >= self.entry.count
        if self._ttl is not None:
            held[:, -1] = now
        self.records[slots] = held
        self.index.remove(np.ascontiguousarray(ids[admitted]))
        return admitted, earlier

    def _known(self, ids: Array, now: float, epoch: int) -> Array:
        """The slots of these ids, with empty records for those that are new or had outlived their
        time.
        """
        slots, missing, _ = self.index.mark(ids, epoch, 0)
        if missing:
            slots[slots < 0] = self.add(ids[slots < 0], epoch)
        if self._ttl is not None:
            self.records[slots[now - self.records[slots, -1] > self._ttl]] = 0.0
        return slots

    def add(self, ids: Array, epoch: int) -> Array:
        """Has ids wait that did not: their slots, with empty records."""
        slots = self.index.insert(ids, epoch, 0)
        self._memory.need(self.index.used)
        self.records[slots] = 0.0
        return slots

    def clear(self) -> None:
        """Forgets all ids."""
        used = self.index.used
        self.index.clear()
        self._memory.clear(used)
