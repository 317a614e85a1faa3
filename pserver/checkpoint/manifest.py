"""``checkpoint.json``: the files of a checkpoint, the other checkpoint that it continues, and which
old files may be removed.

[Note: chains of checkpoints]  A delta holds all tensors, and of the tables only the rows that
changed since another checkpoint, its base, was saved.  It names the base by a path relative to its
own, and by the base's identity: the checksum of the base's ``checkpoint.json``, which lists the
checksums of everything else.  So a replaced base is detected.  A base may be a delta
itself.  A delta and its base are in one store: on this machine's disks, or behind URLs of one kind.

A save may replace a checkpoint that is needed as a base: by the new delta in the same place, or by
a delta in another place.  It first gives the old manifest a second name,
``checkpoint-IDENTITY.json``, and the files that it lists stay.  For a delta in another place the
base's place holds a note, ``needed-by-....json``, with the delta's path, relative to its own.  When
the checkpoint there no longer continues a checkpoint of this one, the note is removed, and the next
save removes the files.  A note that is damaged keeps all files.

[Note: parts that others have written]  Every server of a job may write what it holds by itself, as
a checkpoint of its own: a part.  The manifest that names the parts is written last, by the process
that asked for them.  It names each by its path, relative to its own or, in another store, as a URL,
and by its identity; and it says of which slices in which parts each tensor is put together.  The
tables of a part are those rows of the tables that its server holds.  So any number of servers can
resume.  Each part has a chain of its own; the checkpoint that names them has none, but another one
may continue it.  A save that replaces a checkpoint has its parts in a new directory below,
``parts-...``, so that the old one stays whole until the new manifest replaces it.

[Note: the checksum of the metadata]  The checksum is over the bytes of the whole file, in which
zeros stand where it is written itself: its last entry.  So every changed bit is noticed, spaces
among them.  Formats 1 and 2, of older versions, have no checksum and are read as they are; a file
that has one is checked whatever its format says.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from typing import Any

import torch

from pserver.storage.local import PARTIAL, InUse, LocalPlace, myself
from pserver.storage.place import Place, place_at, relative
from transpiler.files import bounded_json
from transpiler.files.files import is_url

# ---- listed ----
#
# ``checkpoints.json``: the checkpoints of a folder that are complete, the newest last.


LIST = "checkpoints.json"


@dataclass(frozen=True, slots=True)
class CompleteCheckpoint:
    """A complete checkpoint of the folder.

    Attributes:
        name: of its directory.
        base: the name of the checkpoint that it continues; "" for one that has all rows of tables.
    """

    name: str
    base: str = ""


def listed_in(place: Place) -> tuple[bytes | None, list[CompleteCheckpoint]]:
    """The list of a folder: its bytes, None where it has none, and what they say.

    Raises:
        ValueError: it is damaged.
        OSError: it cannot be read.
    """
    if place.size(LIST) is None:
        return None, []
    content = place.read(LIST)
    return content, _parsed(content, f"{place}/{LIST}")


def list_bytes(kept: list[CompleteCheckpoint]) -> bytes:
    """A list as its file has it."""
    entries = [{"name": each.name, "base": each.base} for each in kept]
    return json.dumps({"format": 1, "checkpoints": entries}, indent=1).encode()


def _parsed(content: bytes, where: str) -> list[CompleteCheckpoint]:
    try:
        said: dict[str, Any] = bounded_json.loads(content)
        kept = [
            CompleteCheckpoint(str(each["name"]), str(each["base"])) for each in said["checkpoints"]
        ]
        names = {each.name for each in kept}
        if said["format"] != 1 or any(each.base and each.base not in names for each in kept):
            raise ValueError(said["format"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{where}: expected a list of checkpoints, got something else") from error
    return kept


# ---- manifest bytes ----
#
# The bytes of a ``checkpoint.json``: JSON that carries a checksum of itself.


FORMAT = 4
_OLD, _WITHOUT_CHECKSUM = (1, 2, 3), (1, 2)
_KEY, _BLANK = "checksum", "0" * 32


def packed(content: Mapping[str, Any]) -> bytes:
    """The bytes of a file with this content.

    Raises:
        TypeError: it holds something that is not JSON.
    """
    blank = (json.dumps({"format": FORMAT, **content, _KEY: _BLANK}, indent=1) + "\n").encode()
    before, _, after = blank.rpartition(_BLANK.encode())
    return before + identity_of(blank).encode() + after


def unpacked(content: bytes, where: str) -> dict[str, Any]:
    """The content of a file; it has the keys "files" and "meta", which are objects.

    Args:
        where: the file, for messages.

    Raises:
        ValueError: the bytes are no such file, or were changed.
    """
    try:
        found = bounded_json.loads(content)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error})") from error
    if not isinstance(found, dict) or not all(
        isinstance(found.get(key), dict) for key in ("files", "meta")
    ):
        raise ValueError(f"{where}: expected an object with the keys format, meta and files")
    kind = found.get("format")
    if kind not in (*_OLD, FORMAT):
        raise ValueError(f"{where}: expected format 1, 2, 3 or {FORMAT}, got {kind!r}")
    if kind not in _WITHOUT_CHECKSUM or _KEY in found:
        said = str(found.get(_KEY))
        before, _, after = content.rpartition(said.encode("ascii", "replace") or b"?")
        if len(said) != len(_BLANK) or identity_of(before + _BLANK.encode() + after) != said:
            raise ValueError(f"{where}: its bytes are not those that were saved (checksum)")
    return found


def identity_of(content: bytes) -> str:
    """The identity of the checkpoint with these bytes as its ``checkpoint.json``: BLAKE2b, 16 bytes
    in hexadecimal.
    """
    return hashlib.blake2b(content, digest_size=16).hexdigest()


# ---- piece ----
#
# Where a chunk of a table's rows is: a part of a file, as ``checkpoint.json`` names it.


@dataclass(frozen=True, slots=True)
class FileChunk:
    """A chunk in a file.

    Attributes:
        file: its name.
        offset, size: where the chunk is in it, in bytes.
        blake2b: of these bytes, 16 bytes in hexadecimal.
        ids: how many ids the chunk names.
    """

    file: str
    offset: int
    size: int
    blake2b: str
    ids: int

    def plain(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)


def pieces_of(tables: Any, files: Mapping[str, Any]) -> dict[str, list[FileChunk]]:
    """The chunks of each table.

    Formats 1 to 3 name a table's files instead, each of which is a chunk.

    Args:
        tables: as ``checkpoint.json`` has them.
        files: that it lists.

    Raises:
        ValueError: they are something else, or a chunk is in no file that is listed.
    """
    try:
        found = {
            str(table): [_piece_of(each, files) for each in listed]
            for table, listed in tables.items()
        }
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ValueError(
            f"expected each table's chunks in files that are listed, got {tables!r}"
        ) from error
    if any(piece.file not in files for pieces in found.values() for piece in pieces):
        raise ValueError(f"expected each table's chunks in files that are listed, got {tables!r}")
    return found


def _piece_of(plain: Any, files: Mapping[str, Any]) -> FileChunk:
    if isinstance(plain, str):
        whole = files[plain]
        return FileChunk(
            plain, 0, int(whole["size"]), str(whole["blake2b"]), int(whole.get("ids", 0))
        )
    return FileChunk(
        str(plain["file"]),
        int(plain["offset"]),
        int(plain["size"]),
        str(plain["blake2b"]),
        int(plain["ids"]),
    )


def by_file(tables: Mapping[str, list[FileChunk]]) -> dict[str, list[FileChunk]]:
    """The chunks of all tables by file, in the order in which they are in it."""
    found: dict[str, list[FileChunk]] = {}
    for pieces in tables.values():
        for piece in pieces:
            found.setdefault(piece.file, []).append(piece)
    return {name: sorted(pieces, key=lambda each: each.offset) for name, pieces in found.items()}


def is_whole(pieces: list[FileChunk], size: Any) -> bool:
    """Whether these chunks, in order, cover a file from its beginning to its end.

    Args:
        size: of the file.
    """
    end = 0
    for piece in pieces:
        if piece.offset != end or piece.size < 0:
            return False
        end += piece.size
    return bool(end == size)


# ---- whole tensor ----
#
# A tensor whose slices are in several parts of a checkpoint, and what it is put together from.


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """The places of a tensor's slices.

    Attributes:
        shape: of the whole.
        slices: in the order of their elements: the number of the part, and the slice's name there.

    Example::

        whole = WholeTensor((4,), ((0, "w.block0"), (1, "w.block1")))
        parts = [{"w.block0": torch.zeros(3)}, {"w.block1": torch.ones(1)}]
        whole.assembled("w", parts)     # tensor([0., 0., 0., 1.])
    """

    shape: tuple[int, ...]
    slices: tuple[tuple[int, str], ...]

    def plain(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {"shape": list(self.shape), "slices": [list(each) for each in self.slices]}

    @classmethod
    def of(cls, plain: Any, parts: int) -> WholeTensor:
        """Restores from :meth:`plain`.

        Args:
            parts: how many there are.

        Raises:
            ValueError: it is something else.
        """
        try:
            found = cls(
                tuple(int(size) for size in plain["shape"]),
                tuple((int(part), str(name)) for part, name in plain["slices"]),
            )
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise ValueError(f"expected a shape and slices, got {plain!r}") from error
        if not found.slices or not all(0 <= part < parts for part, _ in found.slices):
            raise ValueError(f"expected slices in {parts} parts, got {plain['slices']!r}")
        return found

    def assembled(
        self, name: str, parts: Sequence[Mapping[str, torch.Tensor]]
    ) -> torch.Tensor | None:
        """The whole tensor; None where no part has a slice of it, as with the state of an optimizer
        that has taken no step.

        Args:
            name: of the whole, for messages.
            parts: the tensors of each part, by name.

        Raises:
            ValueError: a slice is missing, or they have another number of elements.
        """
        found = [parts[part][own] for part, own in self.slices if own in parts[part]]
        if not found:
            return None
        if len(found) == len(self.slices) and found[0].dim() == 0 and self.shape:
            return found[0].clone()  # a number that every slice has: the count of steps
        elements = sum(each.numel() for each in found)
        if len(found) < len(self.slices) or elements != math.prod(self.shape):
            raise ValueError(
                f"{name}: expected {len(self.slices)} slices of {list(self.shape)}, got "
                f"{len(found)} with {elements} elements"
            )
        return torch.cat([each.reshape(-1) for each in found]).view(self.shape)


# ---- manifest ----


MANIFEST = "checkpoint.json"
PARTS = re.compile(r"parts-[0-9a-f]{16}")  # a directory of the parts of one save
_WRITTEN = (
    "tensors-*.safetensors",
    "rows-*.chunks",
    "rows-*.safetensors",  # of formats 1 to 3
    f"{MANIFEST}.*",
    "checkpoint-*.json",
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Base:
    """The checkpoint that a delta continues.

    Attributes:
        path: of its place, relative to the delta's.
        identity: see :class:`Manifest`.
    """

    path: str
    identity: str


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a checkpoint.  See [Note: parts that others have written].

    Attributes:
        places: of each part its path, relative to the checkpoint's or a URL, and its identity.
        tensors: by name, the slices of which each is put together.
    """

    places: tuple[Base, ...]
    tensors: Mapping[str, WholeTensor]


