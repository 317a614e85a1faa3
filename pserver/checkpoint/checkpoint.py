"""Tensors, tables and their metadata in files: a reader gets a whole checkpoint, or an error.

A checkpoint is a directory, or a prefix behind a URL::

    checkpoint.json                      format, metadata, and each other file's size and checksum
    tensors-0f3a9c....safetensors        the tensors
    rows-77d01e....chunks                chunks of all tables' rows, one after the other

[Note: what makes a checkpoint complete]  ``checkpoint.json`` is written last, under another name,
and renamed; that rename is the only moment at which anything changes for a reader.  Before it the
old ``checkpoint.json`` still lists the old files, which are removed only afterwards.  Whenever the
process or the machine stops, a reader therefore finds the old checkpoint or the new one.  (Renaming
whole directories cannot do that: a directory that is not empty cannot be replaced in one step.)
Every file is flushed to the disk before the rename that refers to it, and the directory before and
after it.  The next save removes the files that a stopped save has left.

[Note: one writer]  Two jobs that save to one path would each remove the other's files.  In a
directory a writer holds the kernel's lock (pserver/storage/local.py), a job from its first save
to its end; the second one raises at once.  Behind a URL there is no lock, and no rename either: the
files of each save have names of their own, and ``checkpoint.json`` is replaced last, if it still is
the one that this job has last seen there, and that was there when the save began.  See
[Note: replacing an object] in pserver/storage/remote.py.

A checkpoint may hold only what changed of its tables since another one, its base: see [Note: chains
of checkpoints] in pserver/checkpoint/manifest.py.

[Note: merging a chain]  The newest checkpoint that names an id decides about it: its row, that it
is not admitted yet, or that it was removed.  So the checkpoints are read from the newest to the
oldest, and ids that a newer one names are left out of the older ones.  That takes memory for the
ids that all but the oldest name, 8 bytes each.  If there are more than ``MAX_IDS`` of them, they
are divided by a hash of the id, and the chain is read once for each part.

[Note: few files]  A server has many tables, and writes each chunk by chunk, beside the steps.  A
file for each chunk is hundreds of files a save: slow to make, to list and to remove in a store, and
each costs a request.  So chunks of all tables follow one another in one file, as they come; the
manifest says where each is.  Each chunk is the bytes of a safetensors file of its own, with a
checksum of its own: a reader takes one chunk at a time, and nothing larger is ever in memory.  A
file that has reached ``FILE_BYTES`` is followed by another one.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
import torch

from pserver.checkpoint import manifest
from pserver.checkpoint.manifest import (
    Base,
    FileChunk,
    Manifest,
    Parts,
    WholeTensor,
    by_file,
    check_vacant,
    identity_of,
)
from pserver.storage.local import LocalPlace, NewFile, PathLock
from pserver.storage.place import Place, place_at, relative
from transpiler.files.files import shown, write_pieces

# ---- table chunks ----
#
# A table's rows in chunks; and the rows at the end of a chain of checkpoints.
#
# A chunk is a mapping of arrays, as ``SparseTable.scan`` returns it: ``ids`` int64[m] with columns
# of m rows beside it ("values", "state.NAME", ...), ``waiting.ids`` int64[w] with columns
# "waiting.NAME" for ids that are not admitted yet, and in a delta ``removed`` int64[r], ids without
# a row.


MAX_IDS = 1 << 25
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_NAMES = ("ids", "waiting.ids", "removed")

Chunk = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Layer:
    """One checkpoint's part of a table.

    Attributes:
        chunks: reads its chunks, from the first on.
        ids: how many ids they name.
    """

    chunks: Callable[[], Iterator[Chunk]]
    ids: int


def merged(layers: Sequence[Layer], max_ids: int = MAX_IDS) -> Iterator[Chunk]:
    """The rows at the end of a chain: each id once, none that was removed.

    See [Note: merging a chain].

    Args:
        layers: the newest first.
        max_ids: how many ids memory may hold.
    """
    parts = max(1, -(-sum(layer.ids for layer in layers[:-1]) // max_ids))
    for part in range(parts):
        later = np.empty(0, np.int64)
        for layer in layers:
            named = [later]
            for chunk in layer.chunks():
                chunk = _select(chunk, _Part(part, parts)) if parts > 1 else chunk
                if layer is not layers[-1]:
                    named += [chunk[name] for name in _NAMES if name in chunk]
                chunk.pop("removed", None)
                kept = _select(chunk, _Without(later)) if len(later) else chunk
                if rows(kept):
                    yield kept
            later = np.unique(np.concatenate(named))


@dataclass(frozen=True, slots=True)
class _Part:
    """Selects the ids of one part: a hash of the id divides all ids into ``parts``."""

    part: int
    parts: int

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        return np.asarray(
            ((ids.view(np.uint64) * _GOLDEN) >> np.uint64(40)) % np.uint64(self.parts) == self.part
        )


@dataclass(frozen=True, slots=True)
class _Without:
    """Selects the ids that are not among ``ordered``, which is sorted."""

    ordered: np.ndarray

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        positions = np.minimum(np.searchsorted(self.ordered, ids), len(self.ordered) - 1)
        return np.asarray(self.ordered[positions] != ids)


def rows(chunk: Mapping[str, np.ndarray]) -> int:
    """The number of ids in a chunk."""
    return sum(len(chunk[name]) for name in _NAMES if name in chunk)


def _select(chunk: Chunk, selects: Callable[[np.ndarray], np.ndarray]) -> Chunk:
    """The part of a chunk whose ids are selected."""
    masks = {name: selects(chunk[name]) for name in _NAMES if name in chunk}
    return {name: column[masks[_ids_of(name)]] for name, column in chunk.items()}


def _ids_of(column: str) -> str:
    """The name of the ids that a column belongs to."""
    if column == "removed":
        return column
    return "waiting.ids" if column.startswith("waiting.") else "ids"


def check(chunk: Mapping[str, np.ndarray]) -> None:
    """Returns if every column has a value for each of its ids.

    Raises:
        ValueError: one has not, or there are no ids.
    """
    for name, column in chunk.items():
        ids = chunk.get(_ids_of(name))
        if ids is None or ids.dtype != np.int64 or ids.ndim != 1:
            got = "nothing" if ids is None else f"{ids.dtype} {list(ids.shape)}"
            raise ValueError(
                f"a table's rows: {name}: expected int64 [n] as {_ids_of(name)!r}, got {got}"
            )
        if column.ndim < 1 or len(column) != len(ids):
            raise ValueError(
                f"a table's rows: {name}: expected {len(ids)} values, one for each id, got "
                f"{list(column.shape)}"
            )


# ---- row files ----
#
# The rows of all tables of a checkpoint in few files, one chunk after the other.


FILE_BYTES = 2**32  # a file of rows that has so many is followed by another one


class RowFiles:
    """Writes chunks of rows to files.  One thread uses it.

    Args:
        place: of the checkpoint.
        files: what its manifest will list: name -> "size".  Files are added as they begin, and the
            sizes grow.
    """

    def __init__(self, place: Place, files: dict[str, Any]) -> None:
        self._place, self._files = place, files
        self._name = ""
        self._file: NewFile | None = None

    def add(self, chunk: Mapping[str, np.ndarray]) -> FileChunk:
        """Writes a chunk.

        Raises:
            ValueError: a column's length is not that of its ids.
            OSError: the disk is full, or refuses.
        """
        check(chunk)
        file = self._open()
        columns = {key: torch.from_numpy(np.ascontiguousarray(each)) for key, each in chunk.items()}
        begin = self._files[self._name]["size"]
        size, checksum = write_pieces(columns, file.write)
        self._files[self._name]["size"] += size
        return FileChunk(self._name, begin, size, checksum, rows(chunk))

    def _open(self) -> NewFile:
        """The file that is being written."""
        if self._file is not None and self._files[self._name]["size"] >= FILE_BYTES:
            self.finish()
        if self._file is None:
            self._name = f"rows-{secrets.token_hex(8)}.chunks"
            self._files[self._name] = {"size": 0}
            self._file = self._place.create(self._name)
        return self._file

    def finish(self) -> None:
        """Returns when all of it is on the disk, or in the store.

        Raises:
            OSError: the disk is full, or refuses.
        """
        if self._file is not None:
            self._file.finish()
            self._file = None

    def give_up(self) -> None:
        """Stops writing; the caller removes the files."""
        if self._file is not None:
            self._file.give_up()
            self._file = None


def read(place: Place, piece: FileChunk) -> Chunk:
    """Reads the chunk in a part of a file.

    Raises:
        ValueError: the file is missing, torn or changed.
    """
    path = f"{place}/{piece.file}"
    try:
        content = place.read(piece.file, piece.offset, piece.size)
    except FileNotFoundError as error:
        raise ValueError(
            f"{path}: it is missing, and was there when the checkpoint was opened"
        ) from error
    found = hashlib.blake2b(content, digest_size=16).hexdigest()
    if len(content) != piece.size or found != piece.blake2b:
        raise ValueError(f"{path}: its bytes are not those that were saved (checksum)")
    try:
        chunk: Chunk = safetensors.numpy.load(content)
    except (safetensors.SafetensorError, KeyError) as error:
        raise ValueError(
            f"{path}: expected a safetensors file of a table's rows ({error})"
        ) from error
    check(chunk)
    return chunk


# ---- checkpoint ----


MOST_LOCKS = 16


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that was written.  A delta names it as its base.

    Attributes:
        path: its directory, or its URL.
        identity: no other checkpoint has the same.
    """

    path: str
    identity: str

    def __repr__(self) -> str:
        return f"Saved({shown(self.path)!r}, {self.identity!r})"


