"""A sparse table as a server holds it: the pure table, the lock that every use of it takes, and the
clock for its times to live.

[Note: the table's lock]  An update holds it, and so does the copy that a lookup takes: a lookup
waits for one update at most, and never sees half of one.

[Note: a reader that keeps up]  Rows that steps change before they are read are copied, and copies
are read first.  Where steps change more than can be written, the copies would become a second
table.  So a step that finds more than a part of the table copied waits for the reader, for an
instant: the memory that a save takes is bounded by what can be written in these instants.

[Note: a reader that rests]  While rows are read, steps wait.  So where steps come, the reader then
leaves the table to them for ``REST`` times as long; what it writes meanwhile counts.  A save of a
table that is always busy takes longer, and costs its steps a tenth at most.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from pserver.errors import Refused
from pserver.job_log.records import Process
from pserver.table.changes import RowChanges, TableChanges, tells_changes
from pserver.table.gradient import RowGradient, RowsBefore
from pserver.table.snapshots import TableCut
from pserver.table.table import RowsRead, compile_kernels
from pserver.table.tiered import open_table
from pserver.transport.frames import DTYPES
from pserver.undone import or_undone
from transpiler.files import bounded_json
from transpiler.ir.rules import Hparam
from transpiler.ir.tables import ShowClickEntry, Table
from transpiler.plan.plan import Plan
from transpiler.plan.planner import stored

# ---- locked cut ----
#
# A table's cut as a save reads it: beside the steps, some rows at a time under the table's lock.


READ_ROWS = 32768  # rows that are read at a time: what a step may have to wait for
FILE_BYTES = 2**25  # of a chunk that is written at once
KEPT_PART = 20  # this part of a table may be copied
KEPT_BYTES = 2**26  # and so much of a small one
REST = 12  # times as long as a read took
LONGEST_REST_SECONDS = 0.2
WAIT_SECONDS = 0.02  # for which a step waits where more is

Chunk = dict[str, np.ndarray]


class LockedCut:
    """A table of one moment; safe to use from one thread beside those that use the table.

    Args:
        cut: the pure one.
        metadata: the table's at that moment, as JSON.
        read: the condition of the table's lock, on which steps wait for the reader.
        most: bytes of copies from which on they do.

    Attributes:
        metadata: as given.
    """

    def __init__(self, cut: TableCut, metadata: str, read: threading.Condition, most: int) -> None:
        self._cut, self._read, self._most = cut, read, most
        self.metadata = metadata
        self._stepped = False  # since the last read
        self._rests_until = 0.0

    def make_room(self) -> None:
        """Waits for an instant before a step, where too much is copied.  The caller holds the
        table's lock.
        """
        self._stepped = True
        if self._cut.bytes_kept > self._most:
            self._read.wait_for(lambda: self._cut.bytes_kept <= self._most, WAIT_SECONDS)

    def chunks(self) -> Iterator[Chunk]:
        """All rows, waiting and removed ids, each once, as chunks of about ``FILE_BYTES``."""
        some: list[Chunk] = []
        size = 0
        while (chunk := self._next()) is not None:
            some.append(chunk)
            size += sum(column.nbytes for column in chunk.values())
            if size >= FILE_BYTES:
                yield _joined(some)
                some, size = [], 0
        if some:
            yield _joined(some)

    def _next(self) -> Chunk | None:
        self._rest()
        with self._read:
            began = time.monotonic()
            chunk = self._cut.read(READ_ROWS)
            ended, busy = time.monotonic(), self._stepped
            self._stepped = False
            self._read.notify_all()
        rest = REST * (ended - began) if busy else 0.0
        self._rests_until = max(self._rests_until, ended) + rest
        return chunk

    def _rest(self) -> None:
        """See [Note: a reader that rests]; steps that wait for the reader end it."""
        left = self._rests_until - time.monotonic()
        if left > 0 and self._cut.bytes_kept <= self._most:
            time.sleep(min(left, LONGEST_REST_SECONDS))

    def close(self) -> None:
        """Closes the cut, which is not read any more."""
        with self._read:
            self._cut.close()
            self._read.notify_all()


def _joined(chunks: list[Chunk]) -> Chunk:
    if len(chunks) == 1:
        return chunks[0]
    return {name: np.concatenate([each[name] for each in chunks]) for name in chunks[0]}


# ---- locked table ----


CHUNK_ROWS = 65536  # rows of a chunk whose reader names no limit


class LockedTable:
    """One server's part of a sparse table, safe to use from any thread.

    A method that reads or changes rows takes the table's lock for as long as it runs.

    Args:
        table: what the program says of the table.
        plan: of the job.
        server: which of the plan's servers this is.
        scratch: the directory for rows that do not fit in memory; None: the system's directory for
            temporary files.
        clock: wall time in seconds, because a time to live continues while a server is down.

    Attributes:
        table: as given.
        rows: the pure table.
        counts: whether a gradient carries shows and clicks of its rows.
        dtype: of the rows, as they travel.
        scaled: the key of the clipping coefficient in a commit, where norms clip on servers: the
            table's name, "" for the global norm; None: rows are not scaled.
        clamp: limits of the gradient's values, where values are clipped on servers.
        any_trainer_loads: whether trainers beside 0 may load values of rows.
    """

    def __init__(
        self,
        table: Table,
        plan: Plan,
        server: int,
        scratch: Path | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.table = table
        lane = plan.lanes[table.lane]
        applied = stored(table, plan)
        rules = [rule for _, rule in applied]
        table = replace(table, segments=tuple(segment for segment, _ in applied))
        # now, while trainers wait for the installation, rather than in the first step
        compile_kernels(table, rules)
        self.rows = open_table(table, rules, server, plan.servers, scratch)
        self._hparam_names = [(segment.group, rule.hparams) for segment, rule in applied]
        self.counts = isinstance(table.entry, ShowClickEntry)
        self.dtype, self._computes_in = DTYPES[table.dtype], DTYPES[table.computes_in]
        self.scaled: str | None = None
        self.clamp: tuple[float, float] | None = None
        if plan.clips_on_servers and plan.clip is not None:
            self.scaled = {"value": None, "norm": table.name, "global_norm": ""}[plan.clip.kind]
            self.clamp = (plan.clip.low, plan.clip.high) if plan.clip.kind == "value" else None
        self._adds, self._outer = lane.kind.servers_add, lane.kind.outer_optimizer
        self.any_trainer_loads = not lane.kind.waits_for_all
        self._compensation = lane.dc_asgd  # the factor lambda; 0: delays are not compensated
        self._changes = RowChanges() if tells_changes(table, lane) else None
        # one message may be read for, while others wait and one is applied
        self._read = RowsRead(table.dim, np.dtype(table.computes_in).type, lane.send_queue_size + 2)
        self._refreshed = lane.refreshes_rows
        self._clock = clock
        self._lock = threading.Lock()  # guards all of the above; see [Note: the table's lock]
        self._cut_read = threading.Condition(self._lock)
        self._cut: LockedCut | None = None

    @property
    def groups(self) -> set[int]:
        """The parameter groups whose hyper-parameters update its rows."""
        stepped = self._adds or self._outer  # by trainers
        return set() if stepped else {segment.group for segment in self.table.segments}

    def lookup(self, ids: torch.Tensor, trainer: int, ahead: bool = False) -> torch.Tensor:
        """The rows of ids; no row is made.

        Args:
            ids: int64[n].
            trainer: the reader; delay compensation remembers what it has read.
            ahead: of its step, in which they are looked up again where their lane says so: this
                lookup does not count then.

        Returns:
            [n, dim], of the table's dtype, in the order of the ids.

        Raises:
            Refused: an id is outside of the table's range.
        """
        wanted, out = ids.numpy(), torch.empty((len(ids), self.table.dim), dtype=self._computes_in)
        found, counts = out.numpy(), not (ahead and self._refreshed)
        with self._lock:
            try:
                self.rows.lookup(wanted, found, self._clock(), counts)
            except ValueError as error:
                raise Refused(str(error)) from error
            if self._compensation and counts:
                self._read.note(trainer, wanted, found)
        return out if self.dtype is self._computes_in else out.to(self.dtype)

    def update(
        self,
        gradient: RowGradient,
        hparams: Mapping[int, Mapping[str, Hparam]],
        scale: Mapping[str, float],
        now: float | None = None,
        before: RowsBefore | None = None,
        process: Process | None = None,
    ) -> None:
        """Takes one step: by the rules of the table's segments; or, where trainers step by
        themselves, by adding what they have changed, or by an outer optimizer, to which the
        negative mean change is the gradient.

        Args:
            gradient: merged; may be overwritten.
            hparams: the hyper-parameters of every group at this step.
            scale: the commit's clipping coefficients.
            now: the time of the step, in seconds since 1970; None: the clock's.
            before: the rows as the gradient's trainer has read them, where delays are compensated.
            process: of that trainer, where trainers step by themselves.
        """
        if self.clamp is not None:
            gradient.rows.clamp_(*self.clamp)
        if self.scaled is not None and scale:
            gradient.mul_(scale[self.scaled])
        ids, values = gradient.ids.numpy(), gradient.rows.numpy()
        statistics = None if gradient.statistics is None else gradient.statistics.numpy()
        with self._lock:
            if self._cut is not None:
                self._cut.make_room()
            now = self._clock() if now is None else now
            counted = statistics, now
            if self._adds:
                self.rows.add(ids, values, *counted)
                if self._changes is not None:
                    self._changes.note(process, ids)
            elif self._outer:  # its hparams are those of the plan
                self.rows.update(ids, np.negative(values, out=values), [{}], *counted)
            else:
                by_segment = [
                    {name: hparams[group][name] for name in names}
                    for group, names in self._hparam_names
                ]
                if self._compensation and before is not None:
                    self._compensate(gradient, before, now)
                self.rows.update(ids, values, by_segment, *counted)

    def changes_since(self, process: Process, position: int) -> TableChanges | None:
        """The rows that other trainers have changed since a position, see
        :class:`~pserver.table.changes.RowChanges`; None: the server does not note them.
        """
        if self._changes is None:
            return None
        with self._lock:
            return self._changes.since(process, position)

    def read_before(self, gradient: RowGradient, trainer: int) -> RowsBefore | None:
        """A gradient's rows as its trainer has read them, for :meth:`update`; called once for each
        gradient, in the order of their updates.  None where delays are not compensated.
        """
        if not self._compensation:
            return None
        with self._lock:
            then, known = self._read.take_message(trainer, gradient.ids.numpy())
        return RowsBefore(torch.from_numpy(then), torch.from_numpy(known))

    def _compensate(self, gradient: RowGradient, before: RowsBefore, time: float) -> None:
        """Corrects a gradient, in place, for what others have changed of its rows since its trainer
        looked them up (Zheng et al.: Asynchronous SGD with delay compensation, 2017, eq. 10).  Rows
        that it has not looked up lately count as unchanged.
        """
        now = torch.empty_like(gradient.rows)
        self.rows.lookup(gradient.ids.numpy(), now.numpy(), time, counts=False)
        # one operation after the other: a fused one rounds differently from place to place
        squared = gradient.rows * gradient.rows
        then = torch.where(before.known[:, None], before.rows, now)
        moved = now.sub_(then)
        gradient.rows.add_(squared.mul_(moved).mul_(self._compensation))

    def check(self, gradient: RowGradient) -> None:
        """Returns if a gradient can be applied; nothing is changed.

        Raises:
            Refused: an id comes twice, or is outside of the table's range.
        """
        try:
            self.rows.check_ids(gradient.ids.numpy())
        except ValueError as error:
            raise Refused(str(error)) from error

    def _refusing(self, use: Callable[[], object]) -> None:
        """Calls ``use``; a ValueError of the pure table becomes Refused."""
        try:
            use()
        except ValueError as error:
            raise Refused(str(error)) from error

    # ---- whole tables ----

    def scan(
        self, cursor: int, limit: int, changed_since_save: bool, materialized: bool
    ) -> tuple[Chunk, int]:
        """A chunk of rows with their states, and the cursor of the next chunk; -1 after the last.

        Args:
            cursor: 0 for the first chunk.
            limit: rows of the chunk; 0: as many as the server likes.
            changed_since_save: only rows that changed since :meth:`mark_saved`.
            materialized: rows as a lookup reads them.
        """
        with self._lock:
            return self.rows.scan(cursor, limit or CHUNK_ROWS, changed_since_save, materialized)

    def mark_saved(self) -> None:
        """Counts all changes until now as saved."""
        with self._lock:
            self.rows.mark_saved()

    @property
    def epoch(self) -> int:
        """The number of times that all changes were counted as saved."""
        with self._lock:
            return self.rows.epoch

    def cut(self, changed_since_save: bool = False, marks: bool = False) -> LockedCut:
        """The table as it is now, to be read beside the steps that change it.

        Args:
            changed_since_save: only what has changed since :meth:`mark_saved`.
            marks: see :meth:`SparseTable.cut`.
        """
        with self._lock:
            most = max(KEPT_BYTES, self.rows.bytes_held // KEPT_PART)
            cut = self.rows.cut(changed_since_save, marks)
            with or_undone(cut.close):
                self._cut = LockedCut(cut, json.dumps(cut.metadata), self._cut_read, most)
            return self._cut

    def load(self, chunk: Chunk) -> None:
        """Takes over those rows of a chunk that this server holds.  A chunk of ids and values alone
        makes rows as they are before any update.

        Raises:
            Refused: the chunk is of another table.
        """
        with self._lock:
            self._forget_reads()
            if chunk.keys() == {"ids", "values"}:
                self._refusing(lambda: self.rows.assign(chunk["ids"], chunk["values"]))
            else:
                self._refusing(lambda: self.rows.load(chunk))

    def metadata(self) -> str:
        """The table's state besides its rows, as JSON."""
        with self._lock:
            return json.dumps(self.rows.metadata())

    def restore(self, metadata: str) -> None:
        """Drops all rows and takes over what :meth:`metadata` returned.

        Raises:
            Refused: it is not a table's metadata, or of a table with other rules.
        """

        def restore() -> None:
            known = bounded_json.loads(metadata)
            self.rows.clear()
            self._forget_reads()
            self.rows.restore(known)

        with self._lock:
            self._refusing(restore)

    def _forget_reads(self) -> None:
        """Forgets what trainers have read and changed, because rows are loaded."""
        self._read.clear()
        if self._changes is not None:
            self._changes.forget()

    @property
    def now(self) -> float:
        """The time of the table's clock, in seconds."""
        return self._clock()

    def shrink(self, days: float, threshold: float | None, now: float) -> int:
        """Applies time decay, then drops rows below the score threshold or past their time to live.

        Args:
            days: how many have passed.
            threshold: in place of the table's own; None: the table's.
            now: in seconds since 1970.

        Returns:
            How many rows it has dropped.
        """
        with self._lock:
            return int(self.rows.shrink(now, days, threshold)) + int(self.rows.expire(now))

    def counters(self) -> dict[str, int]:
        """The counters since the start, by name ("admitted", "evicted", ...)."""
        with self._lock:
            return dict(self.rows.counters())

    def absent(self, gradient: RowGradient) -> int:
        """The number of a gradient's ids, which were checked, that have no row in memory."""
        with self._lock:
            return self.rows.absent(gradient.ids.numpy())

    def growth(self, count: int) -> int:
        """Bytes that rows for so many ids may take, beyond those that are held."""
        return self.rows.growth(count)

    @property
    def bytes_held(self) -> int:
        """Bytes of the rows and of their index, of what is kept for delay compensation, and of the
        ids of changed rows.
        """
        noted = 0 if self._changes is None else self._changes.bytes_held
        return self.rows.bytes_held + self._read.bytes_held + noted