@dataclass(frozen=True, slots=True)
class Manifest:
    """One complete checkpoint.

    Attributes:
        place: where its files are.
        identity: the checksum of ``checkpoint.json``; no other checkpoint has the same.
        meta: the caller's metadata.
        files: name -> size (bytes) and, for a file without chunks of tables, blake2b.
        tables: name -> its chunks, in order.
        base: the checkpoint that this one continues, if any.
        by: the process that wrote it; "" in old files.
        parts: that others have written, if any.
    """

    place: Place
    identity: str
    meta: dict[str, Any]
    files: dict[str, Any]
    tables: dict[str, list[FileChunk]] = field(default_factory=dict)
    base: Base | None = None
    by: str = ""
    parts: Parts | None = None


def encode(
    meta: Mapping[str, Any],
    files: Mapping[str, Any],
    tables: Mapping[str, list[FileChunk]],
    base: Base | None,
    parts: Parts | None = None,
) -> bytes:
    """The bytes of a ``checkpoint.json``.

    Raises:
        TypeError: ``meta`` holds something that is not JSON.
    """
    content: dict[str, Any] = {"by": myself(), "meta": dict(meta), "files": dict(files)}
    if tables or base is not None:
        content["tables"] = {
            name: [each.plain() for each in pieces] for name, pieces in tables.items()
        }
    if base is not None:
        content["base"] = _plain_base(base)
    if parts is not None:
        content["parts"] = {
            "places": [_plain_base(each) for each in parts.places],
            "tensors": {name: whole.plain() for name, whole in parts.tensors.items()},
        }
    return packed(content)


