"""``checkpoint.json``: the files of a checkpoint, the other checkpoint that it continues, and which
old files may be removed.

[Note: chains of checkpoints]  A delta holds all tensors, and of the tables only the rows that
changed since another checkpoint, its base, was saved.  It names the base by a directory, relative
to its own, and by the base's identity: the checksum of the base's ``checkpoint.json``, which lists
the checksums of everything else.  So a base that was replaced is noticed.  A base may be a delta
itself.

A save may replace a checkpoint that is needed as a base: by the new delta in the same directory, or
by a delta in another directory.  It first gives the old manifest a second name,
``checkpoint-IDENTITY.json``, and the files that it lists stay.  For a delta in another directory
the base's directory holds a note, ``needed-by-....json``, with the delta's directory, relative to
its own.  When the checkpoint in that directory no longer continues a checkpoint of this one, the
note is removed, and the next save removes the files.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MANIFEST = "checkpoint.json"
PLAIN, FORMAT = 1, 2  # without tables and a base a manifest is written in the first format
PARTIAL = "writing-"  # begins the name of a directory for files that are being written
_CHUNK = 1 << 20
_WRITTEN = ("tensors-*.safetensors", "rows-*.safetensors", f"{MANIFEST}.*", "checkpoint-*.json")


@dataclass(frozen=True, slots=True)
class Base:
    """The checkpoint that a delta continues.

    Attributes:
        path: its directory, relative to the delta's.
        identity: see :class:`Manifest`.
    """

    path: str
    identity: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """One complete checkpoint.

    Attributes:
        directory: where its files are.
        identity: the checksum of ``checkpoint.json``; no other checkpoint has the same.
        meta: the caller's metadata.
        files: name -> size (bytes), blake2b and, for a table's file, the number of ids in it.
        tables: name -> names of its files, in order.
        base: the checkpoint that this one continues, if any.
    """

    directory: Path
    identity: str
    meta: dict[str, Any]
    files: dict[str, Any]
    tables: dict[str, list[str]] = field(default_factory=dict)
    base: Base | None = None


def encode(
    meta: Mapping[str, Any],
    files: Mapping[str, Any],
    tables: Mapping[str, list[str]],
    base: Base | None,
) -> bytes:
    """The bytes of a ``checkpoint.json``.

    Raises:
        TypeError: ``meta`` holds something that is not JSON.
    """
    content: dict[str, Any] = {"format": PLAIN, "meta": dict(meta), "files": dict(files)}
    if tables or base is not None:
        content |= {"format": FORMAT, "tables": dict(tables)}
    if base is not None:
        content["base"] = {"path": base.path, "identity": base.identity}
    return (json.dumps(content, indent=1) + "\n").encode()


def identity_of(content: bytes) -> str:
    """The identity of the checkpoint with these bytes as its ``checkpoint.json``."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def read(directory: Path) -> Manifest:
    """The complete checkpoint in this directory.  Every directory in this file is a resolved path.

    Raises:
        FileNotFoundError: there is none.
        ValueError: the manifest is damaged.
    """
    if not (directory / MANIFEST).is_file():
        raise FileNotFoundError(
            f"no complete checkpoint in {directory}: expected a file {MANIFEST}"
        )
    return _decode(directory / MANIFEST)


def chain(manifest: Manifest) -> Iterator[Manifest]:
    """The checkpoint, its base, the base's base and so on.

    Raises:
        ValueError: a base is missing, was replaced, or is damaged.
    """
    yield manifest
    while (base := manifest.base) is not None:
        manifest = resolve(manifest.directory, base)
        yield manifest


def resolve(directory: Path, base: Base) -> Manifest:
    """The base of a checkpoint in this directory.

    Raises:
        ValueError: it is missing, was replaced, or is damaged.
    """
    there = (directory / base.path).resolve()
    found = None
    for path in (there / MANIFEST, _kept(there, base.identity)):
        if path.is_file():
            found = identity_of(path.read_bytes())
            if found == base.identity:
                return _decode(path)
    if found is None:
        raise ValueError(
            f"{directory}: it continues the checkpoint in {there}, and that is missing"
        )
    where = f"{directory}: it continues the checkpoint in {there}, and that was replaced"
    raise ValueError(f"{where}: expected identity {base.identity}, got {found}")


def check(manifest: Manifest) -> None:
    """Reads every file of a checkpoint.

    Raises:
        ValueError: one is missing, torn or changed.
    """
    for name, metadata in manifest.files.items():
        check_file(manifest.directory / name, metadata)


def check_file(path: Path, metadata: Any) -> None:
    """Returns if a file has the size and the checksum that a manifest lists.

    Raises:
        ValueError: the file is missing, torn or changed.
    """
    if not isinstance(metadata, dict):
        raise ValueError(
            f"{path.parent / MANIFEST}: expected size and blake2b of {path.name}, got {metadata!r}"
        )
    if not path.is_file():
        raise ValueError(f"{path}: {MANIFEST} lists it, and it is missing")
    if path.stat().st_size != metadata.get("size"):
        raise ValueError(
            f"{path}: torn: expected {metadata.get('size')} bytes, got {path.stat().st_size}"
        )
    if checksum(path) != metadata.get("blake2b"):
        raise ValueError(f"{path}: its bytes are not those that were saved (checksum)")


