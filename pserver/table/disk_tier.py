"""The disk tier of a table: records of rows by id, in a RocksDB that lives as long as its table.

It is scratch space: nothing is read at start.  (This is the one file of this room that is not pure:
it has files, locks on them, and RocksDB's own threads.)

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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from pserver.storage import plain_file
from pserver.table.index import KEYS
from pserver.table.index_kernels import REST, order_of
from pserver.table.kernels import Array

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
            chunk: the ids and the columns; see chunks.py.
            changed: bool[n], which of them changed since the last save.

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
        """bool[n]: which of these records changed since the last save."""
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
            limit: how many records, about: up to three more may come, whose keys differ in these
                two bits only.
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
        """Of the keys that name all records, or those that have changed."""
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
    try:
        import rocksdict  # noqa: F401  # an optional package
    except ImportError as error:
        raise ImportError(
            "rows on disk (memory_bytes) need rocksdict: pip install '.[disk]' in a "
            "checkout of pserver"
        ) from error


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