def _plain_base(base: Base) -> dict[str, str]:
    return {"path": base.path, "identity": base.identity}


def read(place: Place) -> Manifest:
    """The complete checkpoint in this place.

    Raises:
        FileNotFoundError: there is none.
        ValueError: the manifest is damaged.
    """
    if place.size(MANIFEST) is None:
        raise FileNotFoundError(f"no complete checkpoint in {place}: expected a file {MANIFEST}")
    return _parse(place, place.read(MANIFEST), MANIFEST)


def chain(manifest: Manifest) -> Iterator[Manifest]:
    """The checkpoint, its base, the base's base and so on.

    Raises:
        ValueError: a base is missing, was replaced, or is damaged.
    """
    yield manifest
    while (base := manifest.base) is not None:
        manifest = resolve(manifest.place, base)
        yield manifest


def everything(manifest: Manifest) -> Iterator[Manifest]:
    """All that a checkpoint is read from: itself, what it continues, its parts, and what these
    are read from.

    Raises:
        ValueError: something of it is missing, was replaced, or is damaged.
    """
    for link in chain(manifest):
        yield link
        for part in parts_of(link):
            yield from everything(part)


def part_places(manifest: Manifest) -> list[Place]:
    """The places of a checkpoint's parts."""
    parts = () if manifest.parts is None else manifest.parts.places
    return [
        place_at(part.path) if is_url(part.path) else manifest.place.at(part.path) for part in parts
    ]


