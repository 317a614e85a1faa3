"""One file, on this machine or behind a URL: written whole or not at all, or read."""

from __future__ import annotations

import os
import posixpath
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pserver.storage.remote import RemotePlace
from transpiler.files.files import flush, is_url, local_path, shown
from transpiler.files.named_errors import naming


@contextmanager
def file_to_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A file to be written, in a directory of its own, where other files may lie meanwhile.  It
    becomes ``path`` when this ends without an error.

    Raises:
        ImportError, ValueError: as :func:`pserver.storage.place.place_at`.
        OSError: the disk is full, or refuses, or the store does; the old file stays.
    """
    if is_url(path):
        place, name = _parted(path)
        with tempfile.TemporaryDirectory() as scratch:
            with naming(Path(scratch) / name):
                yield Path(scratch) / name
            place.store(Path(scratch) / name, name)
        return
    target = local_path(path, "path")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{target.name}.", dir=target.parent) as scratch:
        file = Path(scratch) / target.name
        with naming(target):
            yield file
        flush(file)
        os.replace(file, target)


@contextmanager
def file_to_read(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A file on this machine with the content of ``path``.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError, ValueError: as :func:`pserver.storage.place.place_at`.
        OSError: it cannot be read.
    """
    if not is_url(path):
        yield local_path(path, "path")
        return
    place, name = _parted(path)
    with tempfile.TemporaryDirectory() as scratch:
        place.fetch(name, Path(scratch) / name)
        yield Path(scratch) / name


def joined(directory: str | os.PathLike[str], name: str) -> str:
    """The path of a file in a directory, or its URL."""
    if is_url(directory):
        return posixpath.join(str(directory), name)
    return str(local_path(directory, "path") / name)


def _parted(url: str | os.PathLike[str]) -> tuple[RemotePlace, str]:
    """The place of a file behind a URL, and the file's name."""
    scheme, _, rest = str(url).partition("://")
    folder, name = posixpath.split(rest)
    if not name:
        raise ValueError(f"expected the URL of a file, got {shown(url)!r}, which ends in a slash")
    return RemotePlace(f"{scheme}://{folder}"), name
