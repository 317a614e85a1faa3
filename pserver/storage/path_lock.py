"""One writer at a time in a directory: the kernel's lock on a file in it.

The kernel frees the lock when the process ends, however it ends.  The file ``.lock`` says who holds
it; it is removed while it is locked, so whoever locks it looks whether it is still there.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import weakref
from pathlib import Path

from pserver.storage import plain_file
from pserver.storage.in_use import InUse, myself
from transpiler.files.named_errors import naming

NAME = ".lock"
_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)

log = logging.getLogger(__name__)
_held: weakref.WeakSet[PathLock] = weakref.WeakSet()


class PathLock:
    """Holds a directory until :meth:`release`.

    Args:
        directory: which is there.

    Raises:
        InUse: another process, or another job of this one, holds it; the message says who.
        OSError: the disk is full, or refuses; or the lock's file is a link.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / NAME
        self._descriptor = -1
        while not self.holds():
            self.release()
            self._descriptor = plain_file.descriptor(self._path, os.O_RDWR | os.O_CREAT)
            self._lock(directory)
        _held.add(self)
        try:
            with naming(self._path):
                os.ftruncate(self._descriptor, 0)
                os.pwrite(self._descriptor, myself().encode(), 0)
        except OSError:
            self.release()
            raise

    def _lock(self, directory: Path) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = os.pread(self._descriptor, 200, 0).decode(errors="replace") or "another process"
            self.abandon()
            raise InUse(
                f"{directory}: {who} writes checkpoints to this path, and {myself()} was told to: "
                "give each job a path of its own"
            ) from None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                self.abandon()
                raise
            log.warning("%s: this file system has no locks: two jobs are not noticed", directory)

    def holds(self) -> bool:
        """Whether the locked file is still the directory's."""
        if self._descriptor < 0:
            return False
        try:
            found, mine = os.lstat(self._path), os.fstat(self._descriptor)
        except FileNotFoundError:
            return False
        return (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino)

    def release(self) -> None:
        """Lets the next one in."""
        if self.holds():
            os.unlink(self._path)
        self.abandon()

    def abandon(self) -> None:
        """Closes the file; in a forked process the parent keeps the lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def _abandon_all() -> None:
    for lock in list(_held):
        lock.abandon()


os.register_at_fork(after_in_child=_abandon_all)  # or a child would hold what its parent has freed
