"""Rows of tables on servers as a script reads and writes them whole: ``state_dict`` and
``load_state_dict`` of an embedding.

[Note: what a script writes into tables]  What is loaded replaces the values of all rows: a row that
is not in it has its id's initial value afterwards.  States of optimizers stay.  Where the steps of
a lane wait for nobody, or there is one trainer, the servers have the rows at once.  In a sync lane
of several trainers each loads in its own time::

    load_state_dict    the trainer keeps the rows, and its own lookups read them there
    the next step      trainer 0 sends the rows before it closes the step; every trainer closes it
                       with the checksum of its own; the servers compare
    after that         everybody reads the servers' rows

A load whose connection broke is repeated: it assigns, so that twice is as good as once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from pserver.errors import PServerError
from pserver.table.rows import initial_values
from pserver.transport.arrays import checksum
from pserver.transport.frames import DTYPES
from trainer.communicator.lookups import CHUNK_ROWS, Lookups, ServedRows
from trainer.communicator.roll import Roll
from trainer.embedding.rows import Arrived
from transpiler.ir.tables import Table
from transpiler.plan.plan import Plan

MAX_BYTES = 1 << 32  # of a table in a state_dict, as in an export

Rows = tuple[torch.Tensor, torch.Tensor]  # ids, int64 [n], ascending, and values, [n, dim]


class WrittenTables:
    """Reads and writes whole tables on servers.  See [Note: what a script writes into tables].

    The script's thread calls it.

    Args:
        plan: of the job.
        lookups: of its tables.
        roll: which trainers are there.
        drain: waits until all that was sent has been applied.
        count: the rows of a table now, on all servers.
    """

    def __init__(
        self,
        plan: Plan,
        lookups: Lookups,
        roll: Roll,
        drain: Callable[[], None],
        count: Callable[[str], int],
    ) -> None:
        self._plan, self._lookups, self._roll = plan, lookups, roll
        self._drain, self._count = drain, count
        self._waiting: dict[str, Rows] = {}  # written since the last step, in sync lanes
        self._sent: set[str] = set()  # those of them that the servers have

    def rows_of(self, name: str) -> WritableRows:
        """The source that the embeddings of a table pull from."""
        return WritableRows(self, self._lookups, name)

    # ---- the script ----

    def read(self, name: str) -> Rows | None:
        """All rows of a table that differ from their initial values or once did, with every step of
        this trainer; None: they have more than ``MAX_BYTES``.

        Raises:
            PServerError: a server is lost.
        """
        if name in self._waiting:
            return self._waiting[name]
        self._drain()
        return None if self.bytes_of(name) > MAX_BYTES else self._scanned(name)

    def bytes_of(self, name: str) -> int:
        """Bytes of a table's ids and values on all servers."""
        table = self._lookups.tables[name]
        return self._count(name) * (8 + table.dim * DTYPES[table.computes_in].itemsize)

    def write(self, name: str, ids: torch.Tensor, values: torch.Tensor) -> None:
        """Replaces the values of all rows of a table: int64 [n], each once, and [n, dim]; not kept.

        Raises:
            PServerError: a server is lost.
        """
        ordered, order = ids.sort()
        rows = ordered, values[order]
        lane = self._plan.lanes[self._lookups.tables[name].lane]
        if lane.kind.waits_for_all and self._plan.trainers > 1:
            self._waiting[name] = rows
            self._sent.discard(name)
        else:
            self._drain()
            self._assign(name, rows)

    def waits(self, name: str) -> bool:
        """Whether a table was written since the last step, so that its rows are read here."""
        return name in self._waiting

    def waiting(self, name: str, ids: torch.Tensor) -> torch.Tensor | None:
        """The rows of these ids, [n, dim], in what was written since the last step; None: nothing
        was.
        """
        if name not in self._waiting:
            return None
        known, values = self._waiting[name]
        rows = initial_of(self._lookups.tables[name], ids)
        if len(known):
            places = torch.searchsorted(known, ids).clamp_(max=len(known) - 1)
            here = known[places] == ids
            rows[here] = values[places[here]]
        return rows

    # ---- steps ----

    def send(self, lane: int) -> None:
        """Trainer 0, or who stands in for it: the servers have what was written into a lane's
        tables.
        """
        for name in self._of(lane) if self._roll.is_first else ():
            if name not in self._sent:
                self._assign(name, self._waiting[name])
                self._sent.add(name)

    def close(self, lane: int) -> dict[str, int]:
        """Before a lane's step is closed: sends what was written since the last, and gives its
        checksums, by table.
        """
        self.send(lane)
        return {name: _checksum(self._waiting[name]) for name in self._of(lane)}

    def forget(self, lane: int) -> None:
        """After a lane's step, or where the servers' rows have been replaced otherwise."""
        for name in self._of(lane):
            del self._waiting[name]
            self._sent.discard(name)

    def _of(self, lane: int) -> list[str]:
        return [name for name in self._waiting if self._lookups.tables[name].lane == lane]

    # ---- servers ----

    def _scanned(self, name: str) -> Rows:
        table = self._lookups.tables[name]
        ids, values = [np.empty(0, np.int64)], [np.empty((0, table.dim), table.computes_in)]
        for chunk, _ in self._lookups.scan(name, materialized=True):
            ids.append(chunk["ids"])
            values.append(chunk["values"])
        ordered, order = torch.from_numpy(np.concatenate(ids)).sort()
        return ordered, torch.from_numpy(np.concatenate(values))[order]

    def _assign(self, name: str, rows: Rows) -> None:
        ids, values = rows
        known = [torch.from_numpy(chunk["ids"]) for chunk, _ in self._lookups.scan(name)]
        others = torch.cat([part[~torch.isin(part, ids)] for part in known])
        for begin in range(0, len(others), CHUNK_ROWS):
            part = others[begin : begin + CHUNK_ROWS]
            initial = initial_of(self._lookups.tables[name], part)
            self._lookups.load(name, {"ids": part.numpy(), "values": initial.numpy()})
        for begin in range(0, len(ids), CHUNK_ROWS):
            end = begin + CHUNK_ROWS
            chunk = {"ids": ids[begin:end].numpy(), "values": values[begin:end].numpy()}
            self._lookups.load(name, chunk)