def parts_of(manifest: Manifest) -> list[Manifest]:
    """The parts of a checkpoint.

    Raises:
        ValueError: one is missing, was replaced, or is damaged.
    """
    if manifest.parts is None:
        return []
    found = []
    for there, part in zip(part_places(manifest), manifest.parts.places, strict=True):
        try:
            found.append(_identified(there, part.identity))
        except LookupError as error:
            raise ValueError(f"{manifest.place}: its part in {there} {error.args[0]}") from error
    return found


def resolve(place: Place, base: Base) -> Manifest:
    """The base of a checkpoint in this place.

    Raises:
        ValueError: it is missing, was replaced, or is damaged.
    """
    there = place.at(base.path)
    try:
        return _identified(there, base.identity)
    except LookupError as error:
        raise ValueError(
            f"{place}: it continues the checkpoint in {there}, and that {error.args[0]}"
        ) from error


def _identified(there: Place, identity: str) -> Manifest:
    """The checkpoint of this identity in a place.

    Raises:
        LookupError: it is missing, or was replaced.
        ValueError: it is damaged.
    """
    found = None
    for name in (MANIFEST, _kept(identity)):
        if there.size(name) is not None:
            content = there.read(name)
            found = identity_of(content)
            if found == identity:
                return _parse(there, content, name)
    if found is None:
        raise LookupError("is missing")
    raise LookupError(f"was replaced: expected identity {identity}, got {found}")


