"""Files on this machine's disks: a directory, one writer at a time, files that grow piece by piece.

[Note: what a growing file costs]  On a disk what was written is flushed every ``FLUSH_BYTES``, so
that the system never holds much more than that of it in memory.  An upload is sent in blocks of
``BLOCK_BYTES``: neither memory nor this machine's disk holds more of it.  A store has room for
10 000 blocks of one object.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import secrets
import shutil
import socket
import weakref
from collections.abc import Callable, Iterable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch

from pserver.storage import plain_file
from pserver.undone import or_undone
from transpiler.files.files import flush, write_pieces
from transpiler.files.named_errors import naming

# ---- digest ----
#
# The checksum of a part of a file.


_CHUNK = 1 << 22


def digest_of(file: Any, size: int) -> str:
    """BLAKE2b of the next bytes of a file, 16 bytes in hexadecimal.

    Args:
        file: open for reading.
        size: how many bytes; fewer, where the file ends before.
    """
    digest = hashlib.blake2b(digest_size=16)
    while size > 0 and (chunk := file.read(min(size, _CHUNK))):
        digest.update(chunk)
        size -= len(chunk)
    return digest.hexdigest()


# ---- in use ----
#
# The error of two jobs that write to one path.


class InUse(OSError):
    """Another job writes to this path.  Nothing was written."""


def myself() -> str:
    """This process, for messages that others read."""
    return f"process {os.getpid()} on {socket.gethostname()}"


# ---- new file ----
#
# A new file that is written piece by piece: on a disk, or as an upload to a store.


FLUSH_BYTES = 2**25
BLOCK_BYTES = 2**24

Call = Callable[[Callable[[], Any]], Any]


class NewFile(Protocol):
    """A file that is written from its beginning to its end.  One thread uses it."""

    def write(self, content: bytes | memoryview) -> None:
        """Adds bytes at the end.

        Raises:
            OSError: the disk is full, or refuses, or the store does.
        """

    def finish(self) -> None:
        """Returns when all of it is on the disk, or in the store.

        Raises:
            OSError: as :meth:`write`.
        """

    def give_up(self) -> None:
        """Ends without the file being whole.  The caller removes what may be there of it."""


class DiskFile:
    """A new file on a disk.

    Args:
        path: of the file; there is none yet.

    Raises:
        OSError: the disk is full, or refuses.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, plain_file.new(path)
        self._unflushed = 0

    def write(self, content: bytes | memoryview) -> None:
        """See :class:`NewFile`, here and in the methods below."""
        with naming(self._path):
            self._file.write(content)
        self._unflushed += len(content)
        if self._unflushed >= FLUSH_BYTES:
            self._flush()

    def _flush(self) -> None:
        with naming(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
        self._unflushed = 0

    def finish(self) -> None:
        self._flush()
        self._file.close()

    def give_up(self) -> None:
        with suppress(OSError):  # what could not be written is in a buffer still
            self._file.close()


class Upload:
    """A new object of a store.

    Args:
        open_file: opens it for writing.
        call: makes a call to the store, whose errors become OSErrors.

    Raises:
        OSError: the store refuses, or cannot be reached.
    """

    def __init__(self, open_file: Callable[[], Any], call: Call) -> None:
        self._call = call
        self._file = call(open_file)

    def write(self, content: bytes | memoryview) -> None:
        """See :class:`NewFile`, here and in the methods below."""
        self._call(lambda: self._file.write(content))

    def finish(self) -> None:
        self._call(self._file.close)

    def give_up(self) -> None:
        with suppress(Exception):  # of whatever a driver raises: the error before it is the one
            self._call(self._discard)

    def _discard(self) -> None:
        if getattr(self._file, "mpu", None):  # of S3, which keeps the blocks of an open upload
            self._file.discard()
        self._file.close()


# ---- path lock ----
#
# One writer at a time in a directory: the kernel's lock on a file in it.
#
# The kernel frees the lock when the process ends, however it ends.  The file ``.lock`` says who
# holds it; it is removed while it is locked, so a process that locks it checks whether it is still
# there.


NAME = ".lock"
_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)

log = logging.getLogger(__name__)
_held: weakref.WeakSet[PathLock] = weakref.WeakSet()


