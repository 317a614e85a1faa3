"""A sparse table: rows by id, with their optimizer state, on one server or in one trainer.

The first push that is admitted makes a row.  Until then an id takes no memory and reads its initial
value.

[Note: rows as they were read]  Delay compensation needs each row as its gradient's trainer had it.
A copy of the table for each trainer would be too large, and is not needed: a gradient comes soon
after the lookup that it was computed at, or never.  So a trainer's reads are kept in two
generations.  A lookup writes to the young one.  When ``kept`` messages of the trainer have arrived,
the young generation becomes the old one, and the old one is forgotten.  A row is so kept for
``kept`` further messages at least, and for twice as many at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pserver.table import ids as id_arithmetic
from pserver.table.ids import all_differ, checked, outside, plain, unique_of
from pserver.table.index import GrowingArray, Index, Layout, order_of
from pserver.table.kernels import Array
from pserver.table.lifecycle import RowLifecycle, words_of
from pserver.table.rows import HalfRows, Rows
from pserver.table.snapshots import TableChunks, TableCut
from pserver.table.updater import RowUpdater, SegmentRules
from transpiler.ir.rules import Hparam, Rule
from transpiler.ir.tables import HALVES, Table

# ---- rows read ----
#
# The rows that each trainer has last looked up, where delays are compensated.


class _Generation:
    """Rows by id."""

    def __init__(self, dim: int, dtype: type[np.generic]) -> None:
        self.index = Index()
        self.rows = GrowingArray(dim, dtype)

    def put(self, ids: Array, rows: Array) -> None:
        slots, missing = self.index.locate(ids)
        if missing:
            fresh = slots < 0
            slots[fresh] = self.index.insert(ids[fresh], 0, 0)
            self.rows.need(self.index.used)
        self.rows.array[slots] = rows

    def fill_in(self, ids: Array, out: Array) -> Array:
        slots, _ = self.index.locate(ids)
        here: Array = slots >= 0
        out[here] = self.rows.array[slots[here]]
        return here

    def clear(self) -> None:
        self.rows.clear(self.index.used)
        self.index.clear()


class RowsRead:
    """The rows of one table that trainers have read.  See [Note: rows as they were read].

    One caller at a time.

    Args:
        dim, dtype: of a row.
        kept: messages of a trainer for which a row is kept at least, 1 or more.
    """

    def __init__(self, dim: int, dtype: type[np.generic], kept: int) -> None:
        self._dim, self._dtype, self._kept = dim, dtype, kept
        # by trainer: the young generation and the old one
        self._read: dict[int, tuple[_Generation, _Generation]] = {}
        self._messages: dict[int, int] = {}  # since the young generation began

    def note(self, trainer: int, ids: Array, rows: Array) -> None:
        """Notes that a trainer has looked these rows up.

        Args:
            ids: int64[n]; they may repeat.
            rows: [n, dim].
        """
        if trainer not in self._read:
            young, old = (_Generation(self._dim, self._dtype) for _ in range(2))
            self._read[trainer] = young, old
            self._messages[trainer] = 0
        found, inverse = id_arithmetic.unique(ids)
        if len(found) < len(ids):
            first = np.empty(len(found), np.int64)
            first[inverse] = np.arange(len(ids))  # rows of one id are equal
            ids, rows = found, rows[first]
        self._read[trainer][0].put(ids, rows)

    def take_message(self, trainer: int, ids: Array) -> tuple[Array, Array]:
        """Rows as a trainer had them when it computed a gradient that has arrived.

        Args:
            ids: int64[u], of the gradient.

        Returns:
            [u, dim], and bool[u]: whether each is known.
        """
        then, known = np.zeros((len(ids), self._dim), self._dtype), np.zeros(len(ids), np.bool_)
        if trainer in self._read:
            young, old = self._read[trainer]
            known |= old.fill_in(ids, then)
            known |= young.fill_in(ids, then)
            self._messages[trainer] += 1
            if self._messages[trainer] >= self._kept:
                old.clear()
                self._read[trainer], self._messages[trainer] = (old, young), 0
        return then, known

    def clear(self) -> None:
        """Forgets everything, because rows have been loaded."""
        self._read.clear()
        self._messages.clear()

    @property
    def bytes_held(self) -> int:
        """Memory of the rows and of their indices."""
        return sum(
            each.index.bytes_held + each.index.used * each.rows.row_bytes
            for generations in list(self._read.values())  # others may read meanwhile
            for each in generations
        )


# ---- sparse table ----


INDEX_BYTES = 40  # of a row in the index: an entry, where 3/5 of the entries are used, and its id


class SparseTable:
    """One server's part of a table.

    One caller changes a table at a time.  Lookups may run beside each other, but not beside a
    change.

    Args:
        table: the table's description in the plan.
        rules: one for each of its segments; their hparams are those of steps until :meth:`update`
            gives others.
        server: this server's index.
        servers: the number of servers that share the table.

    Attributes:
        row_bytes: bytes of a row and of its place in the index.

    Raises:
        ValueError: a rule that rows do not have, or another number of rules than of segments.
    """

    def __init__(
        self, table: Table, rules: Sequence[Rule], server: int = 0, servers: int = 1
    ) -> None:
        self.table, self.server, self.servers = table, server, servers
        self._what = f"table {table.name!r}"
        by_segment = SegmentRules(table, rules)
        kept = HalfRows if table.dtype in HALVES else Rows
        self._rows = kept(table, by_segment.states, (*by_segment.words(), *words_of(table)))
        self._updater = RowUpdater(table, by_segment, self._rows)
        total = table.capacity
        self._share = (
            None if total is None else max(total // servers + (server < total % servers), 1)
        )
        self._lifecycle = RowLifecycle(table, self._rows, self._updater, self._share)
        self._chunks = TableChunks(self._what, self._rows, self._updater, self._lifecycle)
        self._lookups = self._lookups_new = 0
        self.row_bytes = self._rows.stored.columns * self._rows.records.itemsize + INDEX_BYTES

    @property
    def step(self) -> int:
        """The number of steps, which is that of calls of :meth:`update`."""
        return self._updater.step

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def epoch(self) -> int:
        """The number of calls of :meth:`mark_saved`, and of cuts that marked."""
        return self._rows.epoch

    @property
    def layout(self) -> Layout:
        """The places of a record's parts."""
        return self._rows.layout

    @property
    def bytes_held(self) -> int:
        """Memory of rows, of their index and of ids that wait, in bytes."""
        return self._rows.bytes_held + self._lifecycle.admission.bytes_held

    def absent(self, ids: Array) -> int:
        """The number of these ids, int64[u], that have no row in memory."""
        return int((self._rows.locate(ids) < 0).sum())

    def growth(self, count: int) -> int:
        """Bytes that rows for ``count`` further ids take at most."""
        if self._share is not None:
            count = min(count, max(self._share - len(self), 0))
        return count * self.row_bytes

    def counters(self) -> dict[str, int]:
        """The table's sizes and counters.

        Returns:
            "rows" and "waiting": how many rows and waiting ids there are; "lookups" and "pushes":
            ids that were looked up and pushed to; "lookups_new": those that had no row; "admitted":
            rows that a push made; "refused": pushes to ids that were not admitted; "evicted",
            "expired", "shrunk": rows removed.
        """
        waiting = len(self._lifecycle.admission.index)
        return {
            "rows": len(self),
            "waiting": waiting,
            "lookups": self._lookups,
            "lookups_new": self._lookups_new,
            **self._lifecycle.counts,
        }

    # ---- checks ----

    def _ids(self, ids: object) -> Array:
        found = checked(ids, self._what)
        if self.table.rows is not None:
            at = outside(found, 0, self.table.rows)
            if at >= 0:
                raise ValueError(
                    f"{self._what}: expected ids from 0 to {self.table.rows - 1}, got {found[at]}"
                )
        return found

    def _array(self, array: object, shape: tuple[int, ...], what: str, dtype: Any = None) -> Array:
        wanted = np.dtype(dtype or self._rows.dtype)
        if not isinstance(array, np.ndarray) or array.dtype != wanted:
            kind = (
                f"an array of {array.dtype}"
                if isinstance(array, np.ndarray)
                else type(array).__name__
            )
            raise TypeError(f"{self._what}: {what}: expected {wanted}, got {kind}")
        if array.shape != shape:
            raise ValueError(f"{self._what}: {what}: expected shape {shape}, got {array.shape}")
        return array if array.flags.carray else plain(array, f"{self._what}: {what}")

    def _differ(self, ids: Array) -> None:
        if not all_differ(ids):
            found, inverse = unique_of(ids)
            again = int(found[np.argmax(np.bincount(inverse) > 1)])
            raise ValueError(f"{self._what}: expected each id once, got {again} again")

    def _marked(self, ids: Array) -> Array:
        """The slots of ids, -1 for those without a row; checks that the ids differ, and notes that
        their rows change.
        """
        slots, missing, twice = self._rows.mark(ids)
        if twice:
            self._differ(ids)
        if missing:
            self._differ(ids[slots < 0])
        return slots

    def check_ids(self, ids: Array) -> None:
        """Returns if :meth:`update` would take these ids.

        Args:
            ids: int64[u].

        Raises:
            TypeError: another dtype.
            ValueError: another shape, memory that is not contiguous, an id that comes twice or that
                the table does not have.
        """
        self._differ(self._ids(ids))

    # ---- rows ----

    def lookup(self, ids: Array, out: Array, now: float = 0.0, counts: bool = True) -> None:
        """Copies rows, with all steps taken.  An id without a row reads its initial value, and gets
        none.

        Args:
            ids: int64[n], in any order; they may repeat.
            out: [n, dim] of the dtype that the table computes in, written.
            now: seconds, on the clock of the other calls; an id whose row has outlived its time
                reads its initial value.
            counts: whether :meth:`counters` shows it.

        Raises:
            TypeError: another dtype.
            ValueError: another shape, memory that is not contiguous, or an id that the table does
                not have.
        """
        ids = self._ids(ids)
        if self._array(out, (len(ids), self.table.dim), "out") is not out:
            raise ValueError(f"{self._what}: out: expected aligned memory that may be written")
        slots = self._rows.locate(ids)
        if self.table.ttl is not None:
            slots[self._lifecycle.outlived(slots, now)] = -1
        self._updater.read(slots, ids, out)
        if counts:
            self._lookups += len(ids)
            self._lookups_new += len(ids) - int(np.count_nonzero(slots >= 0))

    def update(
        self,
        ids: Array,
        gradients: Array,
        hparams: Sequence[Mapping[str, Hparam]],
        statistics: Array | None = None,
        now: float = 0.0,
    ) -> Array:
        """One step of the table: counts a push to every id, makes rows for those that are due, and
        applies the rules to the rows that the ids have.

        Args:
            ids: int64[u], each once; none is a step, too.
            gradients: [u, dim] of the dtype that the table computes in; may be overwritten.
            hparams: of this step, a mapping for each segment; one that is missing stays as it was.
            statistics: float32[u, 2], the shows and clicks of each id, for a table with a
                ShowClickEntry; None: 1 and 0.
            now: seconds.

        Returns:
            int64[u]: the slots of the rows; -1 for an id that has none.

        Raises:
            TypeError: another dtype.
            ValueError: another shape, memory that is not contiguous, an id that comes twice or that
                the table does not have, an hparam that a rule does not have, statistics for a table
                without a ShowClickEntry.  Nothing is changed then.
        """
        ids = self._ids(ids)
        gradients = self._array(gradients, (len(ids), self.table.dim), "gradients")
        stepped, statistics = self._updater.hparams(hparams), self._statistics(statistics, len(ids))
        slots = self._marked(ids)
        self._lifecycle.push(ids, slots, statistics, now)
        self._updater.take_step(slots, gradients, stepped)
        return slots

    def _statistics(self, statistics: Array | None, count: int) -> Array | None:
        if self._lifecycle.entry is None:
            if statistics is not None:
                raise ValueError(
                    f"{self._what}: statistics: expected none, as the table has no ShowClickEntry"
                )
            return None
        if statistics is None:
            return np.tile(np.array([1, 0], np.float32), (count, 1))
        return self._array(statistics, (count, 2), "statistics", np.float32)

    def add(
        self, ids: Array, deltas: Array, statistics: Array | None = None, now: float = 0.0
    ) -> None:
        """Adds to rows: a push like that of :meth:`update`, but no step of the rules.

        Args:
            ids: int64[u], each once.
            deltas: [u, dim] of the dtype that the table computes in.
            statistics: as of :meth:`update`.
            now: seconds.

        Raises:
            TypeError, ValueError: as :meth:`update`.
        """
        ids = self._ids(ids)
        deltas = self._array(deltas, (len(ids), self.table.dim), "deltas")
        statistics = self._statistics(statistics, len(ids))
        slots, pushes = self._marked(ids), self._lifecycle.order
        self._lifecycle.push(ids, slots, statistics, now)
        self._updater.catch_up(slots)
        here = slots >= 0
        memory = self._rows.begin_change(slots)
        memory.records[memory.places[here], : self.table.dim] += deltas[here]
        self._rows.end_change(slots, memory, pushes)

    @property
    def moves_untouched(self) -> bool:
        """Whether steps have moved rows that they did not touch."""
        return self._updater.has_history

    def assign(self, ids: Array, values: Array, current: bool = True) -> Array:
        """Sets rows, without asking the admission rule or the capacity.  A row keeps its state; a
        new one has that of new rows.

        Args:
            ids: int64[u], each once.
            values: [u, dim] of the dtype that the table computes in.
            current: a new row has taken all steps; otherwise, in a table whose rows were always
                there, none.

        Returns:
            int64[u]: the slots of the rows.

        Raises:
            TypeError, ValueError: as :meth:`update`.
        """
        ids = self._ids(ids)
        values = self._array(values, (len(ids), self.table.dim), "values")
        slots = self.begin(ids, current)
        self._rows.set_values(slots, values)
        return slots

    def begin(self, ids: Array, current: bool = True) -> Array:
        """Makes rows with their initial values for those ids that have none, as :meth:`assign`.

        Returns:
            int64[u]: the slots of all rows.

        Raises:
            TypeError, ValueError: as :meth:`update`.
        """
        ids = self._ids(ids)
        slots = self._marked(ids)
        self._lifecycle.ensure_rows(ids, slots, current)
        return slots

    # ---- slots ----
    #
    # For a caller that keeps more of each row than the table does: a slot is a row's until the row
    # is removed, or the table is cleared.

    @property
    def slots_used(self) -> int:
        """The number of slots that were ever used: those that hold a row are below this."""
        return self._rows.index.used

    def slots_of(self, ids: Array) -> Array:
        """The slots of the rows of ids, int64[n]; -1 where there is none.

        Raises:
            TypeError, ValueError: as :meth:`lookup`.
        """
        return self._rows.locate(self._ids(ids))

    def ids_of(self, slots: Array) -> Array:
        """The ids whose rows are in these slots, int64[n]; each holds one."""
        ids: Array = self._rows.index.ids.array[slots]
        return ids

    def listed(self, cursor: int, limit: int) -> tuple[Array, int]:
        """The slots from ``cursor`` on that hold a row, as many as ``limit``; and the next cursor,
        -1 after the last one.
        """
        return self._rows.index.listed(cursor, limit)

    def read(self, slots: Array, ids: Array, out: Array) -> None:
        """As :meth:`lookup`, of rows whose slots are known; counts nothing.

        Args:
            slots: int64[n], -1 for an id without a row.
            ids: int64[n].
            out: [n, dim] of the dtype that the table computes in, written.
        """
        self._updater.read(slots, ids, out)

    # ---- whole tables ----

    def scan(
        self,
        cursor: int,
        limit: int,
        changed_since_save: bool = False,
        materialized: bool = False,
    ) -> tuple[dict[str, Array], int]:
        """A chunk of the table, see snapshots.py, and where the next begins.

        Args:
            cursor: 0 at first, then what the last call returned.  Rows that exist all the while are
                given once each, even if the table changes between calls.
            limit: rows, waiting or removed ids in a chunk, at most.
            changed_since_save: only what has changed since :meth:`mark_saved`.
            materialized: rows as a lookup reads them, with all steps taken; otherwise as they are,
                with the last step that they have taken.

        Returns:
            The chunk, and the next cursor: -1 when this was the last.
        """
        return self._chunks.scan(cursor, limit, changed_since_save, materialized)

    def mark_saved(self) -> None:
        """Begins anew to note what changes.

        From the first such call on, the ids of removed rows are kept until the next.
        """
        self._rows.mark_saved()

    def cut(self, changed_since_save: bool = False, marks: bool = True) -> TableCut:
        """The table as it is now, to be read while it changes.  One cut at a time: the one before
        must be closed.

        Costs no copy of the table.  From here until the cut is closed, a call that changes a row
        copies it first, unless the cut has it already.

        Args:
            changed_since_save: only what has changed since :meth:`mark_saved`.
            marks: counts all changes until now as saved, as :meth:`mark_saved` does; always so
                where ``changed_since_save``.

        Returns:
            The cut.  Its chunks, loaded into an empty table that has taken over its metadata, make
            the table of this moment.
        """
        return self._cut(changed_since_save, marks, ())

    def _cut(
        self, changed_since_save: bool, marks: bool, cold: Iterable[dict[str, Array]]
    ) -> TableCut:
        removed = self._rows.removed if changed_since_save else None
        metadata = self.metadata()
        marks = marks or changed_since_save
        cut = TableCut(self._chunks, metadata, changed_since_save, marks, removed, cold)
        if removed is not None:
            self._rows.removed = None  # the cut has it from here on
        if marks:
            self.mark_saved()
        return cut

    def load(self, chunk: Mapping[str, Array]) -> None:
        """Loads the rows of a chunk that this server owns, in place of what it has of them; other
        rows stay.

        Args:
            chunk: of a scan of a table like this, on any number of servers.

        Raises:
            TypeError: ids of another dtype.
            ValueError: the chunk is of a table of another dim, dtype or rule, or has an id that
                this table does not have.
        """
        for name in ("ids", "waiting.ids", "removed"):
            if name in chunk:
                self._ids(chunk[name])
        self._chunks.check(chunk)
        self._chunks.load(chunk, self.server, self.servers)

    def metadata(self) -> dict[str, Any]:
        """The state outside of rows, JSON-able: the steps taken, their hparams, counters, the
        time of the last push.
        """
        lifecycle = self._lifecycle
        looked_up = {"lookups": self._lookups, "lookups_new": self._lookups_new}
        counts = {**lifecycle.counts, **looked_up}
        return {
            **self._updater.metadata(),
            "counts": counts,
            "order": lifecycle.order,
            "now": lifecycle.now,
        }

    def restore(self, metadata: Mapping[str, Any]) -> None:
        """Takes over what :meth:`metadata` returned.

        Args:
            metadata: of this or another server.

        Raises:
            ValueError: it is of a table with other rules.
        """
        self._updater.restore(metadata)
        lifecycle = self._lifecycle
        lifecycle.counts.update({name: int(metadata["counts"][name]) for name in lifecycle.counts})
        self._lookups = int(metadata["counts"]["lookups"])
        self._lookups_new = int(metadata["counts"].get("lookups_new", 0))  # not in older files
        lifecycle.order, lifecycle.now = (
            max(lifecycle.order, int(metadata["order"])),
            float(metadata["now"]),
        )

    def shrink(self, now: float, days: float = 1.0, threshold: float | None = None) -> int:
        """Applies time decay to show and click, then removes rows and waiting ids that score too
        low or had no push for too many days.  A table without a ShowClickEntry stays as it is.

        Args:
            now: seconds.
            days: that have passed; each multiplies show and click by the entry's decay.
            threshold: the least score that stays; None: the entry's.

        Returns:
            How many rows were removed.
        """
        self._lifecycle.now = max(self._lifecycle.now, now)
        return self._lifecycle.shrink(days, threshold)

    def expire(self, now: float) -> int:
        """Removes rows and waiting ids that have outlived their time.  (Lookups already read such
        rows as if they were gone.)

        Args:
            now: seconds.

        Returns:
            How many rows were removed.
        """
        self._lifecycle.now = max(self._lifecycle.now, now)
        return self._lifecycle.expire(now)

    def clear(self) -> None:
        """Forgets all rows and ids that wait; steps and counters stay."""
        self._lifecycle.clear()


def compile_kernels(table: Table, rules: Sequence[Rule]) -> None:
    """Compiles or loads the kernels of a table, so that its first step does not wait for that.

    Args:
        table: the table's description in the plan.
        rules: one for each of its segments.
    """
    tiny = SparseTable(replace(table, rows=None), rules)
    ids, rows = np.arange(2), np.zeros((2, table.dim), tiny._rows.dtype)
    outside(ids, 0, 2)  # the tiny table has no range, so it does not call this
    all_differ(ids)
    if table.memory_bytes is not None:
        order_of(ids, np.empty(2, np.uint64))
    none: list[dict[str, Hparam]] = [{}] * len(rules)
    for mixed in (False, True):
        if mixed:  # see [Note: ids that agree] in index.py
            tiny._rows.index.mix_anew(0)
        for _ in range(2):
            tiny.update(ids, rows, none)
        tiny.lookup(ids, rows)
        tiny.add(ids, rows)
        tiny._rows.index.within(0, 1)
        tiny.assign(ids, rows)
        chunk, _ = tiny.scan(0, 1)
        tiny.load(chunk)
        cut = tiny.cut()
        tiny.update(ids, rows, none)
        cut.close()
        tiny.shrink(0.0)
        tiny.clear()
