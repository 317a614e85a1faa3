"""A server's own files: everything it holds, saved below its data directory and loaded again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pserver import checkpoint
from pserver.errors import FingerprintMismatch, Refused
from pserver.installation import Installation


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


def save(path: Path, installed: Installation, marks: Mapping[str, Mapping[int, int]]) -> Path:
    """Writes slices, states, the plan's fingerprint and the last applied step of every trainer.

    Raises:
        Refused: the disk does not take it; what was saved before stays.
    """
    meta = {"fingerprint": installed.plan.fingerprint(), "version": installed.version, "steps": _plain(marks)}
    try:
        checkpoint.save(path, dict(installed.table.tensors()), meta)
    except OSError as error:
        raise Refused(f"cannot save to {path}: {error}") from error
    return path


def load(path: Path, installed: Installation) -> Path:
    """Reads what :func:`save` wrote.

    Raises:
        Refused: there is nothing, or it is torn.
        FingerprintMismatch: it was written by a job with another plan.
    """
    try:
        tensors, meta = checkpoint.load(path)
    except (OSError, ValueError) as error:
        raise Refused(f"cannot load from {path}: {error}") from error
    if meta.get("fingerprint") != installed.plan.fingerprint():
        raise FingerprintMismatch(f"{path} was saved by a job with another plan")
    installed.table.load(tensors)
    return path


def _plain(marks: Mapping[str, Mapping[int, int]]) -> dict[str, dict[str, int]]:
    """Marks as JSON holds them: trainer -> lane -> step."""
    return {trainer: {str(lane): step for lane, step in steps.items()} for trainer, steps in marks.items()}
