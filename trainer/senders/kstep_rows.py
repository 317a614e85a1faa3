"""Rows that a k-step trainer steps by itself, in geo and DiLoCo modes.

[Note: geo, row by row]  A row that the trainer has looked up has two copies here: x, which it
trains, and y, the server's value as far as this trainer knows it.  The time between two messages is
a window.  At the end of the window delta = (x - y) / trainers is sent for every row that was
trained in it, and y moves by delta.  A lookup asks the servers for rows whose y is stale: from such
a row's z, x moves by z - y, and y becomes z (x = y = z for a row that is new here).  Only such a
lookup waits: for the servers' replies to all messages, so that z includes everything that y
includes.  Optimizer states stay with the trainer.

The answers to messages tell the rows that other trainers have changed: their y is stale.  Where
they do not, as the table's rows also change by other ways (admission, eviction, rounding), every y
is stale when a window begins: see [Note: changes by others] in pserver/table/changes.py.  A flush
asks for what others have changed until then.  As long as
all changes since the table was empty have been told, a row that nobody has changed is not asked for
at all.

Under a rule that moves rows without touching them (a velocity runs on, weights decay), x moves away
from y in windows in which the row is not trained.  That movement is sent with the row's next
window, and before the servers' values are read (:meth:`GeoRows.note_moved`).  In a table whose ids
are a range a row exists from the first step on, whenever it is first looked up: it has missed the
decay of all steps.

y lies in the slot that x has: see pserver/table/copies.py.

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

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pserver.client.channel import Hparams
from pserver.client.replies import Reply
from pserver.table.changes import tells_changes
from pserver.table.copies import ServedCopies
from pserver.table.gradient import RowGradient, total_of
from pserver.table.index import Index
from pserver.table.table import SparseTable
from pserver.transport.frames import DTYPES
from trainer.embedding.rows import Arrived
from trainer.senders.change_feed import ChangeFeed
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
MOST_OTHERS = 2**20  # ids that others have changed, and that are kept


class GeoRows:
    """The rows of one table that this trainer steps by itself; a
    :class:`trainer.embedding.rows.RowSource`.

    The script's thread alone calls it.

    Args:
        table, plan: of the job.
        pull: gives rows as the servers hold them.
        read: gives all rows that the servers hold; None if they are too many.

    Attributes:
        feed: what answers tell of changes by others; None: they tell nothing.
    """

    feed: ChangeFeed | None

    def __init__(
        self,
        table: Table,
        plan: Plan,
        pull: Pull,
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
        self._copies = ServedCopies(table.dim, np.dtype(table.computes_in).type)  # y, by slot
        tells = tells_changes(table, plan.lanes[table.lane])
        self.feed = ChangeFeed(plan.servers) if tells else None
        self._others = Index()  # ids that others have changed, and that have no y
        self._whole = tells  # nothing was dropped of them
        self._stepped = True  # since the last :meth:`note_moved`
        self._trained: list[Array] = []  # slots, step by step, each once in this window
        self._counted: list[RowGradient] = []  # statistics, step by step, of this window
        self._counts = isinstance(table.entry, ShowClickEntry)
        self._dim, self._dtype = table.dim, DTYPES[table.computes_in]
        self._pull = pull
        self._replies: deque[Future[Reply]] = deque()  # to messages, which were not taken yet

    # ---- lookups ----

    def ids_to_pull(self, ids: torch.Tensor) -> torch.Tensor:
        """The ids that the servers have to be asked for; if there are some, waits until they may
        be.
        """
        return ids[torch.from_numpy(self._to_ask(ids.numpy())[1])]

    def pull(self, ids: torch.Tensor, arrived: Arrived | None = None) -> torch.Tensor:
        """Rows of unique ids, int64 [u] on the CPU -> [u, dim], as this trainer trains them."""
        wanted = ids.numpy()
        slots, places = self._to_ask(wanted)
        if len(places):
            asked = ids[torch.from_numpy(places)]
            served = None if arrived is None else arrived.of(asked)
            served = self._pull(asked) if served is None else served
            slots[places] = self._refresh(asked.numpy(), slots[places], served)
        return self._rows(slots, wanted)

    def _to_ask(self, ids: Array) -> tuple[Array, Array]:
        """The slots of rows, and the places of those that the servers have to be asked for now.
        Rows that nobody has changed get a slot.
        """
        slots = self._own.slots_of(ids)
        places = self._begin(ids, slots, self._copies.stale(slots))
        if len(places):
            self.take_replies(wait=True)  # and other rows may be stale
            places = self._begin(ids, slots, self._copies.stale(slots))
        return slots, places

    def _begin(self, ids: Array, slots: Array, stale: Array) -> Array:
        """Begins those of the rows without a y that nobody has changed.

        Args:
            slots: of the ids; written.
            stale: the places of rows that are stale, or have no y.

        Returns:
            The places of the others.
        """
        if self.feed is None or not (self.feed.whole and self._whole) or not len(stale):
            return stale
        new = ~self._copies.known(slots[stale])
        new &= self._others.locate(ids[stale])[0] < 0
        places = stale[new]
        if len(places):
            begun = ids[places]
            slots[places] = own = self._own.begin(begun, current=not self._ranged)
            self._copies.need(self._own.slots_used)
            self._copies.put(own, self._initial(begun))
        return stale[~new]

    def _refresh(self, ids: Array, slots: Array, served: torch.Tensor) -> Array:
        """Moves the rows of these ids by the servers' changes.

        Returns:
            Their slots.
        """
        old = np.flatnonzero(self._copies.known(slots))
        mine = served.numpy().copy()
        if len(old):
            rows = self._rows(slots[old], ids[old]).numpy()
            self._copies.move(slots[old], rows, served.numpy()[old])
            mine[old] = rows
        slots = self._own.assign(ids, mine, current=not self._ranged)
        self._copies.need(self._own.slots_used)
        if len(old) < len(ids):
            self._copies.put(slots, served.numpy())
            self._others.remove(ids)
        return slots

    def _rows(self, slots: Array, ids: Array) -> torch.Tensor:
        out = torch.empty((len(ids), self._dim), dtype=self._dtype)
        self._own.read(slots, ids, out.numpy())
        return out

    def _initial(self, ids: Array) -> Array:
        return initial_of(self._table, torch.from_numpy(ids)).numpy()

    # ---- changes by others ----

    def take_replies(self, wait: bool = False) -> None:
        """Takes what the replies to messages tell: changes by others, and whether servers have
        refused changes of this trainer as outliers.

        Args:
            wait: whether to wait for the replies to all messages.

        Raises:
            PServerError: a message has failed.
        """
        refused = False
        while self._replies and (wait or self._replies[0].done()):
            reply = self._replies[0].result()
            self._replies.popleft()
            refused = refused or (reply.refused and bool(reply.outliers))
        self._take_changes()
        if refused:
            self.restart()

    def _take_changes(self) -> None:
        for ids in self.feed.take() if self.feed is not None else ():
            if ids is None:
                self._copies.mark_all_stale()
                continue
            slots = self._own.slots_of(np.ascontiguousarray(ids, np.int64))
            known = self._copies.known(slots)
            self._copies.mark_stale(slots[known])
            self._keep_others(ids[~known])

    def end_feed(self) -> None:
        """Makes every row stale, as no answer tells of changes any more."""
        self._whole = False
        self._copies.mark_all_stale()

    def _keep_others(self, ids: Array) -> None:
        """Keeps ids without a y that others have changed, while that is of use."""
        assert self.feed is not None, "an answer tells them"
        self._whole = self._whole and len(self._others) + len(ids) <= MOST_OTHERS
        if self.feed.whole and self._whole:
            new = ids[self._others.locate(ids)[0] < 0]
            self._others.insert(np.ascontiguousarray(new), 0, 0)
        elif len(self._others):
            self._others.clear()

    # ---- whole tables ----

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
        slots = self._own.assign(every.numpy(), rows.numpy())
        self._note(slots, every, torch.zeros(len(every), 2) if self._counts else None)

    @property
    def own(self) -> SparseTable:
        """The rows as this trainer trains them, with their states."""
        return self._own

    def invalidate(self) -> None:
        """Drops all rows, because the servers' were replaced: they are all looked up again."""
        self._copies.clear(self._own.slots_used)
        self._own.clear()
        self._others.clear()
        self._whole = False
        self._trained, self._counted = [], []

    def restore(self, chunks: Iterable[Mapping[str, Any]], metadata: Mapping[str, Any]) -> None:
        """Drops all rows, and takes over the states of a checkpoint's."""
        self.invalidate()
        for chunk in chunks:
            self._own.load(chunk)
        self._own.restore(metadata)
        self._copies.need(self._own.slots_used)

    # ---- steps and windows ----

    def step(self, gradient: RowGradient, hparams: Hparams) -> None:
        """Steps the rows of a gradient by the table's rules, with these hyper-parameters."""
        read = [{name: hparams[group][name] for name in names} for group, names in self._read]
        slots = self._own.update(gradient.ids.numpy(), gradient.rows.numpy(), read)
        self._stepped = True
        self._note(slots, gradient.ids, gradient.statistics)

    def _note(self, slots: Array, ids: torch.Tensor, statistics: torch.Tensor | None) -> None:
        """Notes that rows were trained in this window, and their shows and clicks."""
        self._copies.need(self._own.slots_used)
        missing = ~self._copies.known(slots)
        if missing.any():  # dropped since they were looked up
            self._copies.put(slots[missing], self._initial(ids.numpy()[missing]), fresh=False)
        self._trained.append(self._copies.train(slots))
        if statistics is not None:
            self._counted.append(RowGradient(ids, torch.empty(len(ids), 0), statistics))

    def restart(self) -> None:
        """Makes rows that are asked for from here on take the servers' values: the servers have
        refused changes as outliers.
        """
        self._copies.restart()

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
            slots, cursor = self._own.listed(cursor, CHUNK_ROWS)
            slots = self._copies.untrained(slots[self._copies.known(slots)])
            known = torch.from_numpy(self._copies.values(slots))
            rows = self._rows(slots, self._own.ids_of(slots))
            moved = slots[((rows != known) & rows.isfinite()).any(1).numpy()]
            if len(moved):
                found = True
                self._trained.append(self._copies.train(moved))
                if self._counts:  # they were not shown
                    ids = torch.from_numpy(self._own.ids_of(moved))
                    nothing = torch.empty(len(ids), 0), torch.zeros(len(ids), 2)
                    self._counted.append(RowGradient(ids, *nothing))
        return found

    def end_window(self, trainers: int = 1, reply: Future[Reply] | None = None) -> RowGradient:
        """Ends the window.

        Args:
            trainers: the divisor of the changes.
            reply: to the message that brings them; None: the script waits for it.

        Returns:
            The divided changes of the rows that were trained in it, or noted by
            :meth:`note_moved`.
        """
        slots = np.concatenate([np.empty(0, np.int64), *self._trained])
        ids = self._own.ids_of(slots)
        changes = self._rows(slots, ids)
        self._copies.end_window(slots, changes.numpy(), trainers)
        if self.feed is None:
            self._copies.mark_all_stale()
        statistics = torch.empty(0, 2) if self._counts else None
        if self._counted:
            statistics = total_of(self._counted).statistics  # in the same order
        self._trained, self._counted = [], []
        if reply is not None:
            self._replies.append(reply)
        return RowGradient(torch.from_numpy(ids), changes, statistics)


# ---- diloco rows ----
#
# The rows of one table in a diloco lane: the trainer steps the rows that it touches by itself, and
# every k steps an outer optimizer on the servers takes the mean change of all trainers.


class DiLoCoRows(GeoRows):
    """The rows of one table that this trainer steps between two exchanges.

    See [Note: diloco, row by row].
    """

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
            slots, cursor = self._own.listed(cursor, CHUNK_ROWS)
            known = slots[self._copies.known(slots)]
            self.pull(torch.from_numpy(self._own.ids_of(known)))
