"""The rows of one table in a diloco lane: the trainer steps the rows that it touches by itself, and
every k steps an outer optimizer on the servers takes the mean change of all trainers.

[Note: diloco, row by row]  As in geo mode a row has two copies here, x, which the trainer steps,
and y, the servers' value: see [Note: geo, row by row] in geo_rows.py.  Here a window is the time
between two exchanges, and no row on the servers changes in it.  So y is what every trainer starts
from, and x - y is the whole change.  It leaves with the exchange, undivided.  The servers divide
the sum by the number of trainers that take part: a trainer that has not touched a row has not
changed it.

After an exchange each row begins anew from the servers' value.  It is asked for when the row is
next looked up; so rows that nobody looks up do not travel.  Where the trainer's own rule moves rows
that no step touches, these have to begin anew, too: then all rows that the trainer holds are asked
for at once.  The states of the trainer's rule stay with it, as those of dense parameters do.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from trainer.communicator.geo_rows import GeoRows, Pull, Rows
from trainer.communicator.lookups import CHUNK_ROWS
from transpiler.ir.tables import Table
from transpiler.plan.plan import Plan


class DiLoCoRows(GeoRows):
    """The rows of one table that this trainer steps between two exchanges.

    See [Note: diloco, row by row].

    Args:
        table, plan, pull, read: as of :class:`GeoRows`.
    """

    def __init__(
        self, table: Table, plan: Plan, pull: Pull, read: Callable[[], Rows | None]
    ) -> None:
        super().__init__(table, plan, pull, lambda: None, read)

    def restart(self) -> None:
        """After an exchange: every row begins anew from the servers' value."""
        super().restart()
        if self._own.moves_untouched:
            self._ask_for_all()

    def read(self) -> Rows | None:
        """See :class:`GeoRows`.  Rows that the last exchange has changed are the servers'."""
        self._ask_for_all()
        return super().read()

    def _ask_for_all(self) -> None:
        """Has all rows that this trainer holds begin anew, where they have not."""
        cursor = 0
        while cursor >= 0:
            slots, cursor = self._slots.listed(cursor, CHUNK_ROWS)
            self.pull(torch.from_numpy(self._slots.ids.array[slots]))
