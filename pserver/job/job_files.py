"""Save and Load: everything that a server holds, in files below the directory, or the prefix of a
store, that it was given at its start.  A caller names paths below it, and no others: no "..", no
link that leads out, no URL.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypeVar

from pserver.checkpoint import checkpoint, manifest
from pserver.checkpoint.table_files import Chunk
from pserver.errors import FingerprintMismatch, Refused
from pserver.job.installed_program import InstalledProgram
from pserver.job.membership import Membership
from pserver.storage.place import place_at
from transpiler.files.local_path import local_path, shown

if TYPE_CHECKING:
    from pserver.job.locked_table import LockedTable

Named = TypeVar("Named", str, Path)


def check_place(data_dir: str | None, store: str | None) -> None:
    """Returns if a server can keep files there; makes the directory where it is missing.  Nothing
    is written, and a store is not asked.

    Raises:
        OSError: it cannot; one sentence.
    """
    if store is not None:
        try:
            place_at(store)
        except (ValueError, ImportError) as error:
            raise OSError(f"store: {error}") from error
        return
    path = Path(str(data_dir))
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"data_dir: {path}: {error.strerror or error}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise OSError(f"data_dir: {path}: expected a directory that this user may write to")


def directory(data_dir: str | None, path: str, server_index: int, store: str | None = None) -> str:
    """The directory, or the URL, in which a server keeps what a caller calls ``path``.

    Args:
        data_dir: the server's, on its machine.
        store: a URL, which takes the place of ``data_dir``.

    Raises:
        Refused: the server keeps no files, or the path leads out of what it was given, or is a URL.
    """
    if data_dir is None and store is None:
        raise Refused("the server was started without --data-dir or --store, so it keeps no files")
    try:
        local_path(path or ".", "a server's files")
    except ValueError as error:
        raise Refused(str(error)) from error
    if store is not None:
        parts = PurePosixPath(path).parts
        if ".." in parts or path.startswith("/") or "::" in path or "\\" in path:
            raise Refused(f"expected a path below the server's store, got {path!r}")
        return "/".join((store.rstrip("/"), *parts, f"server-{server_index}"))
    root = Path(str(data_dir)).resolve()
    target = (root / path / f"server-{server_index}").resolve()
    if not target.is_relative_to(root):
        raise Refused(f"expected a path below the data directory, got {path!r}")
    return str(target)


def save(path: Named, installed: InstalledProgram, members: Membership) -> Named:
    """Writes slices, states, tables, the plan's fingerprint and the trainers' watermarks, all of
    one moment between two steps.

    Steps wait until it is written.

    Returns:
        ``path``.

    Raises:
        Refused: the disk does not take it, or another job writes there; what was saved before
            stays.
    """
    with installed.quiesce.paused():
        meta = {
            "fingerprint": installed.plan.fingerprint(),
            "versions": [lane.version for lane in installed.lanes],
            "watermarks": members.watermarks(),
        }
        try:
            with checkpoint.writing(path) as writer:
                writer.tensors(dict(installed.slices.tensors()))
                for name, table in installed.tables.items():
                    writer.chunks(name, _chunks(table))
                tables = {name: table.metadata() for name, table in installed.tables.items()}
                writer.commit(meta | {"tables": tables})
        except OSError as error:
            raise Refused(f"cannot save to {shown(str(path))}: {error}") from error
    return path


def load(path: Named, installed: InstalledProgram, members: Membership) -> Named:
    """Reads what :func:`save` wrote.

    A trainer's watermarks count for the same incarnation only, whether it has joined or joins
    later, and never go back: a trainer that runs on keeps its step numbers, and one that was
    started again counts from 1.  Versions never go back either.

    Returns:
        ``path``.

    Raises:
        Refused: there is no complete save, or a file of it is torn.
        FingerprintMismatch: it was written by a job with another plan.
    """
    try:
        if manifest.read(place_at(path)).base is not None:
            # it may lie anywhere, and no server writes such a file
            raise ValueError("expected a checkpoint that continues no other")
        reader = checkpoint.reading(path)
        tensors, meta = reader.tensors(), reader.meta
    except (OSError, ValueError) as error:
        raise Refused(f"cannot load from {shown(str(path))}: {error}") from error
    if meta.get("fingerprint") != installed.plan.fingerprint():
        raise FingerprintMismatch(f"{shown(str(path))} was saved by a job with another plan")
    with installed.quiesce.paused():
        installed.slices.load(tensors)
        installed.discard_snapshots()
        for name, table in installed.tables.items():
            table.restore(meta["tables"][name])
            for chunk in reader.chunks(name):
                table.load(chunk)
        for lane, version in zip(installed.lanes, meta.get("versions", []), strict=False):
            lane.version = max(lane.version, version)
        members.load_watermarks(meta.get("watermarks", {}))
    return path


def _chunks(table: LockedTable) -> Iterator[Chunk]:
    """All rows of a table that this server holds."""
    cursor = 0
    while cursor >= 0:
        chunk, cursor = table.scan(cursor, 0, changed_since_save=False, materialized=False)
        yield chunk