class Claims:
    """The paths that a job writes to, which no other job does meanwhile: see [Note: one writer].

    Locks are held until :meth:`release`, of the paths that were used last.
    """

    def __init__(self) -> None:
        self._locks: OrderedDict[Place, PathLock] = OrderedDict()
        self._seen: dict[Place, str] = {}

    def hold(self, place: Place) -> None:
        """Locks a place against other writers, where it can.

        Raises:
            InUse: there is one.
            OSError: the disk is full, or refuses.
        """
        lock = self._locks.pop(place, None)
        if lock is None or not lock.holds():
            lock = place.lock()
        if lock is not None:
            self._locks[place] = lock
        while len(self._locks) > MOST_LOCKS:
            self._locks.popitem(last=False)[1].release()

    def begin(self, place: Place) -> bytes | None:
        """Returns the manifest that a save there will replace.

        Raises:
            InUse: it is not the one that this job has last seen there.
        """
        before = manifest.present(place)
        expected = self._seen.get(place)
        found = None if before is None else identity_of(before)
        if expected is not None and place not in self._locks and found not in (None, expected):
            raise manifest.two_writers(place)
        return before

    def saw(self, saved: Saved) -> None:
        """Notes a checkpoint that this job has read or written."""
        self._seen[place_at(saved.path)] = saved.identity

    def release(self) -> None:
        """Releases the locks."""
        while self._locks:
            self._locks.popitem()[1].release()
        self._seen.clear()


