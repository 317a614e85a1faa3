"""What lies in a directory that is no part of any checkpoint."""

from __future__ import annotations

from fnmatch import fnmatch

from pserver.checkpoint.manifest import MANIFEST
from pserver.storage.local_place import PARTIAL, LocalPlace
from pserver.storage.place import Place

# what a save writes, also one that stopped before its end; what the system puts into a new volume
_FILES = ("checkpoint*.json*", "tensors-*", "rows-*", "needed-by-*.json", f"{PARTIAL}*", ".*")
_DIRECTORIES = ("server-*", f"{PARTIAL}*", "lost+found", ".*")
_SHOWN, _LOOKED_INTO = 3, 16


def strangers(place: Place) -> list[str]:
    """The names of files and directories in a place that no save has written, in order."""
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
    """Returns where a checkpoint may begin to be: nothing is there, or what a stopped save has
    left.

    Raises:
        ValueError: something else is there.  Whoever looks for a checkpoint has named another
            place than he meant.
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
    """Returns where a checkpoint may be written: one is there, or nothing, or what a stopped save
    has left.  Other checkpoints may lie below.

    Raises:
        ValueError: files of others are there, among which those of a checkpoint would lie.
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
