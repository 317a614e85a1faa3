"""What of a lane one call updates, and how large that is."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from pserver.dense.slice_update import SliceUpdate, batches
from pserver.job.update_task import Batch

# a lane whose slices have fewer bytes is updated in one thread: see [Note: answers begin early] in
# lane_executor.py
LARGE_BYTES = 2**20


class UpdateBatches:
    """The batches of every update of one lane.

    Args:
        updates: how its slices are updated, by slice name.
        tables: the names of its tables.
        together: slices with the same rule are updated by one call; otherwise each by itself.
        threads: that may update at once; one updates all tables one after the other.

    Attributes:
        sizes: bytes of each.  A table counts as 0: how many rows a step touches is not known
            before.
    """

    def __init__(
        self,
        updates: Mapping[str, SliceUpdate],
        tables: Collection[str],
        together: bool,
        threads: int,
    ) -> None:
        self._updates = updates
        self._batches: list[Batch] = batches(updates) if together else [(n,) for n in updates]
        if threads > 1:
            self._batches += [(name,) for name in tables]
        elif tables:
            self._batches.append(tuple(tables))
        self.sizes = [
            sum(updates[name].value.nbytes for name in batch if name in updates)
            for batch in self._batches
        ]

    @property
    def large(self) -> bool:
        """Whether several threads are worth their while."""
        return sum(self.sizes) >= LARGE_BYTES

    def with_held(self, assigned: Iterable[str]) -> list[Batch]:
        """The batches of a step that assigns these slices: those that nobody updates are one."""
        held = tuple(name for name in assigned if name not in self._updates)
        return [*self._batches, held] if held or not self._batches else self._batches
