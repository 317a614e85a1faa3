"""Lookups of the rows of coming steps, made while the steps before them are taken.

The ids of a step are known when its batch is: a loader that is read ahead says them, or the script
with ``fleet.prefetch``.  A thread asks for their rows; the servers keep what they have sent, see
[Note: look-ahead] in pserver/table/kept_lookups.py::

    read batch t + 1, announce its ids     thread: unique ids, lookup of all rows
    step t leaves                          in a lane that waits for others: refresh, the rows that
                                           step t changes; in an async lane the rows stay
    forward of step t + 1                  reads them

[Note: whose ids]  Nobody says which part of a batch has the ids of which table.  So the first
lookups of a pass are watched: the parts of the batch that had a lookup's ids, in each step so far,
are the table's.  They are found by their values alone, as the inputs of a forward in
joined_lookups.py.  An announced lookup is used by a lookup of the same table with exactly the same
ids; any other asks by itself.  So a wrong guess costs a request, and nothing else.

[Note: the tail]  Where all trainers step together, the request for what a step changes leaves with
the step: the server answers it when the step is applied.  So the rows arrive with the step's
answer, and the next forward waits for no further request.  Where a server cannot tell, the forward
asks.

[Note: whose turn]  The script's thread trains, but others may read batches or evaluate, and a pass
that is dropped ends in any.  So the calls take turns.  Rows that one thread has taken of a step may
be of another moment than those that it sees: the rest of them is for that thread alone.

[Note: one request at a time]  A table's stream answers one request after the other.  A lookup ahead
that is sent before the present step's refresh would be answered before it.  So where rows are
refreshed it waits for that, and in a step without one for the next batch.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pserver.errors import PServerError
from trainer.embedding.joined_lookups import (
    AheadTable,
    IdsByTable,
    InputPart,
    JoinedLookup,
    flat,
    is_same,
    lookups_of,
    parts_with,
    tensors_of,
)
from trainer.embedding.rows import Arrived
from trainer.senders.served_rows import KeptLookup, Lookups
from transpiler.plan.plan import Plan

MISSES = 3  # in a row, after which a part is not taken for a table's ids any more

Call = tuple[AheadTable, int]  # a table, and the number of its lookup since its batch was given


@dataclass(slots=True, eq=False)
class _Arrival:
    """The rows of one announced step.

    Attributes:
        kept: as the servers keep them.
        ids: of its tables.
        lookups: by their numbers in the announcement; those that a forward would refuse are left
            out.
        changes: of rows that are in them, as :class:`LookAhead` counts them; -1: not known.
    """

    kept: KeptLookup
    ids: IdsByTable[int]
    lookups: Mapping[int, JoinedLookup]
    changes: int = -1


@dataclass(slots=True, eq=False)
class _Announced:
    """The lookups of one coming step.

    Attributes:
        ids: of those that were not claimed yet: a table, and int64 [n].
        arrival: the rows, once they were asked for.
        thread: of the forward that has some of the rows; None: none has.
        source: of the batch.
    """

    ids: dict[int, tuple[AheadTable, Tensor]]
    source: object = None
    arrival: Future[_Arrival] | None = None
    thread: int | None = None

    @property
    def claimed(self) -> bool:
        """Whether a forward has some of the rows."""
        return self.thread is not None

    def find(self, table: AheadTable, given: Tensor) -> int | None:
        """The number of a lookup of a table with these ids, int64 [n], for the calling thread."""
        if self.thread not in (None, threading.get_ident()):
            return None
        for number, (its, ids) in self.ids.items():
            if its is table and is_same(ids, given):
                return number
        return None


@dataclass(slots=True)
class _Parts:
    """The parts of a batch that had the ids of one lookup.

    Attributes:
        fitting: in each batch so far.
        misses: the last batches in which none had.
        searches: of all parts.
    """

    fitting: list[InputPart] = field(default_factory=list)
    misses: int = 0
    searches: int = 0

    def learn(self, batch: list[Tensor], ids: Tensor) -> None:
        """Compares the parts with the ids, int64 [n], of the lookup of this batch."""
        fitting = [part for part in self.fitting if is_same(part.of(batch), ids)]
        self.misses = 0 if fitting else self.misses + 1
        if not fitting:
            self.searches += 1
            if self.searches & (self.searches - 1) == 0:  # the 1st, 2nd, 4th, ... time
                fitting = list(parts_with(batch, ids))
        if fitting or self.misses > MISSES:
            self.fitting = fitting


class _Worker:
    """A thread that makes lookups, one after the other."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, make: Callable[[], _Arrival]) -> Future[_Arrival]:
        """Queues a lookup."""
        future: Future[_Arrival] = Future()

        def run() -> None:
            try:
                future.set_result(make())
            except BaseException as error:
                future.set_exception(error)

        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="look-ahead", daemon=True)
            self._thread.start()
        self._asked.put(run)
        return future

    def _run(self) -> None:
        while (run := self._asked.get()) is not None:
            run()
            del run  # while nothing is asked for, no rows are held

    def close(self) -> None:
        """Ends the thread behind what was queued."""
        if self._thread is not None:
            self._asked.put(None)


