"""Files in folders that others may write to: of checkpoints, of logs, of a server's data.

Anyone who can write to such a folder can put a link there under a name that we use, and we would
write over, or read, the link's target with our own rights.  So nothing here follows a link at the
end of a path, and nothing but an ordinary file is read or written: a pipe would make us wait, and a
device gives bytes without end.  A file that has further names (hard links) is read, as its bytes
are checked, and not written to.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import IO

from pserver.undone import or_undone

_CAREFULLY = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class NotPlain(OSError, ValueError):
    """A link, a pipe, a device or a folder is where a file should be: nothing was read or
    written.
    """

    def __init__(self, path: Path, kind: str) -> None:
        super().__init__(f"{path}: expected an ordinary file, and it is {kind}: remove it")


def descriptor(path: Path, flags: int, mode: int = 0o644) -> int:
    """Opens an ordinary file.

    Args:
        flags: of ``os.open``.
        mode: of one that is made.

    Raises:
        NotPlain: it is something else, or is to be written to and has further names.
        OSError: there is none, or the disk is full, or refuses.
    """
    try:
        opened = os.open(path, flags | _CAREFULLY, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotPlain(path, "a symbolic link") from error
        if error.errno in (errno.ENXIO, errno.EISDIR):  # a pipe without a reader, a socket
            raise NotPlain(path, "none") from error
        raise
    try:
        found = os.fstat(opened)
        if not stat.S_ISREG(found.st_mode):
            raise NotPlain(path, "none")
        if flags & (os.O_WRONLY | os.O_RDWR) and found.st_nlink > 1:
            raise NotPlain(path, "one with further names (hard links)")
    except BaseException:
        os.close(opened)
        raise
    return opened


def reading(path: Path) -> IO[bytes]:
    """A file, to be read.  Raises as :func:`descriptor`."""
    return os.fdopen(descriptor(path, os.O_RDONLY), "rb")


def new(path: Path, mode: int = 0o644) -> IO[bytes]:
    """A new file, to be written; FileExistsError where something is there.  Raises as
    :func:`descriptor`.
    """
    return os.fdopen(descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb")


def write_bytes(path: Path, content: bytes) -> None:
    """Makes a new file of these bytes; after an error there is none.  Raises as :func:`new`."""
    with new(path) as file, or_undone(lambda: path.unlink(missing_ok=True)):
        file.write(content)
        file.flush()


def size(path: Path) -> int | None:
    """The size of an ordinary file, in bytes; None where there is none."""
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None
