"""Rows that a k-step trainer steps by itself, in geo and DiLoCo modes.

[Note: geo, row by row]  A row that the trainer has looked up has two copies here: x, which it
trains, and y, the server's value as far as this trainer knows it.  The time between two messages is
a window.  The first lookup of a row in a window asks the server: from its z, x moves by z - y, and
y becomes z (x = y = z for a row that is new here).  At the end of the window delta = (x - y) /
trainers is sent for every row that was trained in it, and y moves by delta.  Only such a first
lookup waits: for the server's reply to the last message, so that z includes everything that y
includes.  Optimizer states stay with the trainer.

Under a rule that moves rows without touching them (a velocity runs on, weights decay), x moves away
from y in windows in which the row is not trained.  That movement is sent with the row's next
window, and before the servers' values are read (:meth:`GeoRows.note_moved`).  In a table whose ids
are a range a row exists from the first step on, whenever it is first looked up: it has missed the
decay of all steps.

A row has a slot from its first lookup on.  A slot holds y, and the numbers of the windows in which
the row was last asked for and last trained, so that a window ends by counting up.

[Note: diloco, row by row]  As in geo mode a row has two copies here, x, which the trainer steps,
and y, the servers' value: see [Note: geo, row by row] above.  Here a window is the time
between two exchanges, and no row on the servers changes in it.  So every trainer starts from y, and
x - y is the whole change.  It is sent with the exchange, undivided.  The servers divide the sum by
the number of trainers in the exchange: a trainer that has not touched a row has not changed it.

After an exchange each row begins anew from the servers' value.  It is asked for when the row is
next looked up; so rows that are not looked up do not travel.  Where the trainer's own rule moves
rows that no step touches, these have to begin anew, too: then all rows that the trainer holds are
asked for at once.  The states of the trainer's rule stay with it, as those of dense parameters do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from pserver.client.channel import Hparams
from pserver.table.gradient import RowGradient, total_of
from pserver.table.index import GrowingArray, Index
from pserver.table.table import SparseTable
from pserver.transport.frames import DTYPES
from trainer.embedding.rows import Arrived
from trainer.senders.served_rows import CHUNK_ROWS, initial_of
from transpiler.ir.tables import ShowClickEntry, Table
from transpiler.plan.plan import Plan
from transpiler.plan.planner import rules_of

# ---- geo rows ----
#
# The rows of one table in a geo lane: the trainer steps the rows that it touches by itself, and
# only these rows travel, both ways.


Pull = Callable[[torch.Tensor], torch.Tensor]
Array = np.ndarray
Rows = tuple[torch.Tensor, torch.Tensor]  # ids, int64 [n], and values, [n, dim]


class GeoRows:
    """The rows of one table that this trainer steps by itself; a
    :class:`trainer.embedding.rows.RowSource`.

    The script's thread alone calls it.

    Args:
        table, plan: of the job.
        pull: gives rows as the servers hold them.
        wait_for_replies: waits until all sent messages are answered.
        read: gives all rows that the servers hold; None if they are too many.
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
        here = replace(
            table,
            dtype=table.computes_in,  # what a step changes is summed up whole
            entry=None,
            ttl=None,
            capacity=None,
            eviction="lru",  # which a table without a capacity has
            memory_bytes=None,
        )
        self._read = [
            (segment.group, rule.hparams)
            for segment, rule in zip(table.segments, rules, strict=True)
        ]
        self._own = SparseTable(here, rules)  # x, and states
        kept = (table.entry, table.ttl, table.capacity)
        self._ranged = table.rows is not None and kept == (None, None, None)
        self._slots = Index()  # of the rows that have an x and a y
        self._known = GrowingArray(table.dim, np.dtype(table.computes_in).type)  # y, by slot
        self._asked_in = GrowingArray(0, np.int64)  # windows, by slot
        self._trained_in = GrowingArray(0, np.int64)
        self._window = 1
        self._stepped = True  # since the last :meth:`note_moved`
        self._restarted = 0  # rows last asked for up to this window are the servers' again
        self._trained: list[Array] = []  # slots, step by step, each once in this window
        self._counted: list[RowGradient] = []  # statistics, step by step, of this window
        self._counts = isinstance(table.entry, ShowClickEntry)
        self._dim, self._dtype = table.dim, DTYPES[table.computes_in]
        self._pull = pull
        self._wait_for_replies = wait_for_replies

    def ids_to_pull(self, ids: torch.Tensor) -> torch.Tensor:
        """The ids that were not looked up in this window yet; if there are some, waits until the
        servers may be asked.
        """
        fresh = self._fresh(self._slots.locate(ids.numpy())[0])
        if fresh.all():
            return ids[:0]
        self._wait_for_replies()
        return ids[torch.from_numpy(~fresh)]

    def pull(self, ids: torch.Tensor, arrived: Arrived | None = None) -> torch.Tensor:
        """Rows of unique ids, int64 [u] on the CPU -> [u, dim], as this trainer trains them."""
        wanted = ids.numpy()
        slots, _ = self._slots.locate(wanted)
        fresh = self._fresh(slots)
        if fresh.all():
            return self._rows(wanted)
        self._wait_for_replies()
        asked = ids[torch.from_numpy(~fresh)]
        served = None if arrived is None else arrived.of(asked)
        served = self._pull(asked) if served is None else served
        rows = torch.empty((len(ids), self._dim), dtype=self._dtype)
        rows[torch.from_numpy(~fresh)] = self._refresh(asked.numpy(), slots[~fresh], served)
        if fresh.any():
            rows[torch.from_numpy(fresh)] = self._rows(wanted[fresh])
        return rows

    def _fresh(self, slots: Array) -> Array:
        """Which of these slots (-1: none) were asked for in this window: bool[n]."""
        fresh: Array = (slots >= 0) & (self._asked_in.array[slots] == self._window)
        return fresh

    def _refresh(self, ids: Array, slots: Array, served: torch.Tensor) -> torch.Tensor:
        """Moves the rows of these ids by the servers' changes, and returns them."""
        old = np.flatnonzero(slots >= 0)
        mine = served
        if len(old):
            moved = served[old] - torch.from_numpy(self._known.array[slots[old]])
            mine = served.clone()
            mine[old] = self._rows(ids[old]) + moved
            # the servers refuse what is not finite
            mine = torch.where(mine.isfinite(), mine, served)
            again = old[self._asked_in.array[slots[old]] <= self._restarted]
            mine[again] = served[again]
        self._own.assign(ids, mine.numpy(), current=not self._ranged)
        slots = self._with_slots(ids, slots)
        self._known.array[slots] = served.numpy()
        self._asked_in.array[slots] = self._window
        return self._rows(ids) if self._ranged and self._own.moves_untouched else mine

    def _with_slots(self, ids: Array, slots: Array) -> Array:
        """The slots of these ids.  Ids without a slot (-1) get one, with the initial value as their
        y.
        """
        missing = slots < 0
        if missing.any():
            new = ids[missing]
            slots[missing] = fresh = self._slots.insert(new, 0, 0)
            for memory in (self._known, self._asked_in, self._trained_in):
                memory.need(self._slots.used)
            self._known.array[fresh] = initial_of(self._table, torch.from_numpy(new)).numpy()
        return slots

    def _rows(self, ids: Array) -> torch.Tensor:
        out = torch.empty((len(ids), self._dim), dtype=self._dtype)
        self._own.lookup(ids, out.numpy())
        return out

    def read(self) -> Rows | None:
        """All rows: its own values of rows that this trainer has looked up, the servers' values of
        the others; None if the servers' rows are too many.
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
        """Replaces the values of all rows: ids, int64 [n], each once, and values, [n, dim].  This
        trainer's states stay.  Changes are sent at the end of the window.

        Raises:
            ValueError: the servers have too many rows.
        """
        present = self.read()
        if present is None:
            raise ValueError("expected at most 4 GiB of rows where the trainer steps them")
        others = present[0][~torch.isin(present[0], ids)]
        every = torch.cat([ids, others])
        rows = torch.cat([values, initial_of(self._table, others)])
        self.pull(every)
        self._own.assign(every.numpy(), rows.numpy())
        self._note(every, torch.zeros(len(every), 2) if self._counts else None)

    @property
    def own(self) -> SparseTable:
        """The rows as this trainer trains them, with their states."""
        return self._own

    def invalidate(self) -> None:
        """Drops all rows, because the servers' were replaced: they are all looked up again."""
        self._own.clear()
        for memory in (self._known, self._asked_in, self._trained_in):
            memory.clear(self._slots.used)
        self._slots.clear()
        self._trained, self._counted = [], []

    def step(self, gradient: RowGradient, hparams: Hparams) -> None:
        """Steps the rows of a gradient by the table's rules, with these hyper-parameters."""
        read = [{name: hparams[group][name] for name in names} for group, names in self._read]
        self._own.update(gradient.ids.numpy(), gradient.rows.numpy(), read)
        self._stepped = True
        self._note(gradient.ids, gradient.statistics)

    def _note(self, ids: torch.Tensor, statistics: torch.Tensor | None) -> None:
        """Notes that rows were trained in this window, and their shows and clicks."""
        slots, _ = self._slots.locate(ids.numpy())
        slots = self._with_slots(ids.numpy(), slots)
        first = slots[self._trained_in.array[slots] != self._window]
        self._trained_in.array[first] = self._window
        self._trained.append(first)
        if statistics is not None:
            self._counted.append(RowGradient(ids, torch.empty(len(ids), 0), statistics))

    def restart(self) -> None:
        """Makes rows that are asked for from here on take the servers' values: the servers have
        refused changes as outliers.
        """
        self._restarted = self._window - 1

    def note_moved(self) -> bool:
        """Notes the rows that have moved without being trained in this window: they are sent with
        it.  Without a step since the last call no row has: the rest of a change that was divided by
        the number of trainers is no movement.

        Returns:
            Whether there are such rows.
        """
        found, cursor = False, 0 if self._own.moves_untouched and self._stepped else -1
        self._stepped = False
        while cursor >= 0:
            slots, cursor = self._slots.listed(cursor, CHUNK_ROWS)
            slots = slots[self._trained_in.array[slots] != self._window]
            known = torch.from_numpy(self._known.array[slots])
            rows = self._rows(self._slots.ids.array[slots])
            moved = slots[((rows != known) & rows.isfinite()).any(1).numpy()]
            if len(moved):
                found = True
                self._trained_in.array[moved] = self._window
                self._trained.append(moved)
                if self._counts:  # they were not shown
                    ids = torch.from_numpy(self._slots.ids.array[moved])
                    nothing = torch.empty(len(ids), 0), torch.zeros(len(ids), 2)
                    self._counted.append(RowGradient(ids, *nothing))
        return found

    def end_window(self, trainers: int = 1) -> RowGradient:
        """Ends the window.

        Args:
            trainers: the divisor of the changes.

        Returns:
            The divided changes of the rows that were trained in it, or noted by
            :meth:`note_moved`.
        """
        slots = np.concatenate([np.empty(0, np.int64), *self._trained])
        ids = self._slots.ids.array[slots]
        known = self._known.array[slots]
        delta = (self._rows(ids) - torch.from_numpy(known)).div_(trainers)
        self._known.array[slots] = known + delta.numpy()
        statistics = torch.empty(0, 2) if self._counts else None
        if self._counted:
            statistics = total_of(self._counted).statistics  # in the same order
        self._window += 1
        self._trained, self._counted = [], []
        return RowGradient(torch.from_numpy(ids), delta, statistics)


# ---- diloco rows ----
#
# The rows of one table in a diloco lane: the trainer steps the rows that it touches by itself, and
# every k steps an outer optimizer on the servers takes the mean change of all trainers.


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
        """Makes every row begin anew from the servers' value, after an exchange."""
        super().restart()
        if self._own.moves_untouched:
            self._ask_for_all()

    def read(self) -> Rows | None:
        """See :class:`GeoRows`.  Rows that the last exchange changed have the servers' values."""
        self._ask_for_all()
        return super().read()

    def _ask_for_all(self) -> None:
        """Makes all rows that this trainer holds begin anew, if they have not yet."""
        cursor = 0
        while cursor >= 0:
            slots, cursor = self._slots.listed(cursor, CHUNK_ROWS)
            self.pull(torch.from_numpy(self._slots.ids.array[slots]))
