"""Files that appear whole or not at all: written under another name, flushed, renamed."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transpiler.files.named_errors import naming

READABLE, PRIVATE = 0o644, 0o600


@contextmanager
def whole_file(target: Path, mode: int = READABLE) -> Iterator[Path]:
    """A file to be written beside ``target``, which becomes ``target`` when this ends without an
    error.  Until then only its owner can read it.

    Args:
        target: what a symbolic link leads to is replaced; what is no ordinary file, like
            ``/dev/stdout``, is written in place.
        mode: the permissions of the finished file.

    Raises:
        OSError: the disk is full, or refuses; the old file stays.
    """
    target = target.resolve()
    if target.exists() and not target.is_file() and not target.is_dir():
        with naming(target):
            yield target
        return
    partial = target.with_name(f".{target.name}.{secrets.token_hex(8)}.partial")
    try:
        os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, PRIVATE))
        with naming(target):
            yield partial
        partial.chmod(mode)
        flush(partial)
        os.replace(partial, target)
        flush(target.parent)
    finally:
        partial.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Returns when a file, or a directory's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
