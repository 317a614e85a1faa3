"""A new file that is written piece by piece: on a disk, or as an upload to a store.

[Note: what a growing file costs]  On a disk what was written is flushed every ``FLUSH_BYTES``, so
that the system never holds much more than that of it in memory.  An upload is sent in blocks of
``BLOCK_BYTES``: neither memory nor this machine's disk holds more of it.  A store has room for
10 000 blocks of one object.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from pserver.storage import plain_file
from transpiler.files.named_errors import naming

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