def checksum(path: Path) -> str:
    """BLAKE2b of a file, 16 bytes in hexadecimal."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def flush(path: Path) -> None:
    """Returns when a file, or a directory's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def commit(directory: Path, content: bytes) -> Manifest:
    """Makes this the directory's manifest, and thereby its checkpoint the one that readers find.

    The files that a chain needs stay: see [Note: chains of checkpoints].

    Raises:
        OSError: the disk is full, or refuses.
    """
    manifest = _parse(directory, content, directory / MANIFEST)
    links = list(chain(manifest))
    for other in {link.directory for link in links} - {directory}:
        _note(other, directory)
    needed = {link.identity for link in links if link.directory == directory} | _needed_elsewhere(
        directory
    )
    _keep(directory, needed - {manifest.identity})
    flush(directory)  # the names of the files that the manifest lists
    _replace(directory / MANIFEST, content)
    flush(directory)
    _remove_old(directory, manifest, needed)
    return manifest


def refers(directory: Path, content: bytes | None) -> bool:
    """Whether ``content`` is the directory's present manifest."""
    return (
        content is not None
        and (directory / MANIFEST).is_file()
        and (directory / MANIFEST).read_bytes() == content
    )


def _kept(directory: Path, identity: str) -> Path:
    return directory / f"checkpoint-{identity}.json"


def _note(base: Path, delta: Path) -> None:
    """Leaves a note in a base's directory that a delta needs it.

    A directory that cannot be written to gets none, and cannot lose files either.
    """
    if os.access(base, os.W_OK):
        by = os.path.relpath(delta, base)
        _replace(
            base / f"needed-by-{identity_of(by.encode())[:16]}.json",
            json.dumps({"by": by}).encode(),
        )
        flush(base)


def _needed_elsewhere(directory: Path) -> set[str]:
    """Identities of this directory's checkpoints that deltas in other directories continue.

    Removes the notes that no delta needs any more.
    """
    needed = set()
    for path in directory.glob("needed-by-*.json"):
        mine = set()
        try:
            delta = (directory / json.loads(path.read_bytes())["by"]).resolve()
            for link in chain(read(delta)):
                mine |= (
                    {link.identity} if link.directory == directory and delta != directory else set()
                )
        except (OSError, ValueError, KeyError, TypeError):
            pass  # no checkpoint there, or its chain ends here
        if not mine:
            path.unlink(missing_ok=True)
        needed |= mine
    return needed


def _keep(directory: Path, needed: set[str]) -> None:
    """Gives the manifest that is about to be replaced its second name, if a chain needs it."""
    present = directory / MANIFEST
    if not present.is_file():
        return
    identity = identity_of(present.read_bytes())
    if identity in needed and not _kept(directory, identity).is_file():
        temporary = directory / f"{MANIFEST}.{secrets.token_hex(8)}"
        shutil.copyfile(present, temporary)
        flush(temporary)
        os.replace(temporary, _kept(directory, identity))


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f"{MANIFEST}.{secrets.token_hex(8)}")
    try:
        temporary.write_bytes(content)
        flush(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _remove_old(directory: Path, manifest: Manifest, needed: set[str]) -> None:
    """Removes the files of older saves and of stopped ones, except those that a chain needs, and
    no file that a save has not written.
    """
    keep = {MANIFEST, *manifest.files}
    for identity in needed:
        path = _kept(directory, identity)
        if path.is_file():
            keep |= {path.name, *_decode(path).files}
    for pattern in _WRITTEN:
        for path in directory.glob(pattern):
            if path.name not in keep:
                path.unlink(missing_ok=True)
    for path in directory.glob(f"{PARTIAL}*"):
        shutil.rmtree(path, ignore_errors=True)


def _decode(path: Path) -> Manifest:
    return _parse(path.parent, path.read_bytes(), path)


def _parse(directory: Path, content: bytes, path: Path) -> Manifest:
    try:
        found = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(found, dict) or not all(
        isinstance(found.get(key), dict) for key in ("files", "meta")
    ):
        raise ValueError(f"{path}: expected an object with the keys format, meta and files")
    if found.get("format") not in (PLAIN, FORMAT):
        raise ValueError(
            f"{path}: expected format {PLAIN} or {FORMAT}, got {found.get('format')!r}"
        )
    for name in found["files"]:
        if Path(name).name != name:
            raise ValueError(f"{path}: expected names of files beside it, got {name!r}")
    tables = found.get("tables", {})
    listed = isinstance(tables, dict) and all(isinstance(names, list) for names in tables.values())
    if not listed or not all(name in found["files"] for names in tables.values() for name in names):
        raise ValueError(
            f"{path}: expected each table's files among those that are listed, got {tables!r}"
        )
    return Manifest(
        directory,
        identity_of(content),
        found["meta"],
        found["files"],
        tables,
        _base(found.get("base"), path),
    )


def _base(found: Any, path: Path) -> Base | None:
    if found is None:
        return None
    if not isinstance(found, dict) or not all(
        isinstance(found.get(key), str) for key in ("path", "identity")
    ):
        raise ValueError(f"{path}: expected a base's path and identity, got {found!r}")
    if Path(found["path"]).is_absolute() or not found["identity"].isalnum():
        raise ValueError(f"{path}: expected a base's relative path and its identity, got {found!r}")
    return Base(found["path"], found["identity"])
