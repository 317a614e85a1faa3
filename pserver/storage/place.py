"""The place of a caller's path: a directory on this machine, or a prefix behind a URL."""

from __future__ import annotations

import os

from pserver.storage.local import LocalPlace
from pserver.storage.remote import RemotePlace
from transpiler.files.files import is_url, local_path

Place = LocalPlace | RemotePlace


def place_at(path: str | os.PathLike[str]) -> Place:
    """The place at a path, or behind a URL.

    Raises:
        ValueError: it is no path, or fsspec knows no such protocol.
        ImportError: the package that reaches the URL is not installed; the message says which.
    """
    if is_url(path):
        return RemotePlace(str(path))
    return LocalPlace(local_path(path, "path").resolve())


def relative(place: Place, other: Place) -> str:
    """The path of ``other`` relative to ``place``.

    Raises:
        ValueError: they are in different stores.
    """
    if isinstance(place, LocalPlace) and isinstance(other, LocalPlace):
        return place.relative(other)
    if isinstance(place, RemotePlace) and isinstance(other, RemotePlace):
        return place.relative(other)
    raise ValueError(f"expected a place in the store of {place}, got {other}")