def check(manifest: Manifest) -> None:
    """Reads every file of a checkpoint.

    Raises:
        ValueError: one is missing, torn or changed.
    """
    rows = by_file(manifest.tables)
    for name, metadata in manifest.files.items():
        where = f"{manifest.place}/{MANIFEST}"
        if not isinstance(metadata, dict):
            raise ValueError(f"{where}: expected size and blake2b of {name}, got {metadata!r}")
        size = metadata.get("size")
        parts = [(size, metadata.get("blake2b"))]
        if name in rows:
            if not is_whole(rows[name], size):
                raise ValueError(
                    f"{where}: expected chunks of tables that follow one another up to byte {size} "
                    f"of {name}, got {[(each.offset, each.size) for each in rows[name]]}"
                )
            parts = [(each.size, each.blake2b) for each in rows[name]]
        _check_file(manifest.place, name, size, parts)


def _check_file(place: Place, name: str, size: Any, parts: Sequence[tuple[Any, Any]]) -> None:
    """Returns if a file has the size and the checksums that a manifest lists.

    Args:
        parts: that follow one another: the size and the checksum of each.

    Raises:
        ValueError: the file is missing, torn or changed.
    """
    found = place.size(name)
    if found is None:
        raise ValueError(
            f"{place}/{name}: {MANIFEST} lists it, and it is missing, or is a link or no file"
        )
    if found != size:
        raise ValueError(f"{place}/{name}: torn: expected {size} bytes, got {found}")
    if place.checksums(name, [each for each, _ in parts]) != [each for _, each in parts]:
        raise ValueError(f"{place}/{name}: its bytes are not those that were saved (checksum)")


def present(place: Place) -> bytes | None:
    """The manifest that is in a place now."""
    try:
        return place.read(MANIFEST) if place.size(MANIFEST) is not None else None
    except FileNotFoundError:
        return None


def commit(place: Place, content: bytes, before: bytes | None) -> Manifest:
    """Makes this the place's manifest, and thereby its checkpoint the one that readers find.

    The files that a chain needs stay: see [Note: chains of checkpoints].

    Args:
        before: the manifest that is replaced, as it was when writing began.

    Raises:
        InUse: it has been replaced meanwhile.
        OSError: the disk is full, or refuses.
    """
    manifest = _parse(place, content, MANIFEST)
    links = list(chain(manifest))
    for other in {link.place for link in links} - {place}:
        _note(other, place)
    needed = {link.identity for link in links if link.place == place} | _needed_elsewhere(place)
    _keep(place, needed - {manifest.identity})
    place.flush()  # the names of the files that the manifest lists
    if not place.replace(MANIFEST, content, before):
        raise two_writers(place)
    place.flush()
    _remove_old(place, manifest, needed)
    return manifest


def two_writers(place: Place) -> InUse:
    """The error of a job that finds another job's checkpoint in place of the one it expected."""
    try:
        other = read(place).by or "another process"
    except (OSError, ValueError):
        other = "another process"
    return InUse(
        f"{place}: two jobs write checkpoints to this path: {myself()}, and {other}, which has "
        "replaced the checkpoint meanwhile: give each job a path of its own"
    )


def _kept(identity: str) -> str:
    return f"checkpoint-{identity}.json"


def _note_name(by: str) -> str:
    return f"needed-by-{identity_of(by.encode())[:16]}.json"


def _put(place: Place, name: str, content: bytes) -> None:
    """Puts a file there, in place of the one that may be there."""
    if isinstance(place, LocalPlace):
        place.replace(name, content)
    else:
        place.write(name, content)


def _note(base: Place, delta: Place) -> None:
    """Leaves a note in a base's place that a delta needs it.

    A place that cannot be written to gets none, and cannot lose files either.
    """
    if base.writable():
        by = relative(base, delta)
        _put(base, _note_name(by), json.dumps({"by": by}).encode())
        base.flush()


