"""The rows of one table in a geo lane: the trainer steps the rows that it touches by itself, and
only they travel, both ways.

[Note: geo, row by row]  A row that the trainer has looked up has two copies here: x, which it
trains, and y, the server's value as far as this trainer knows it.  The time between two messages is
a window.  The first lookup of a row in a window asks the server: from its z, x moves by z - y, and
y becomes z (x = y = z for a row that is new here).  At the end of the window delta = (x - y) /
trainers of every row that was trained in it leaves, and y moves by delta.  Only such a first lookup
waits: for the server's reply to the last message, so that z has everything in it that y has.
Optimizer states stay with the trainer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from pserver.client.channel import Hparams
from pserver.table.gradient import RowGradient, total_of
from pserver.table.index import Index
from pserver.table.sparse_table import SparseTable
from pserver.transport.codec import DTYPES
from trainer.communicator.lookups import CHUNK_ROWS
from trainer.communicator.written_tables import initial_of
from trainer.embedding.row_source import Arrived
from transpiler.ir.rules import Rule
from transpiler.ir.tables import Segment, ShowClickEntry, Table
from transpiler.plan.plan import Plan
from transpiler.plan.table_planner import rules_of

Pull = Callable[[torch.Tensor], torch.Tensor]
Array = np.ndarray
Rows = tuple[torch.Tensor, torch.Tensor]  # ids, int64 [n], and values, [n, dim]


class GeoRows:
    """The rows of one table that this trainer steps by itself; a
    :class:`trainer.embedding.row_source.RowSource`.

    The script's thread alone calls it.

    Args:
        table, plan: of the job.
        pull: gives rows as the servers hold them.
        wait_for_replies: returns when all messages that have left are answered.
        read: gives all rows that the servers hold; None: they are too many.
    """

    def __init__(
        self,
        table: Table,
        plan: Plan,
        pull: Pull,
        wait_for_replies: Callable[[], None],
        read: Callable[[], Rows | None],
    ) -> None:
        self._table, self._read_served = table, read
        rules = rules_of(table, plan.groups)
        # admission and eviction are the servers'
        here = replace(table, entry=None, ttl=None, capacity=None, memory_bytes=None)
        self._read = [
            (segment.group, rule.hparams)
            for segment, rule in zip(table.segments, rules, strict=True)
        ]
        self._own = SparseTable(here, rules)  # x, and states
        still = Rule("sgd", {"lr": 0.0, "weight_decay": 0.0})
        self._known = SparseTable(replace(here, segments=(Segment(0, table.dim, 0),)), [still])  # y
        self._here = Index()  # ids that have an x and a y
        self._fresh = Index()  # ids that were asked for in this window
        self._trained: list[RowGradient] = []  # step by step, of this window
        self._trainers = plan.trainers
        self._counts = isinstance(table.entry, ShowClickEntry)
        self._dim, self._dtype = table.dim, DTYPES[table.dtype]
        self._pull = pull
        self._wait_for_replies = wait_for_replies

    def asks(self, ids: torch.Tensor) -> torch.Tensor:
        """The ids that were not looked up in this window yet; where there are some, waits until the
        servers may be asked.
        """
        slots, missing = self._fresh.locate(ids.numpy())
        if not missing:
            return ids[:0]
        self._wait_for_replies()
        return ids[torch.from_numpy(slots < 0)]

    def pull(self, ids: torch.Tensor, arrived: Arrived | None = None) -> torch.Tensor:
        """Rows of unique ids, int64 [u] on the CPU -> [u, dim], as this trainer trains them."""
        asked = self.asks(ids)
        if len(asked):
            served = None if arrived is None else arrived.of(asked)
            self._refresh(asked.numpy(), self._pull(asked) if served is None else served)
        return self._rows(self._own, ids.numpy())

    def _refresh(self, ids: Array, served: torch.Tensor) -> None:
        slots, _ = self._here.locate(ids)
        old = np.flatnonzero(slots >= 0)
        mine = served.clone()
        if len(old):
            kept = np.ascontiguousarray(ids[old])
            moved = served[old] - self._rows(self._known, kept)
            mine[old] = self._rows(self._own, kept) + moved
            # the servers refuse what is not finite
            mine = torch.where(mine.isfinite(), mine, served)
        self._own.assign(ids, mine.numpy())
        self._known.assign(ids, served.numpy())
        new = np.ascontiguousarray(ids[slots < 0])
        self._here.insert(new, 0, 0)
        self._fresh.insert(ids, 0, 0)

    def _rows(self, table: SparseTable, ids: Array) -> torch.Tensor:
        out = torch.empty((len(ids), self._dim), dtype=self._dtype)
        table.lookup(ids, out.numpy())
        return out

    def read(self) -> Rows | None:
        """All rows, as this trainer trains them; those that it has not looked up, as the servers
        have them.  None: these are too many.
        """
        served = self._read_served()
        if served is None:
            return None
        ids, values, cursor = [served[0]], [served[1]], 0
        while cursor >= 0:
            chunk, cursor = self._own.scan(cursor, CHUNK_ROWS, materialized=True)
            ids.append(torch.from_numpy(chunk["ids"]))
            values.append(torch.from_numpy(chunk["values"]))
        found, inverse = np.unique(torch.cat(ids).numpy(), return_inverse=True)
        unique, places = torch.from_numpy(found), torch.from_numpy(inverse)
        rows = torch.empty((len(unique), self._dim), dtype=self._dtype)
        begin = len(served[0])
        rows[places[:begin]] = served[1]
        rows[places[begin:]] = torch.cat(values[1:])
        return unique, rows

    def write(self, ids: torch.Tensor, values: torch.Tensor) -> None:
        """Replaces the values of all rows, int64 [n], each once, and [n, dim]; the states that this
        trainer has stay.  What has changed leaves at the end of the window.

        Raises:
            ValueError: the servers' rows are too many.
        """
        present = self.read()
        if present is None:
            raise ValueError("expected at most 4 GiB of rows where the trainer steps them")
        others = present[0][~torch.isin(present[0], ids)]
        every = torch.cat([ids, others])
        rows = torch.cat([values, initial_of(self._table, others)])
        self.pull(every)
        self._own.assign(every.numpy(), rows.numpy())
        statistics = torch.zeros(len(every), 2) if self._counts else None
        self._trained.append(RowGradient(every, rows[:, :0], statistics))

    def invalidate(self) -> None:
        """Drops all rows, because the servers' were replaced: everything is looked up again."""
        for table in (self._own, self._known):
            table.clear()
        self._here.clear()
        self._fresh.clear()
        self._trained = []

    def step(self, gradient: RowGradient, hparams: Hparams) -> None:
        """Steps the rows of a gradient by the table's rules, with these hyper-parameters."""
        ids = gradient.ids.numpy()
        read = [{name: hparams[group][name] for name in names} for group, names in self._read]
        self._own.update(ids, gradient.rows.numpy(), read)
        self._trained.append(RowGradient(gradient.ids, gradient.rows[:, :0], gradient.statistics))

    def end_window(self) -> RowGradient:
        """Ends the window.

        Returns:
            The changes of the rows that were trained in it, divided by the number of trainers.
        """
        nothing = RowGradient(
            torch.empty(0, dtype=torch.int64),
            torch.empty(0, 0),
            torch.empty(0, 2) if self._counts else None,
        )
        trained = total_of(self._trained or [nothing])
        ids = trained.ids.numpy()
        delta = (self._rows(self._own, ids) - self._rows(self._known, ids)).div_(self._trainers)
        self._known.add(ids, delta.numpy())
        self._fresh.clear()
        self._trained = []
        return RowGradient(trained.ids, delta, trained.statistics)