class PathLock:
    """Locks a directory until :meth:`release`.

    Args:
        directory: an existing one.

    Raises:
        InUse: another process, or another job of this one, holds it; the message names the holder.
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
        """Releases the directory."""
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


# ---- local place ----
#
# A directory on this machine's disks.


PARTIAL = "writing-"  # begins the names of files that are being written


@dataclass(frozen=True, slots=True)
class LocalPlace:
    """A directory.  What a method has written is on the disk when it returns.

    Every method raises OSError where the disk is full or refuses, FileNotFoundError where there is
    no such file.

    Attributes:
        directory: resolved.
    """

    directory: Path

    def __str__(self) -> str:
        return str(self.directory)

    @property
    def path(self) -> str:
        """The path by which a process finds it again."""
        return str(self.directory)

    def at(self, relative: str) -> LocalPlace:
        """The place at a path relative to this one."""
        return LocalPlace((self.directory / relative).resolve())

    def relative(self, other: LocalPlace) -> str:
        """The path of another place relative to this one."""
        return os.path.relpath(other.directory, self.directory)

    def lock(self) -> PathLock | None:
        """Locks the directory against other writers.

        Raises:
            InUse: there is one.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        return PathLock(self.directory)

    def writable(self) -> bool:
        """Whether files can be written here."""
        return os.access(self.directory, os.W_OK)

    # ---- reading ----

    def names(self) -> list[str]:
        """The files that are here."""
        if not self.directory.is_dir():
            return []
        return [path.name for path in self.directory.iterdir() if not path.is_dir()]

    def directories(self) -> list[str]:
        """The directories that are here."""
        if not self.directory.is_dir():
            return []
        return [path.name for path in self.directory.iterdir() if path.is_dir()]

    def size(self, name: str) -> int | None:
        """The size in bytes; None where there is no such file."""
        return plain_file.size(self.directory / name)

    def read(self, name: str, begin: int = 0, size: int = -1) -> bytes:
        """A file, or so many bytes of it from ``begin`` on; fewer, where it ends before."""
        with plain_file.reading(self.directory / name) as file:
            file.seek(begin)
            return file.read(size)

    def checksums(self, name: str, sizes: Iterable[int]) -> list[str]:
        """BLAKE2b, 16 bytes in hexadecimal, of parts of a file that follow one another.

        Args:
            sizes: of the parts, in bytes.
        """
        with plain_file.reading(self.directory / name) as file:
            return [digest_of(file, size) for size in sizes]

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """The tensors of a safetensors file."""
        with plain_file.reading(self.directory / name) as file:
            # by the descriptor: what has this name may be another file by now
            return safetensors.torch.load_file(f"/proc/self/fd/{file.fileno()}")

    # ---- writing ----

    def write(self, name: str, content: bytes) -> None:
        """Makes a new file; after an error there is none."""
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / name
        with naming(path):
            plain_file.write_bytes(path, content)
        with or_undone(lambda: path.unlink(missing_ok=True)):
            flush(path)

    def create(self, name: str) -> NewFile:
        """Begins a new file, to be written piece by piece."""
        self.directory.mkdir(parents=True, exist_ok=True)
        return DiskFile(self.directory / name)

    def write_tensors(
        self,
        name: str,
        tensors: MutableMapping[str, torch.Tensor],
        wrote: Callable[[int], None] = lambda size: None,
    ) -> tuple[int, str]:
        """Makes a new safetensors file of contiguous tensors on the CPU; gives its size and its
        checksum.

        Args:
            tensors: taken out as they are written.
            wrote: called with the number of bytes written so far.
        """
        file = self.create(name)
        try:
            written = write_pieces(tensors, file.write, wrote)
            file.finish()
        except BaseException:
            file.give_up()
            self.remove(name)
            raise
        return written

    def replace(self, name: str, content: bytes, before: bytes | None = None) -> bool:
        """Puts a file in place of the one that may be there, in one moment; True."""
        temporary = self.directory / f"{PARTIAL}{secrets.token_hex(8)}"
        self.write(temporary.name, content)
        with or_undone(lambda: temporary.unlink(missing_ok=True)):
            os.replace(temporary, self.directory / name)
        return True

    def flush(self) -> None:
        """Returns when the names of all files are on the disk."""
        flush(self.directory)

    def remove(self, name: str) -> None:
        """Removes a file, if it is there."""
        (self.directory / name).unlink(missing_ok=True)

    def tidy(self) -> None:
        """Removes the files of stopped writers."""
        for path in self.directory.glob(f"{PARTIAL}*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
