"""A server's own files: everything it holds, saved below its data directory and loaded again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pserver.checkpoint import checkpoint
from pserver.checkpoint.table_files import Chunk
from pserver.errors import FingerprintMismatch, Refused
from pserver.job.installed_program import InstalledProgram
from pserver.job.membership import Membership

if TYPE_CHECKING:
    from pserver.job.locked_table import LockedTable


def directory(data_dir: str | None, path: str, server_index: int) -> Path:
    """Where a server keeps what a trainer calls ``path``.

    Raises:
        Refused: the server keeps no files, or the path leads out of its data directory.
    """
    if data_dir is None:
        raise Refused("the server was started without --data-dir, so it keeps no files")
    root = Path(data_dir).resolve()
    target = (root / path / f"server-{server_index}").resolve()
    if not target.is_relative_to(root):
        raise Refused(f"expected a path below the data directory, got {path!r}")
    return target


def save(path: Path, installed: InstalledProgram, members: Membership) -> Path:
    """Writes slices, tables, states, the plan's fingerprint, how far each trainer has come: all of
    a moment between two steps.

    Steps wait until it is written.

    Raises:
        Refused: the disk does not take it; what was saved before stays.
    """
    with installed.gate.closed():
        versions = [steps.version for steps in installed.lanes]
        meta = {
            "fingerprint": installed.plan.fingerprint(),
            "versions": versions,
            "marks": members.saved(),
        }
        try:
            with checkpoint.writing(path) as writer:
                writer.tensors(dict(installed.table.tensors()))
                for name, held in installed.tables.items():
                    writer.chunks(name, _chunks(held))
                writer.commit(
                    meta
                    | {"tables": {name: held.metadata() for name, held in installed.tables.items()}}
                )
        except OSError as error:
            raise Refused(f"cannot save to {path}: {error}") from error
    return path


def load(path: Path, installed: InstalledProgram, members: Membership) -> Path:
    """Reads what :func:`save` wrote.

    Marks of a trainer count for the same start of its process only, whether it is here or comes
    later, and never go back: a trainer that runs on goes on with its own numbers, one that was
    started anew counts from 1.  Versions never go back either.

    Raises:
        Refused: there is nothing, or it is torn.
        FingerprintMismatch: it was written by a job with another plan.
    """
    try:
        reader = checkpoint.reading(path)
        tensors, meta = reader.tensors(), reader.meta
    except (OSError, ValueError) as error:
        raise Refused(f"cannot load from {path}: {error}") from error
    if meta.get("fingerprint") != installed.plan.fingerprint():
        raise FingerprintMismatch(f"{path} was saved by a job with another plan")
    with installed.gate.closed():
        installed.table.load(tensors)
        installed.forget()
        for name, held in installed.tables.items():
            held.restore(meta["tables"][name])
            for chunk in reader.chunks(name):
                held.load(chunk)
        for steps, version in zip(installed.lanes, meta.get("versions", []), strict=False):
            steps.version = max(steps.version, version)
        members.load(meta.get("marks", {}))
    return path


def _chunks(held: LockedTable) -> Iterator[Chunk]:
    """All rows of a table that is held here."""
    cursor = 0
    while cursor >= 0:
        chunk, cursor = held.scan(cursor, 0, changed=False, materialized=False)
        yield chunk