def save(
    path: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any]
) -> Saved:
    """Writes a checkpoint of tensors, in place of the one that may be there.

    Args:
        path: the checkpoint's directory, or its URL.
        tensors: by name, on any device and of any dtype and strides.
        meta: values that JSON can hold, by key.

    Returns:
        The checkpoint, to be named as a base.

    Raises:
        TypeError: ``meta`` holds something that is not JSON.
        InUse: another job writes there.
        OSError: the disk is full, or refuses.  The old checkpoint is still the one that ``load``
            gives.
    """
    json.dumps(dict(meta))  # refuse before anything is written
    with writing(path) as writer:
        writer.tensors(tensors)
        return writer.commit(meta)


def load(path: str | os.PathLike[str]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Reads the checkpoint in the directory ``path``.

    Returns:
        The tensors by name, on the CPU, and the metadata.

    Raises:
        FileNotFoundError: there is no complete checkpoint.
        ValueError: there is one, and a file of it is missing, torn or changed.
    """
    reader = reading(path)
    return reader.tensors(), reader.meta


@contextmanager
def writing(
    path: str | os.PathLike[str], base: Saved | None = None, claims: Claims | None = None
) -> Iterator[Writer]:
    """Writes a checkpoint part by part.  Until :meth:`Writer.commit` returns, a reader finds the
    checkpoint that was there before.

    Args:
        path: the checkpoint's directory.  With a base it may be the base's own.
        base: the checkpoint that this one continues: the chunks of tables then hold the rows that
            have changed since, and "removed" ids.
        claims: the job's; without them the path is this writer's for as long as it writes.

    Raises:
        InUse: another job writes there.
        ValueError: the base is missing, was replaced, or is in another store; nothing is written.
    """
    place, own = place_at(path), Claims()
    named = None if base is None else _named(place, base)
    claimed = own if claims is None else claims
    try:
        claimed.hold(place)
        writer = Writer(place, named, claimed.begin(place))
        try:
            yield writer
        finally:
            writer.close()
            if writer.saved is not None:
                claimed.saw(writer.saved)
    finally:
        own.release()


def reading(path: str | os.PathLike[str]) -> Reader:
    """Opens a checkpoint and those that it continues, and checks every file of them.

    Raises:
        FileNotFoundError: there is no complete checkpoint: nothing, or what a save that stopped
            has left.
        ValueError: there is one, and a file of it, or of one that it continues, is missing, torn or
            changed; or other things are there.
    """
    place = place_at(path)
    try:
        newest = manifest.read(place)
    except FileNotFoundError:
        check_vacant(place)
        raise
    return _reader(newest)


def _reader(newest: Manifest) -> Reader:
    links = list(manifest.chain(newest))
    for link in links:
        manifest.check(link)
    return Reader(links, [_reader(part) for part in manifest.parts_of(links[-1])])


def saved_in(path: str | os.PathLike[str]) -> Saved:
    """The checkpoint in a directory, to be named as a base.

    Raises:
        FileNotFoundError: there is none.
    """
    found = manifest.read(place_at(path))
    return Saved(found.place.path, found.identity)


def compact(path: str | os.PathLike[str], target: str | os.PathLike[str]) -> Saved:
    """Writes the state at the end of a chain as one checkpoint that continues no other.

    Memory holds the tensors, one chunk and, up to a bound, the ids that have changed.  See [Note:
    merging a chain] in pserver/checkpoint/checkpoint.py.

    Args:
        path: the directory of the chain's last checkpoint.
        target: the new checkpoint's directory; it may be ``path``.

    Raises:
        FileNotFoundError, ValueError: as :func:`reading` does; ``target`` is left as it was.
        OSError: the disk is full, or refuses; ``target`` is left as it was.
    """
    reader = reading(path)
    with writing(target) as writer:
        writer.tensors(reader.tensors())
        for table in reader.tables:
            writer.chunks(table, reader.chunks(table))
        return writer.commit(reader.meta)


class Writer:
    """Writes one checkpoint.  One thread uses it, inside :func:`writing`.

    Args:
        place: of the checkpoint.
        base: the checkpoint that this one continues.
        before: the manifest that is there.

    Attributes:
        saved: once it is committed.
        wrote: called with the number of bytes written so far, as it grows.
    """

    def __init__(self, place: Place, base: Base | None, before: bytes | None) -> None:
        self._place, self._base, self._before = place, base, before
        self._files: dict[str, Any] = {}
        self._tables: dict[str, list[FileChunk]] = {}
        self._rows = RowFiles(place, self._files)
        self._parts: Parts | None = None
        self._content: bytes | None = None
        self.saved: Saved | None = None
        self.wrote: Callable[[int], None] = lambda size: None

    @property
    def size(self) -> int:
        """Bytes that were written."""
        return sum(file["size"] for file in self._files.values())

    def parts(self, written: Sequence[Saved], tensors: Mapping[str, WholeTensor]) -> None:
        """Names the parts that others have written.  See [Note: parts that others have written] in
        manifest.py.

        Args:
            written: the parts, in their order.
            tensors: by name, the slices of which each is put together.  A tensor that this writer
                adds itself takes the place of one of the same name.

        Raises:
            ValueError: this checkpoint continues another one, which is what its parts may do; or a
                part is on this machine, and the checkpoint is not.
        """
        if self._base is not None:
            raise ValueError(f"{self._place}: expected parts of a checkpoint without a base")
        places = tuple(Base(_path_of_part(self._place, each), each.identity) for each in written)
        self._parts = Parts(places, dict(tensors))

    def tensors(self, named: Mapping[str, torch.Tensor]) -> None:
        """Adds tensors, by name, on any device and of any dtype and strides.

        Raises:
            OSError: the disk is full, or refuses.
        """
        self.drain(_detached(named))

    def drain(self, named: dict[str, torch.Tensor]) -> None:
        """Adds contiguous tensors on the CPU, none of which has memory of another.

        Args:
            named: by name; each is taken out when it is written.

        Raises:
            OSError: the disk is full, or refuses.
        """
        name = f"tensors-{secrets.token_hex(8)}.safetensors"
        listed = self._files[name] = {"size": 0}

        def wrote(size: int) -> None:
            listed["size"] = size
            self.wrote(self.size)

        size, checksum = self._place.write_tensors(name, named, wrote)
        self._files[name] = {"size": size, "blake2b": checksum}

    def chunks(self, table: str, chunks: Iterable[Mapping[str, np.ndarray]]) -> int:
        """Adds a table, one chunk at a time.

        Args:
            table: its name.
            chunks: in the form that pserver/checkpoint/checkpoint.py describes.

        Returns:
            How many ids the chunks name.

        Raises:
            ValueError: the table was written before, or a chunk's columns differ in length.
            OSError: the disk is full, or refuses.
        """
        if table in self._tables:
            raise ValueError(f"{self._place}: expected each table once, got {table!r} again")
        pieces: list[FileChunk] = []
        self._tables[table] = pieces
        for chunk in chunks:
            if rows(chunk):
                pieces.append(self._rows.add(chunk))
                self.wrote(self.size)
        return sum(piece.ids for piece in pieces)

    def commit(self, meta: Mapping[str, Any]) -> Saved:
        """Makes what was written the directory's checkpoint, in place of the one that may be there.

        Raises:
            TypeError: ``meta`` holds something that is not JSON.
            ValueError: the base is missing, or was replaced meanwhile.
            InUse: another job has replaced the checkpoint meanwhile.
            OSError: the disk is full, or refuses.  The old checkpoint is still the one that is
                read.
        """
        self._rows.finish()
        self._content = manifest.encode(meta, self._files, self._tables, self._base, self._parts)
        written = manifest.commit(self._place, self._content, self._before)
        self.saved = Saved(self._place.path, written.identity)
        return self.saved

    def close(self) -> None:
        """Removes the files that were written, if no checkpoint lists them, so that a full disk
        gets its space back.
        """
        if self._content is not None and manifest.present(self._place) == self._content:
            self.saved = Saved(self._place.path, identity_of(self._content))
        else:
            self._rows.give_up()
            for name in self._files:
                self._place.remove(name)


class Reader:
    """An open checkpoint, all of whose files have passed the check.

    Attributes:
        meta: the metadata that :meth:`Writer.commit` was given.
        tables: the names of its tables.
        saved: the checkpoint, to be named as a base.
        parts: the parts that others have written, in order.
    """

    def __init__(self, links: list[Manifest], parts: Sequence[Reader] = ()) -> None:
        self._links, self.parts = links, tuple(parts)
        self.meta: dict[str, Any] = links[0].meta
        theirs = (name for part in parts for name in part.tables)
        self.tables: list[str] = list(dict.fromkeys([*links[0].tables, *theirs]))
        self.saved = Saved(links[0].place.path, links[0].identity)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors, on the CPU.

        Raises:
            ValueError: a slice is in none of the parts.
        """
        return self._assembled() | self._own()

    def _assembled(self) -> dict[str, torch.Tensor]:
        """The tensors that are assembled from slices in the parts."""
        described = self._links[0].parts
        if described is None:
            return {}
        parts, found = [part.tensors() for part in self.parts], {}
        for name, whole in described.tensors.items():
            try:
                tensor = whole.assembled(name, parts)
            except ValueError as error:
                raise ValueError(f"{shown(self.saved.path)}: {error}") from error
            if tensor is not None:
                found[name] = tensor
        return found

    def _own(self) -> dict[str, torch.Tensor]:
        newest = self._links[0]
        rows = by_file(newest.tables)
        found: dict[str, torch.Tensor] = {}
        for name in newest.files:
            if name not in rows:
                found.update(newest.place.tensors(name))
        return found

    def chunks(self, table: str, max_ids: int = MAX_IDS) -> Iterator[Chunk]:
        """A table's rows, a chunk at a time: each id once, as it is at the end of the chain, and
        none that was removed.

        Args:
            max_ids: how many ids of the checkpoints that continue another one memory may hold (8
                bytes each); if there are more, the chain is read more than once.

        Raises:
            KeyError: there is no such table.
            ValueError: a file was changed or removed since the checkpoint was opened.
        """
        if name_in(table, self.tables) not in self.tables:
            raise KeyError(
                f"{self.saved.path}: no table {table!r}; expected one of "
                f"{', '.join(self.tables) or 'none'}"
            )
        layers = [
            _layer(link, link.tables.get(name_in(table, link.tables), [])) for link in self._links
        ]
        holders = [part for part in self.parts if name_in(table, part.tables) in part.tables]
        if holders:  # the oldest checkpoint of the chain has its rows in them
            layers.append(Layer(lambda: chain(*(each.chunks(table) for each in holders)), 0))
        return merged(layers, max_ids)


def name_in(table: str, saved: Collection[str]) -> str:
    """The name of a table in a checkpoint.  A program names the rows of an ``nn.Embedding`` after
    its weight, a script of ``fleet`` after the module; each reads the other's.

    Args:
        table: its name in a job.
        saved: the names in the checkpoint.
    """
    if table in saved:
        return table
    name, at, part = table.partition("@")
    module = name.removesuffix(".weight")
    other = (module if module != name else f"{name}.weight") + at + part
    return other if other in saved else table


def _layer(link: Manifest, pieces: Sequence[FileChunk]) -> Layer:
    def chunks() -> Iterator[Chunk]:
        return (read(link.place, piece) for piece in pieces)

    return Layer(chunks, sum(piece.ids for piece in pieces))


def _named(place: Place, base: Saved) -> Base:
    """A base in the form in which a manifest in this place names it.

    Raises:
        ValueError: it is missing, was replaced, or is in another store.
    """
    named = Base(relative(place, place_at(base.path)), base.identity)
    for _ in manifest.chain(manifest.resolve(place, named)):
        pass
    return named


def _path_of_part(place: Place, part: Saved) -> str:
    """A part's path relative to the checkpoint's; its URL, where it is in another store.

    Raises:
        ValueError: it is on this machine, and the checkpoint is not.
    """
    there = place_at(part.path)
    try:
        return relative(place, there)
    except ValueError:
        if isinstance(there, LocalPlace):
            raise
        return there.path


def _detached(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous tensors on the CPU, no two of which share memory, as safetensors needs them."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        found[name] = tensor.detach().cpu().contiguous()
        address = found[name].untyped_storage().data_ptr()
        if address in seen:
            found[name] = found[name].clone()
        seen.add(address)
    return found