class LookAhead:
    """The announced lookups of one trainer.  Any thread may call it.  See [Note: whose turn].

    Args:
        lookups: of the job's tables.
        plan: of the job.

    Attributes:
        depth: batches that are looked up ahead; 0: none.
    """

    def __init__(self, lookups: Lookups, plan: Plan) -> None:
        ahead = [table for table in plan.tables if plan.lanes[table.lane].look_ahead]
        refreshed = [table for table in ahead if plan.lanes[table.lane].refreshes_rows]
        lanes = {table.lane for table in refreshed}
        self.depth = max((plan.lanes[table.lane].look_ahead for table in ahead), default=0)
        self._lookups = lookups
        self._ahead = {table.name for table in ahead}
        self._refreshed = {table.name for table in refreshed}
        # the lanes of these, where in each of them all trainers step together
        self._together = lanes if all(plan.lanes[n].kind.waits_for_all for n in lanes) else set()
        self._announced: deque[_Announced] = deque()
        self._changes = 0  # of rows, by steps of this trainer or otherwise
        self._batch: list[Tensor] = []  # the tensors of the batch that the script has
        self._counts: dict[AheadTable, int] = {}  # lookups since it has it
        self._parts: dict[Call, _Parts] = {}
        self._worker = _Worker()
        self._closed = False
        self._turn = threading.RLock()  # guards the above; the worker does not take it

    # ---- announcements ----

    def announce_batch(self, batch: Any, source: object) -> None:
        """Announces the lookups of a batch that the script will get, as far as the parts with their
        ids are known.

        Args:
            source: of the batch.
        """
        tensors = tensors_of(batch)
        with self._turn:
            parts = {call: parts.fitting[0] for call, parts in self._parts.items() if parts.fitting}
        found = {call: part.of(tensors) for call, part in parts.items()}
        self.announce(((call[0], ids) for call, ids in found.items() if ids is not None), source)

    def announce(self, lookups: Iterable[tuple[AheadTable, Tensor]], source: object = None) -> None:
        """Announces the lookups of a coming step.

        Args:
            lookups: tables, and their ids: int64 of any shape, on the CPU, which are copied.
            source: of the batch; None: the script itself announces it.
        """
        ids = [(t, ids.reshape(-1).clone()) for t, ids in lookups if str(t.known_as) in self._ahead]
        if not ids or self._closed:
            return
        with self._turn:
            waits = self._refreshed and not all(each.claimed for each in self._announced)
            self._announced.append(_Announced(dict(enumerate(ids)), source))
            while len(self._announced) > self.depth + 1:  # the step of the first had other ids
                self._announced.popleft()
            if not waits:
                self._ask_for_all()

    def give(self, batch: Any) -> None:
        """Notes that the script gets a batch."""
        with self._turn:
            self._batch = tensors_of(batch)
            self._counts.clear()
            self._ask_for_all()

    def withdraw(self, source: object = None) -> None:
        """Forgets what was announced: no step will have it, or rows were replaced.

        Args:
            source: whose batches; None: all.
        """
        with self._turn:
            kept = [each for each in self._announced if source not in (None, each.source)]
            self._announced, self._batch = deque(kept), []

    def changed(self) -> None:
        """Notes that rows change otherwise than by steps: tables shrink."""
        with self._turn:
            self._changes += 1

    def closed(self, steps: Mapping[int, int]) -> None:
        """Notes that a step has left, and asks for what it changes of the rows of the steps behind
        it.  The answer comes with that of the step.  See [Note: the tail].

        Args:
            steps: by lane, the step that has left.
        """
        lanes = {lane: steps[lane] for lane in self._together if lane in steps}
        with self._turn:
            self._changes += 1
            if len(lanes) < len(self._together) or not lanes:
                return
            first = True
            for each in self._announced:
                if each.arrival is not None and not each.claimed:
                    make = partial(self._refresh_after, each.arrival, lanes, self._changes, first)
                    each.arrival, first = self._worker.submit(make), False

    def close(self) -> None:
        """Ends the thread; nothing is looked up ahead any more."""
        self.withdraw()
        self._closed = True
        self._worker.close()

    # ---- lookups ----

    def claim(self, table: AheadTable, given: Tensor) -> JoinedLookup | None:
        """The lookup that a table makes now, with its rows, where it was announced.

        Args:
            given: int64 of any shape, the ids that its forward got.

        Returns:
            None: it was not announced, or could not be made.

        Raises:
            PServerError: a server is lost.
        """
        if str(table.known_as) not in self._ahead:
            return None
        ids = flat(given)
        with self._turn:
            call = table, self._counts.get(table, 0)
            learns = torch.is_grad_enabled()  # an evaluation has other batches than the one given
            self._counts[table] = call[1] + learns
            for place, announced in enumerate(self._announced):
                number = announced.find(table, ids)
                if number is not None:
                    for _ in range(place):  # their steps had other ids
                        self._announced.popleft()
                    return self._claimed(announced, number)
            if learns and self._batch and len(ids):
                self._parts.setdefault(call, _Parts()).learn(self._batch, ids)
        return None

    def _claimed(self, announced: _Announced, number: int) -> JoinedLookup | None:
        arrival = self._arrival(announced)
        if arrival is None:
            self._drop(announced)
            return None  # a lookup of its own says what is wrong
        try:
            self._bring_up(announced, arrival)
        except BaseException:  # of Ctrl-C, too: servers may have sent rows that were not taken in
            self._drop(announced)
            raise
        del announced.ids[number]
        if not announced.ids:
            self._drop(announced)
        self._ask_for_all()
        lookup = arrival.lookups.get(number)
        if lookup is not None:
            lookup.arrived = Arrived(lookup.ids, arrival.ids.rows_of(number, arrival.kept.rows))
        return lookup

    def _drop(self, announced: _Announced) -> None:
        self._announced = deque(each for each in self._announced if each is not announced)

    def _arrival(self, announced: _Announced) -> _Arrival | None:
        """The rows of a step, which are waited for; None: there are none."""
        self._ask_for(announced)
        assert announced.arrival is not None, "it was asked for"
        try:
            return announced.arrival.result()
        except (PServerError, CancelledError):
            return None

    def _bring_up(self, announced: _Announced, arrival: _Arrival) -> None:
        """Brings the rows of a step to what they are now, unless the step before has done so."""
        kept = arrival.kept
        names = [name for name in kept.rows if name in self._refreshed]
        if names and arrival.changes != self._changes:
            if announced.claimed:  # a forward has the rows of before
                kept.rows = {name: rows.clone() for name, rows in kept.rows.items()}
            self._lookups.refresh(kept, names, awaited=True)
        arrival.changes, announced.thread = self._changes, threading.get_ident()

    # ---- the thread ----

    def _ask_for_all(self) -> None:
        for each in self._announced:
            self._ask_for(each)

    def _ask_for(self, announced: _Announced) -> None:
        """Asks for the rows of a step, once."""
        if announced.arrival is None:
            announced.arrival = self._worker.submit(partial(self._look_up, dict(announced.ids)))

    def _look_up(self, announced: Mapping[int, tuple[AheadTable, Tensor]]) -> _Arrival:
        """Looks up what was announced."""
        lookups = lookups_of(announced)
        ids = IdsByTable.of(
            {number: (announced[number][0], each.ids) for number, each in lookups.items()}
        )
        return _Arrival(self._lookups.look_up_ahead(ids.ids), ids, lookups)

    def _refresh_after(
        self, arrival: Future[_Arrival], steps: Mapping[int, int], changes: int, awaited: bool
    ) -> _Arrival:
        """Brings the rows of a step to what they are when steps before it are applied."""
        found = arrival.result()
        names = [name for name in found.kept.rows if name in self._refreshed]
        if names and self._lookups.refresh(found.kept, names, awaited, steps):
            found.changes = changes
        return found