def _needed_elsewhere(place: Place) -> set[str]:
    """Identities of this place's checkpoints that deltas in other places continue.

    Removes the notes that no delta needs any more.
    """
    needed: set[str] = set()
    names = place.names()
    for name in (each for each in names if fnmatch(each, "needed-by-*.json")):
        try:
            by = bounded_json.loads(place.read(name))["by"]
            damaged = _note_name(by) != name
        except (ValueError, KeyError, TypeError, AttributeError):
            damaged = True
        if damaged:
            log.warning("%s/%s: it is damaged; the files of all old checkpoints stay", place, name)
            needed |= _identities(place, names)
            continue
        delta = place.at(by)
        mine = _continued(delta, place) if delta != place else set()
        if not mine:
            place.remove(name)
        needed |= mine
    return needed


def _identities(place: Place, names: list[str]) -> set[str]:
    """The identities of all checkpoints in a place, old ones included."""
    kept = {name[len("checkpoint-") : -len(".json")] for name in names if fnmatch(name, _kept("*"))}
    content = present(place)
    return kept if content is None else kept | {identity_of(content)}


def _continued(delta: Place, place: Place) -> set[str]:
    """Identities of those checkpoints in ``place`` that the one in ``delta`` continues."""
    mine = set()
    try:
        for link in chain(read(delta)):
            mine |= {link.identity} if link.place == place else set()
    except (FileNotFoundError, ValueError):
        pass  # no checkpoint there, or its chain ends here
    return mine


def _keep(place: Place, needed: set[str]) -> None:
    """Gives the manifest that is about to be replaced its second name, if a chain needs it."""
    content = present(place)
    if content is None:
        return
    identity = identity_of(content)
    if identity in needed and place.size(_kept(identity)) is None:
        _put(place, _kept(identity), content)


def _remove_old(place: Place, manifest: Manifest, needed: set[str]) -> None:
    """Removes the files of older saves and of stopped ones, except those that a chain needs, and
    no file that a save has not written.
    """
    names = place.names()
    kept = {
        name: _parse(place, place.read(name), name) for name in map(_kept, needed) if name in names
    }
    keep = {MANIFEST, *manifest.files, *kept}.union(*(each.files for each in kept.values()))
    for name in names:
        if name not in keep and any(fnmatch(name, pattern) for pattern in _WRITTEN):
            place.remove(name)
    place.tidy()
    _remove_old_parts(place, [manifest, *kept.values()])


def _remove_old_parts(place: Place, needed: Sequence[Manifest]) -> None:
    """Removes the directories of parts below a place that no needed checkpoint names; a failure is
    only logged.
    """
    named = {
        piece
        for found in needed
        for each in (() if found.parts is None else found.parts.places)
        for piece in each.path.split("/")
    }
    for name in place.directories():
        if PARTS.fullmatch(name) and name not in named and _is_below(place, name):
            try:
                clear(place.at(name))
            except OSError as error:
                log.warning("%s/%s: old parts could not be removed: %s", place, name, error)


def _is_below(place: Place, name: str) -> bool:
    """Whether a directory is there itself, and not a link to another one."""
    return relative(place, place.at(name)) == name


def clear(place: Place) -> None:
    """Removes all files of a place, those of its servers' parts too, and the directory."""
    for name in place.directories():
        if fnmatch(name, "server-*") and _is_below(place, name):
            clear(place.at(name))
    for file in sorted(place.names(), key=lambda file: file != MANIFEST):
        place.remove(file)
    if isinstance(place, LocalPlace) and place.directory.is_dir():
        place.tidy()
        place.directory.rmdir()


