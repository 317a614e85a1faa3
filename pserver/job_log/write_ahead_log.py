"""The file to which server 0 writes what it alone knows of its job, before anybody hears of it.

[Note: what a process leaves behind]  What a process has written to a file stays when it is killed:
the kernel has it.  So nothing waits for a disk, and a process that takes the place of this one on
the same host reads all of it.  Where the host dies, too, the job goes back to a checkpoint.

Each entry is a line of JSON, whose first element says what it is.  The last line may be torn: it
was being written, so nobody has heard of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pserver.storage import plain_file
from transpiler.files import bounded_json
from transpiler.files.named_errors import naming

SHORT = 2**14  # entries behind those that it begins with, from which on it may begin anew


class WriteAheadLog:
    """Appends entries to a file.  One thread at a time calls it.

    Args:
        path: of the file; one that is there is replaced by the first :meth:`begin`.
    """

    def __init__(self, path: str) -> None:
        self._path, self._file = Path(path), -1
        self._first = self._later = 0  # entries: it has begun with, and behind them

    @property
    def is_open(self) -> bool:
        """Whether it can be appended to."""
        return self._file >= 0

    @property
    def is_long(self) -> bool:
        """Whether it had better begin anew, with what follows from its entries."""
        return self._later > max(SHORT, 4 * self._first)

    def begin(self, entries: Iterable[list[Any]]) -> None:
        """Begins anew, in place of what it had: at no moment there is neither.

        Raises:
            OSError: the file cannot be written.
        """
        lines = [_line(each) for each in entries]
        beside = self._path.with_name(self._path.name + ".new")
        self.close()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        beside.unlink(missing_ok=True)  # of a process that died here
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._file = plain_file.descriptor(beside, flags, 0o600)
        _write(self._path, self._file, b"".join(lines))
        beside.replace(self._path)
        self._first, self._later = len(lines), 0

    def append(self, entry: list[Any]) -> None:
        """Adds an entry.

        Raises:
            OSError: the file cannot be written.
        """
        _write(self._path, self._file, _line(entry))
        self._later += 1

    def close(self) -> None:
        """Nothing more is written; harmless when called twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def remove(self) -> None:
        """The file is not to be read."""
        with suppress(OSError):
            self._path.unlink()


def read(path: str) -> Iterator[list[Any]]:
    """The entries of a file.

    Raises:
        OSError: there is none.
        ValueError: it is no write-ahead log.
    """
    with plain_file.reading(Path(path)) as file:
        for line in file:
            if line.endswith(b"\n"):
                entry = bounded_json.loads(line)
                if not (isinstance(entry, list) and entry and isinstance(entry[0], str)):
                    raise ValueError(f"{path}: expected a write-ahead log")
                yield entry


def _line(entry: list[Any]) -> bytes:
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n"


def _write(path: Path, file: int, data: bytes) -> None:
    left = memoryview(data)
    with naming(path):
        while left:
            left = left[os.write(file, left) :]
