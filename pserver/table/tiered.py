"""A sparse table in two tiers: memory holds the rows that were pushed to last, the disk the others.

[Note: two tiers]  A row is in memory or on disk, never in both.  A push brings its rows into
memory.  Where memory would then exceed the budget, rows move to disk first, in blocks: those that
had no push for the longest time.  A lookup or a scan puts rows of the disk into memory, reads them
by the code that reads all rows, and takes them out again.  So the arithmetic knows of one tier
only, and every value is that of a table without a budget.

Rows that a schedule has catch up in turn, [Note: a history that ends] in updater.py, do so on disk
as in memory, and with the same step: a row's last bits depend on where its missed steps were
parted.  A step reads its rows of the disk in one run, since they lie there by the
hashes that say whose turn it is, and writes them back: one row in ``PERIOD``, and no more than
``BLOCK`` in memory at once.  To leave rows on disk alone until they are needed would take the
hparams of all steps for ever, in memory and in every checkpoint, and a row that comes back would
have all these steps to take at once.

Records on disk have the number of the last step that they have taken; those in memory only where
steps move rows that they do not touch.  A schedule may begin to move such rows at step T: rows that
went to disk before have then missed nothing up to T.

Ids that wait for admission stay in memory.  The rows of one call are in memory at once, even beyond
the budget.

[Note: what RocksDB holds]  A record's key is ``r`` and the id's hash in 8 bytes; its value is the
columns of a chunk, one behind the other.  A key of ``c`` and the hash says that the record changed
since the last save.  The hash begins with its key in a table's index: so the rows that catch up
together stand together, here as there, and are read in one run.  There is no write-ahead log: what
a stopped process leaves is of no use, and the next one that keeps rows below the same directory
removes it.

[Note: whose directory]  A directory has a file ``owner``, locked by the process that uses it, and
gets its name only once that lock is held.  So no process uses a directory whose lock is free.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from pserver.extras import extra
from pserver.storage import plain_file
from pserver.table.ids import owners, unique
from pserver.table.index import KEYS, REST, order_of
from pserver.table.kernels import Array
from pserver.table.lifecycle import victims
from pserver.table.rows import BLOCK
from pserver.table.snapshots import TableCut
from pserver.table.table import SparseTable
from transpiler.ir.rules import Hparam, Rule
from transpiler.ir.tables import Table

# ---- disk tier ----
#
# The disk tier of a table: records of rows by id, in a RocksDB that lives as long as its table.
#
# It is scratch space: nothing is read at start.  (This is the one file of this room that is not
# pure: it has files, locks on them, and RocksDB's own threads.)


PREFIX = "cold-rows-"
WRITE_BUFFER = 1 << 24  # bytes, of which RocksDB has three
BLOCK_CACHE = 1 << 24  # bytes: blocks, their index and their filters
_ROW, _CHANGED, _END = b"r", b"c", b"s"
_NEXT = {_ROW: _END, _CHANGED: b"d"}  # what follows the keys that begin alike

Chunk = dict[str, Array]


class ColdRows:
    """A map from ids to records on this machine's disk.

    One caller at a time.

    Args:
        columns: of a record: name -> dtype and shape, without the ids.
        root: the directory below which it gets its own; None: that of temporary files.

    Attributes:
        record: the dtype of a record.
        path: its directory.
        close: removes the directory.

    Raises:
        ImportError: rocksdict is not installed.
        OSError: the directory cannot be made.
    """

    def __init__(
        self, columns: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]], root: Path | None = None
    ) -> None:
        _check_installed()
        own = {"ids": (np.dtype(np.int64), ()), **columns}
        self.record = np.dtype([(name, *kind) for name, kind in sorted(own.items())])
        self.path, owner = _claim(Path(tempfile.gettempdir()) if root is None else root)
        self._db = _opened(self.path)
        self._count = 0
        self._all_changed = False  # since the last save, whatever the keys say
        self.close = weakref.finalize(self, _end, self._db, self.path, owner)

    def __len__(self) -> int:
        return self._count

    def put(self, chunk: Mapping[str, Array], changed: Array) -> None:
        """Stores records of ids that have none.

        Args:
            chunk: the ids and the columns; see snapshots.py.
            changed: bool[n], whether each changed since the last save.

        Raises:
            OSError: the disk is full, or refuses; none is stored.
        """
        self._store(chunk, changed)
        self._count += len(chunk["ids"])

    def replace(self, chunk: Mapping[str, Array]) -> None:
        """Stores records in place of those that these ids have; they change by that.

        Raises:
            OSError: as :meth:`put`.
        """
        self._store(chunk, np.ones(len(chunk["ids"]), np.bool_))

    def _store(self, chunk: Mapping[str, Array], changed: Array) -> None:
        from rocksdict import WriteBatch

        count, size = len(chunk["ids"]), self.record.itemsize
        records = np.empty(count, self.record)
        for name in self.record.names or ():
            records[name] = chunk[name]
        content, batch = records.tobytes(), WriteBatch(raw_mode=True)
        for index, (key, new) in enumerate(zip(_keys(chunk["ids"]), changed.tolist(), strict=True)):
            batch.put(_ROW + key, content[index * size : (index + 1) * size])
            if new:
                batch.put(_CHANGED + key, b"")
        self._write(batch)

    def get(self, ids: Array) -> Chunk:
        """The records of those ids that have one, in the ids' order."""
        if not self._count or not len(ids):
            return self._chunk([])
        found = self._db.get([_ROW + key for key in _keys(ids)])
        return self._chunk([record for record in found if record is not None])

    def remove(self, ids: Array) -> None:
        """Drops the records of these ids, all of which have one."""
        from rocksdict import WriteBatch

        batch = WriteBatch(raw_mode=True)
        for key in _keys(ids):
            batch.delete(_ROW + key)
            batch.delete(_CHANGED + key)
        self._write(batch)
        self._count -= len(ids)

    def changed(self, ids: Array) -> Array:
        """bool[n]: whether each of these records changed since the last save."""
        if self._all_changed:
            return np.ones(len(ids), np.bool_)
        found = self._db.get([_CHANGED + key for key in _keys(ids)]) if len(ids) else []
        return np.array([one is not None for one in found], bool)

    def mark_all(self) -> None:
        """Notes that all records change, now and until the next save."""
        self._all_changed = True

    def mark_saved(self) -> None:
        """Begins anew to note which records change."""
        self._all_changed = False
        self._db.delete_range(_CHANGED, _NEXT[_CHANGED])

    def clear(self) -> None:
        """Drops all records."""
        self._all_changed = False
        self._db.delete_range(_CHANGED, _END)
        self._count = 0

    def scan(self, begin: int, limit: int, changed_since_save: bool = False) -> tuple[Chunk, int]:
        """Records in the order of their keys.

        Args:
            begin: 0 at first, then what the last call returned.  A place is a key without its last
                two bits, so that it is below 2**62.
            limit: the number of records, about: up to three more may follow, whose keys differ in
                these two bits only.
            changed_since_save: only those that changed since the last save.

        Returns:
            The records, and where to go on: -1 at the end.
        """
        prefix = self._prefix(changed_since_save)
        keys: list[bytes] = []
        records: list[bytes] = []
        after, last = -1, -1
        for key, record in self._items(prefix + (begin << 2).to_bytes(8, "big"), _NEXT[prefix]):
            place = int.from_bytes(key[1:], "big") >> 2
            if len(keys) >= limit and place != last:
                after = place
                break
            keys.append(_ROW + key[1:])
            records.append(record)
            last = place
        return self._chunk(self._db.get(keys) if prefix == _CHANGED and keys else records), after

    def within(self, begin: int, end: int, limit: int) -> Iterator[Chunk]:
        """The records of the ids whose keys are in [begin, end), see :meth:`Index.within`.

        They are those of the moment when the first are read: what was read may be replaced.

        Args:
            begin, end: from 0 to ``KEYS``.
            limit: how many records at a time, at most.
        """
        first, behind = (
            _ROW + (key << REST).to_bytes(8, "big") if key < KEYS else _END for key in (begin, end)
        )
        items = self._items(first, behind)
        while records := [record for _, record in itertools.islice(items, limit)]:
            yield self._chunk(records)

    def _prefix(self, changed_since_save: bool) -> bytes:
        """The prefix of the keys of all records, or of the changed ones."""
        return _CHANGED if changed_since_save and not self._all_changed else _ROW

    def _items(self, begin: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The keys in [begin, end), and what they hold, as at the moment of this call."""
        return itertools.takewhile(lambda item: item[0] < end, self._db.items(from_key=begin))

    def cut(self, limit: int, changed_since_save: bool = False) -> Iterator[Chunk]:
        """The records as they are now, some at a time, whatever happens to them meanwhile.

        Args:
            limit: how many records at a time, at most.
            changed_since_save: only those that changed since the last save.
        """
        prefix = self._prefix(changed_since_save)
        # an iterator sees the moment at which it is made; that of a snapshot does not
        items, held = self._items(prefix, _NEXT[prefix]), self._db.snapshot()

        def chunks() -> Iterator[Chunk]:
            while some := list(itertools.islice(items, limit)):
                yield self._chunk(
                    [held[_ROW + key[1:]] if prefix == _CHANGED else own for key, own in some]
                )

        return chunks()

    def _chunk(self, records: list[bytes]) -> Chunk:
        held = np.frombuffer(bytearray(b"".join(records)), self.record)
        return {name: np.ascontiguousarray(held[name]) for name in self.record.names or ()}

    def _write(self, batch: Any) -> None:
        try:
            self._db.write(batch)
        except Exception as error:  # rocksdict raises one kind for all causes
            raise OSError(f"{self.path}: cannot keep rows on disk: {error}") from error


def _keys(ids: Array) -> list[bytes]:
    order = np.empty(len(ids), np.uint64)
    order_of(ids, order)
    content = order.astype(">u8").tobytes()
    return [content[begin : begin + 8] for begin in range(0, len(content), 8)]


def _claim(root: Path) -> tuple[Path, IO[bytes]]:
    """Makes a directory of this process's own; returns it and its locked file.

    Directories that no process uses are removed.
    """
    root.mkdir(parents=True, exist_ok=True)
    for path in root.glob(f"{PREFIX}*"):
        owner = _locked(path)
        if owner is not None:
            shutil.rmtree(path, ignore_errors=True)
            owner.close()
    new = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=root))
    owner = plain_file.new(new / "owner")
    fcntl.flock(owner, fcntl.LOCK_EX)
    path = root / new.name.removeprefix(".")
    os.rename(new, path)
    return path, owner


def _locked(path: Path) -> IO[bytes] | None:
    """Takes the directory's lock; None where another process has it, or there is none."""
    try:
        owner = plain_file.reading(path / "owner")
    except OSError:
        return None
    try:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner.close()
        return None
    return owner


def _check_installed() -> None:
    with extra("disk", "rows on disk (memory_bytes) need rocksdict"):
        import rocksdict  # noqa: F401  # an optional package


def _opened(path: Path) -> Any:
    """Opens a RocksDB of plain bytes, without a log, whose memory is bounded."""
    from rocksdict import BlockBasedOptions, Cache, DBCompressionType, Options, Rdict, WriteOptions

    options, blocks, writes = Options(raw_mode=True), BlockBasedOptions(), WriteOptions()
    options.create_if_missing(True)
    options.set_write_buffer_size(WRITE_BUFFER)
    options.set_max_write_buffer_number(3)
    options.set_compression_type(DBCompressionType.none())
    blocks.set_bloom_filter(10, False)
    blocks.set_block_cache(Cache(BLOCK_CACHE))
    blocks.set_cache_index_and_filter_blocks(True)
    options.set_block_based_table_factory(blocks)
    writes.disable_wal = True  # type: ignore[method-assign,assignment]  # a property, whatever the package's stub says
    db = Rdict(str(path / "rows"), options)
    db.set_write_options(writes)
    return db


def _end(db: Any, path: Path, owner: IO[bytes]) -> None:
    db.close()
    shutil.rmtree(path, ignore_errors=True)
    owner.close()


# ---- tiered table ----


COLD = 1 << 62  # where cursors of rows on disk begin
SHARE = 16  # this part of the budget moves to disk at once


def open_table(
    table: Table, rules: Sequence[Rule], server: int = 0, servers: int = 1, root: Path | None = None
) -> SparseTable:
    """Makes a table: in memory, or in two tiers where it has ``memory_bytes``.

    Args:
        table: the table's description in the plan.
        rules: one for each of its segments.
        server: this server's index.
        servers: the number of servers that share the table.
        root: the directory below which rows go to disk; None: that of temporary files.

    Returns:
        The table, empty.

    Raises:
        ValueError, ImportError: as :class:`SparseTable` and :class:`TieredTable`.
    """
    if table.memory_bytes is None:
        return SparseTable(table, rules, server, servers)
    return TieredTable(table, rules, server, servers, root)


class TieredTable(SparseTable):
    """One server's part of a table that keeps some rows in memory and the others on disk.

    One caller at a time, lookups too.  Between the calls of a scan nothing is pushed.  See
    [Note: two tiers].

    Args:
        table: with ``memory_bytes``, the budget of all servers for rows in memory.
        rules: as of :class:`SparseTable`; likewise ``server`` and ``servers``.
        root: the directory below which this table's own is made; None: that of temporary files.

    Raises:
        ValueError: the table has no ``memory_bytes``.
        ImportError: rocksdict is not installed.
    """

    def __init__(
        self,
        table: Table,
        rules: Sequence[Rule],
        server: int = 0,
        servers: int = 1,
        root: Path | None = None,
    ) -> None:
        if table.memory_bytes is None:
            raise ValueError(f"table {table.name!r}: expected memory_bytes, got None")
        super().__init__(table, rules, server, servers)
        self._rules = tuple(rules)
        self._budget = table.memory_bytes / servers
        chunk, _ = super().scan(0, 1)
        columns = {
            name: (column.dtype, column.shape[1:])
            for name, column in chunk.items()
            if name != "ids"
        }
        waits = {name for name in columns if name.startswith("waiting.")}
        columns = {name: column for name, column in columns.items() if name not in waits} | {
            "step": (np.dtype(np.int64), ())
        }
        self._cold = ColdRows(columns, root)
        self._tracked_from = 0  # the step from which on records in memory say what they have taken
        self._moved = {"spilled": 0, "fetched": 0, "lookups_disk": 0}

    @property
    def max_rows(self) -> int:
        """Rows that may stay in memory."""
        return max(int(self._budget // self.row_bytes), 1)

    def growth(self, count: int) -> int:
        """As of :class:`SparseTable`: what does not fit into the budget goes to disk."""
        return min(count, max(self.max_rows - super().__len__(), 0)) * self.row_bytes

    def __len__(self) -> int:
        return super().__len__() + len(self._cold)

    def counters(self) -> dict[str, int]:
        """As of :class:`SparseTable`; and "cold": rows on disk, "spilled": rows moved there,
        "fetched": rows moved back, "lookups_disk": ids looked up whose row was there.
        """
        return {**super().counters(), "cold": len(self._cold), **self._moved}

    def close(self) -> None:
        """Removes the table's directory; the table is not used any more."""
        self._cold.close()

    # ---- between the tiers ----

    def _absent(self, ids: Array) -> Array:
        """The ids that have no row in memory, each once."""
        slots, missing = self._rows.index.locate(ids)
        return unique(ids[slots < 0])[0] if missing else ids[:0]

    def _put_in_memory(self, chunk: Chunk) -> Array:
        """Puts records into memory: their slots."""
        if self._rows.has("step"):
            chunk = {**chunk, "step": np.maximum(chunk["step"], self._tracked_from)}
        else:
            chunk = {name: column for name, column in chunk.items() if name != "step"}
        self._chunks.load(chunk, self.server, self.servers)
        return self._rows.index.locate(chunk["ids"])[0]

    def _take_out(self, ids: Array) -> None:
        """Takes rows out of memory whose records are on disk."""
        self._rows.index.remove(ids)

    def _fetch(self, ids: Array) -> None:
        """Moves the rows of these ids into memory, and makes room for those that have none yet."""
        if not len(self._cold) and super().__len__() + len(ids) <= self.max_rows:
            return
        self._make_room(len(self._absent(ids)))
        chunk = self._cold.get(self._absent(ids))
        if len(chunk["ids"]):
            self._put_in_memory(chunk)
            self._cold.remove(chunk["ids"])
            self._moved["fetched"] += len(chunk["ids"])

    def _make_room(self, count: int) -> None:
        """Moves rows to disk until ``count`` more fit into the budget."""
        rows = self._rows
        excess = min(len(rows) + count - self.max_rows, len(rows))
        if excess <= 0:
            return
        gone = victims(
            rows, min(max(excess, self.max_rows // SHARE), len(rows)), self._moved["spilled"]
        )
        for begin in range(0, len(gone), BLOCK):
            slots = gone[begin : begin + BLOCK]
            ids = rows.index.ids.array[slots]
            chunk = self._chunks.rows(slots)
            chunk.setdefault("step", np.full(len(slots), self.step))
            self._cold.put(chunk, rows.index.changed_in(ids, rows.epoch))
            self._take_out(ids)
            self._moved["spilled"] += len(slots)

    def _catch_up_in_turn(self) -> None:
        """Catches up the rows on disk whose turn is at the next step.

        Before that step: if the disk refuses, nothing was counted yet, and to catch up twice
        between two steps is to do so once.
        """
        begin, end = self._updater.turn
        if begin == end or not len(self._cold):
            return
        for guests in self._cold.within(begin, end, BLOCK):
            slots = self._put_in_memory(guests)
            self._updater.catch_up(slots)
            chunk = self._chunks.rows(slots)
            self._take_out(guests["ids"])
            self._cold.replace(chunk)

    def _forget(self, ids: Array) -> None:
        """Drops the records on disk of these ids."""
        held = self._cold.get(np.unique(ids))["ids"]
        if len(held):
            self._cold.remove(held)

    # ---- calls of a SparseTable ----

    def lookup(self, ids: Array, out: Array, now: float = 0.0, counts: bool = True) -> None:
        """As of :class:`SparseTable`; rows on disk stay there."""
        guests = self._cold.get(self._absent(self._ids(ids))) if len(self._cold) else None
        if guests is None or not len(guests["ids"]):
            super().lookup(ids, out, now, counts)
            return
        self._moved["lookups_disk"] += len(guests["ids"]) if counts else 0
        self._put_in_memory(guests)
        try:
            super().lookup(ids, out, now, counts)
        finally:
            self._take_out(guests["ids"])

    def update(
        self,
        ids: Array,
        gradients: Array,
        hparams: Sequence[Mapping[str, Hparam]],
        statistics: Array | None = None,
        now: float = 0.0,
    ) -> Array:
        """As of :class:`SparseTable`.

        Raises:
            OSError: the disk is full, or refuses; nothing is changed.
        """
        self._fetch(self._ids(ids))
        self._catch_up_in_turn()
        tracked, step = self._rows.has("step"), self.step
        slots = super().update(ids, gradients, hparams, statistics, now)
        self._note_tracking(tracked, step)
        return slots

    def _note_tracking(self, tracked: bool, step: int) -> None:
        """Notes the step from which records keep their last step, where that is new."""
        if not tracked and self._rows.has("step"):
            self._tracked_from = step
            self._cold.mark_all()

    def add(
        self, ids: Array, deltas: Array, statistics: Array | None = None, now: float = 0.0
    ) -> None:
        """As of :class:`SparseTable`."""
        self._fetch(self._ids(ids))
        super().add(ids, deltas, statistics, now)

    def assign(self, ids: Array, values: Array, current: bool = True) -> Array:
        """As of :class:`SparseTable`."""
        self._fetch(self._ids(ids))
        return super().assign(ids, values, current)

    def scan(
        self,
        cursor: int,
        limit: int,
        changed_since_save: bool = False,
        materialized: bool = False,
    ) -> tuple[Chunk, int]:
        """As of :class:`SparseTable`: first the rows in memory, then those on disk."""
        if cursor < COLD:
            chunk, after = super().scan(cursor, limit, changed_since_save, materialized)
            return chunk, COLD if after < 0 and len(self._cold) else after
        guests, place = self._cold.scan(cursor - COLD, limit, changed_since_save)
        slots = self._put_in_memory(guests)
        chunk = self._chunks.rows(slots, changed_since_save, materialized)
        self._take_out(guests["ids"])
        return chunk, -1 if place < 0 else COLD + place

    def mark_saved(self) -> None:
        """As of :class:`SparseTable`."""
        super().mark_saved()
        self._cold.mark_saved()

    def cut(self, changed_since_save: bool = False, marks: bool = True) -> TableCut:
        """As of :class:`SparseTable`; of the rows on disk RocksDB keeps what they were."""
        cold = self._cold.cut(BLOCK, changed_since_save) if len(self._cold) else iter(())
        tracked_from = self._tracked_from  # as of this moment

        def chunks() -> Iterator[Chunk]:
            for chunk in cold:
                chunk["step"] = np.maximum(chunk["step"], tracked_from)
                yield chunk

        return self._cut(changed_since_save, marks, chunks())

    def load(self, chunk: Mapping[str, Array]) -> None:
        """As of :class:`SparseTable`."""
        tracked, step = self._rows.has("step"), self.step
        super().load(chunk)
        self._note_tracking(tracked, step)
        for name in ("ids", "waiting.ids", "removed"):
            ids = chunk.get(name, np.empty(0, np.int64))
            self._forget(ids[owners(ids, self.servers) == self.server])
        self._make_room(0)

    def restore(self, metadata: Mapping[str, Any]) -> None:
        """As of :class:`SparseTable`."""
        tracked, step = self._rows.has("step"), self.step
        super().restore(metadata)
        self._note_tracking(tracked, step)

    # ---- calls over all rows ----

    def _blocks(self) -> Iterator[Chunk]:
        """All records on disk, a block at a time; those of earlier blocks may be replaced or
        removed meanwhile.
        """
        cursor = 0
        while cursor >= 0:
            chunk, cursor = self._cold.scan(cursor, BLOCK)
            if len(chunk["ids"]):
                yield chunk

    def shrink(self, now: float, days: float = 1.0, threshold: float | None = None) -> int:
        """As of :class:`SparseTable`."""
        removed = super().shrink(now, days, threshold)
        if self._lifecycle.entry is not None:
            removed += self._visit("shrunk", now, days, threshold)
        return removed

    def expire(self, now: float) -> int:
        """As of :class:`SparseTable`."""
        removed = super().expire(now)
        if self.table.ttl is not None:
            removed += self._visit("expired", now)
        return removed

    def _visit(
        self, what: str, now: float, days: float = 0.0, threshold: float | None = None
    ) -> int:
        """Shrinks or expires the rows on disk, a block at a time, in a table of their own; returns
        how many were removed.
        """
        other, total = SparseTable(self.table, self._rules, self.server, self.servers), 0
        other.restore(self.metadata())
        for block in self._blocks():
            other.load(block)
            removed = other.shrink(now, days, threshold) if what == "shrunk" else other.expire(now)
            stays = np.isin(block["ids"], other.scan(0, len(block["ids"]))[0]["ids"])
            changed = self._cold.changed(block["ids"])
            left = {name: column[stays] for name, column in block.items()}
            if what == "shrunk":
                changed[:] = True
                chunk, _ = other.scan(0, len(stays))
                left = {**left, **_ordered(chunk, left["ids"], ("show", "click", "unseen"))}
            self._cold.remove(block["ids"])
            self._cold.put(left, changed[stays])
            self._rows.note_removed(block["ids"][~stays])
            other.clear()
            total += removed
        self._lifecycle.counts[what] += total
        return total

    def clear(self) -> None:
        """As of :class:`SparseTable`."""
        super().clear()
        if self._rows.removed is not None:
            for block in self._blocks():
                self._rows.note_removed(block["ids"])
        self._cold.clear()


def _ordered(chunk: Mapping[str, Array], ids: Array, names: Sequence[str]) -> Chunk:
    """Columns of a chunk in the order of these ids, all of which it has."""
    order = np.argsort(chunk["ids"])
    places = order[np.searchsorted(chunk["ids"][order], ids)]
    return {name: chunk[name][places] for name in names}