def _parse(place: Place, content: bytes, name: str) -> Manifest:
    where = f"{place}/{name}"
    found = unpacked(content, where)
    for file in found["files"]:
        if not file or "/" in file or file in (".", ".."):
            raise ValueError(f"{where}: expected names of files beside it, got {file!r}")
    try:
        tables = pieces_of(found.get("tables", {}), found["files"])
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return Manifest(
        place,
        identity_of(content),
        found["meta"],
        found["files"],
        tables,
        _base(found.get("base"), where),
        str(found.get("by", "")),
        _parts(found.get("parts"), found.get("base"), where),
    )


def _parts(found: Any, base: Any, where: str) -> Parts | None:
    if found is None:
        return None
    try:
        named = found["places"], found["tensors"].items()
        places = tuple(Base(str(each["path"]), str(each["identity"])) for each in named[0])
        tensors = {str(name): WholeTensor.of(each, len(places)) for name, each in named[1]}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{where}: expected places and tensors of parts ({error})") from error
    if base is not None:
        raise ValueError(f"{where}: expected parts, or a base, got both")
    if any(each.path.startswith("/") or not each.identity.isalnum() for each in places):
        raise ValueError(
            f"{where}: expected relative paths of parts, or URLs, and their identities, got "
            f"{found['places']!r}"
        )
    return Parts(places, tensors)


def _base(found: Any, where: str) -> Base | None:
    if found is None:
        return None
    if not isinstance(found, dict) or not all(
        isinstance(found.get(key), str) for key in ("path", "identity")
    ):
        raise ValueError(f"{where}: expected a base's path and identity, got {found!r}")
    if found["path"].startswith("/") or not found["identity"].isalnum():
        raise ValueError(
            f"{where}: expected a base's relative path and its identity, got {found!r}"
        )
    return Base(found["path"], found["identity"])


# ---- strangers ----
#
# What lies in a directory that is no part of any checkpoint.


# what a save writes, also one that stopped before its end; what the system puts into a new volume
_FILES = ("checkpoint*.json*", "tensors-*", "rows-*", "needed-by-*.json", f"{PARTIAL}*", ".*")
_DIRECTORIES = ("server-*", "parts-*", f"{PARTIAL}*", "lost+found", ".*")
_SHOWN, _LOOKED_INTO = 3, 16


def strangers(place: Place) -> list[str]:
    """The names, in order, of the files and directories in a place that no save has written."""
    return sorted(_files(place) + _directories(place))


def _files(place: Place) -> list[str]:
    return [n for n in place.names() if not any(fnmatch(n, each) for each in _FILES)]


def _directories(place: Place) -> list[str]:
    return [n for n in place.directories() if not any(fnmatch(n, each) for each in _DIRECTORIES)]


def some(names: list[str]) -> str:
    """Some names, for a message."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def check_vacant(place: Place) -> None:
    """Returns if a checkpoint may be created here: the place is empty, or has what a stopped save
    left.

    Raises:
        ValueError: the place has something else, so the path is probably not the intended one.
    """
    if isinstance(place, LocalPlace) and place.directory.is_file():
        raise ValueError(f"{place}: expected the directory of a checkpoint, got a file")
    if not (names := strangers(place)):
        return
    last = sorted(place.directories())[-_LOOKED_INTO:]
    inside = [name for name in last if place.at(name).size(MANIFEST) is not None]
    meant = f"; expected the path of one, as {place}/{inside[-1]}" if inside else ""
    raise ValueError(f"{place} is no checkpoint: it has no {MANIFEST}, but {some(names)}{meant}")


def check_unshared(place: Place) -> None:
    """Returns if a checkpoint may be written here: the place has one, or nothing, or what a stopped
    save left.  Other checkpoints may lie below.

    Raises:
        ValueError: the place has other files, among which those of a checkpoint would lie.
    """
    if place.size(MANIFEST) is not None:
        return
    found = _files(place)
    found += [name for name in _directories(place) if place.at(name).size(MANIFEST) is None]
    if found:
        raise ValueError(
            f"{place}: expected a new directory, an empty one, or that of a checkpoint, got one "
            f"with {some(sorted(found))}: give the checkpoint a directory of its own, as "
            f"{place}/saved"
        )
