"""Which ids get a row: the entries of a table, enforced; and those that were pushed to and have
none yet.
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
    for i in range(len(ids)):
        chosen[i] = chance(seed, ids[i]) < probability


def score(entry: ShowClickEntry, statistics: Array) -> Array:
    """What ids shown and clicked so often ([n, 2]) are worth: float64[n]."""
    show, click = statistics[:, 0], statistics[:, 1]
    return (show - click) * entry.nonclk_coeff + click * entry.click_coeff


class AdmissionFilter:
    """Ids that have been pushed to and are not admitted yet.

    Attributes:
        index: of them.
        names: what is known of each, in the order of ``facts``' columns: "count", or "show",
            "click" and "unseen"; and "pushed" where rows have a time to live.
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
    def waits(self) -> bool:
        """Whether an id of this table may have to wait."""
        entry = self.entry
        return (isinstance(entry, CountFilterEntry) and entry.count > 1) or (
            isinstance(entry, ShowClickEntry) and entry.threshold > 0
        )

    @property
    def facts(self) -> Array:
        """float64[slots, names]: the memory itself."""
        return self._memory.array

    @property
    def bytes_held(self) -> int:
        """Of facts and index."""
        return self.index.used * self._memory.row_bytes + self.index.bytes_held

    def admit(
        self, ids: Array, statistics: Array | None, now: float, epoch: int
    ) -> tuple[Array, Array]:
        """A push to ids without a row.

        Args:
            ids: int64[m], which differ.
            statistics: float32[m, 2] of this push, where the table has statistics.

        Returns:
            bool[m]: whether they get a row now; float64[m, 2]: the statistics that they bring from
                earlier pushes.
        """
        brought = np.zeros((len(ids), 2))
        if isinstance(self.entry, ProbabilityEntry):
            chosen = np.zeros(len(ids), np.bool_)
            _chosen(plain(ids, "admit"), self._seed, self.entry.probability, chosen)
            return chosen, brought
        if not self.waits:
            return np.ones(len(ids), np.bool_), brought
        slots = self._known(ids, now, epoch)
        held = self.facts[slots]
        if isinstance(self.entry, ShowClickEntry):
            assert statistics is not None, "a table with this entry has statistics"
            brought = held[:, :2].copy()
            held[:, :2] += statistics
            held[:, 2] = 0.0
            admitted = score(self.entry, held) >= self.entry.threshold
        else:
            assert isinstance(self.entry, CountFilterEntry)
            held[:, 0] += 1
            admitted = held[:, 0] >= self.entry.count
        if self._ttl is not None:
            held[:, -1] = now
        self.facts[slots] = held
        self.index.remove(np.ascontiguousarray(ids[admitted]))
        return admitted, brought

    def _known(self, ids: Array, now: float, epoch: int) -> Array:
        """Slots of these ids; those that are new, or had outlived their time, with nothing in
        them.
        """
        slots, missing, _ = self.index.mark(ids, epoch, 0)
        if missing:
            slots[slots < 0] = self.add(ids[slots < 0], epoch)
        if self._ttl is not None:
            self.facts[slots[now - self.facts[slots, -1] > self._ttl]] = 0.0
        return slots

    def add(self, ids: Array, epoch: int) -> Array:
        """Lets ids wait that did not: their slots, with nothing in them."""
        slots = self.index.insert(ids, epoch, 0)
        self._memory.need(self.index.used)
        self.facts[slots] = 0.0
        return slots

    def clear(self) -> None:
        """Forgets all."""
        self._memory.clear(self.index.used)
        self.index.clear()