class WritableRows(ServedRows):
    """The rows of one table on servers, which a script may read and write whole; a
    :class:`trainer.embedding.state_dict.WholeRows`.

    Args:
        written: of the job.
        lookups: likewise.
        name: of the table.
    """

    def __init__(self, written: WrittenTables, lookups: Lookups, name: str) -> None:
        super().__init__(lookups, name)
        self._written = written

    def asks(self, ids: torch.Tensor) -> torch.Tensor:
        """See :class:`ServedRows`."""
        return ids[:0] if self._written.waits(self._name) else ids

    def pull(self, ids: torch.Tensor, arrived: Arrived | None = None) -> torch.Tensor:
        """See :class:`ServedRows`."""
        waiting = self._written.waiting(self._name, ids.cpu())
        return super().pull(ids, arrived) if waiting is None else waiting.to(ids.device)

    def read(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See :meth:`WrittenTables.read`."""
        try:
            return self._written.read(self._name)
        except PServerError as error:
            error.add_note(f"reading the rows of table {self._name!r} for a state_dict")
            raise

    def write(self, ids: torch.Tensor, values: torch.Tensor) -> None:
        """See :meth:`WrittenTables.write`."""
        try:
            self._written.write(self._name, ids, values)
        except PServerError as error:
            error.add_note(f"loading {len(ids)} rows into table {self._name!r}")
            raise


def initial_of(table: Table, ids: torch.Tensor) -> torch.Tensor:
    """The initial values of the rows of ids, int64 [n] -> [n, dim]."""
    rows = torch.empty((len(ids), table.dim), dtype=DTYPES[table.computes_in])
    initial_values(table, ids.contiguous().numpy(), rows.numpy())
    return rows


def _checksum(rows: Rows) -> int:
    parts = np.array([checksum(part.contiguous()) for part in rows], np.uint64)
    return checksum(torch.from_numpy(parts.view(np.int64)))
