"""The folder of a job's automatic checkpoints: which exist, and which may be removed.

Each is a directory of its own, ``step-000120``.  ``checkpoints.json`` lists those that are
complete, the newest last; it is replaced after a checkpoint has become complete, and before an old
one is removed.  So it never names a missing one, even in stores that cannot list folders.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from pserver.checkpoint import manifest
from pserver.checkpoint.checkpoint import Saved
from pserver.checkpoint.manifest import LIST, CompleteCheckpoint, list_bytes, listed_in
from pserver.storage.local import InUse, LocalPlace, PathLock
from pserver.storage.place import Place, place_at
from pserver.storage.single_file import joined

NAME = re.compile(r"step-\d{6,}")

log = logging.getLogger(__name__)


class CheckpointFolder:
    """The checkpoints of one job.  One trainer uses it.

    Args:
        path: of the folder, or its URL.
        keep: the number of newest ones that are kept, besides those that these continue.

    Raises:
        ValueError: ``keep`` is below 1, or the list is damaged.
        OSError: the list cannot be read.

    Example::

        folder = CheckpointFolder("/data/job", keep=3)
        folder.paths()            # the newest first: ["/data/job/step-000240", ...]
    """

    def __init__(self, path: str | os.PathLike[str], keep: int) -> None:
        if keep < 1:
            raise ValueError(f"checkpoints to keep: expected 1 or more, got {keep}")
        self._path, self._keep = path, keep
        self._place: Place = place_at(path)
        self._listed, self._kept = listed_in(self._place)

    def hold(self) -> PathLock | None:
        """Locks the directory against other jobs, and removes what interrupted saves have left
        there.  None where no lock is possible: behind a URL, or without write access.

        Raises:
            InUse: another job holds the lock.
        """
        try:
            lock = self._place.lock()
        except InUse:
            raise
        except OSError:  # each save will raise it
            return None
        if isinstance(self._place, LocalPlace):
            listed = {kept.name for kept in self._kept}
            for found in self._place.directory.iterdir():
                unfinished = NAME.fullmatch(found.name) and not (found / manifest.MANIFEST).exists()
                if unfinished and found.name not in listed:
                    shutil.rmtree(found, ignore_errors=True)
        return lock

    def paths(self) -> list[str]:
        """The directories, or URLs, of the complete checkpoints, the newest first."""
        return [self.path_of(kept.name) for kept in reversed(self._kept)]

    def path_of(self, name: str) -> str:
        """The directory, or the URL, of a checkpoint."""
        return joined(self._path, name)

    def name_at(self, step: int) -> str:
        """The name of a checkpoint after this number of steps."""
        return f"step-{step:06d}"

    def continued(self, saved: Saved | None, deltas: int) -> str:
        """The name of the checkpoint that the next one may continue: the newest, where the job has
        saved, or read, it last, and fewer than ``deltas`` lead from it back to one that has all
        rows.  "": the next one must have all rows itself.
        """
        if saved is None or not self._kept or self._length(self._kept[-1]) >= deltas:
            return ""
        newest = self._kept[-1].name
        return newest if place_at(saved.path) == self._place.at(newest) else ""

    def _length(self, kept: CompleteCheckpoint) -> int:
        """The number of checkpoints that it continues, directly or not."""
        found, length = {each.name: each for each in self._kept}, 0
        while kept.base:
            kept, length = found[kept.base], length + 1
        return length

    def add(self, name: str, base: str = "") -> None:
        """Lists a checkpoint that is complete, and removes those that are no longer kept.

        Args:
            base: the name of the checkpoint that it continues.

        Raises:
            OSError: the list cannot be written; or another job has written it.
        """
        kept = [*(each for each in self._kept if each.name != name), CompleteCheckpoint(name, base)]
        bases = {each.name: each.base for each in kept}
        needed = {each.name for each in kept[-self._keep :]}
        for each in reversed(kept):  # a checkpoint stands behind the one that it continues
            if each.name in needed and bases[each.name]:
                needed.add(bases[each.name])
        self._list([each for each in kept if each.name in needed])
        for each in kept:
            if each.name not in needed:
                self._remove(each.name)

    def discard(self, name: str) -> None:
        """Removes a checkpoint that was never completed, with the parts of its servers."""
        place = self._place.at(name)
        try:
            if name not in {each.name for each in self._kept}:
                manifest.clear(place)
        except OSError as error:
            log.warning("what is left of %s could not be removed: %s", place, error)

    def _list(self, kept: list[CompleteCheckpoint]) -> None:
        content = list_bytes(kept)
        if not self._place.replace(LIST, content, self._listed):
            raise OSError(f"{self._place}: another job has written to {LIST}: give it another path")
        self._place.flush()
        self._listed, self._kept = content, kept

    def _remove(self, name: str) -> None:
        """Removes the files of a checkpoint; a failure is only logged."""
        place = self._place.at(name)
        try:
            parts = _part_places(place)
            place.remove(manifest.MANIFEST)  # what is left behind is then no checkpoint
            for each in (*parts, place):
                manifest.clear(each)
            for each in parts:
                if isinstance(each, LocalPlace) and each.directory.parent != Path(place.path):
                    with suppress(OSError):  # in a server's own store, which has other jobs' parts
                        os.rmdir(each.directory.parent)
        except OSError as error:
            log.warning("the old checkpoint %s could not be removed: %s", place, error)


def _part_places(place: Place) -> list[Place]:
    """The places of the servers' parts of a checkpoint."""
    try:
        return manifest.part_places(manifest.read(place))
    except (OSError, ValueError):
        return []
