"""The file with the output of one process, which may be on a disk that gets full."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pserver.side_business import SideBusiness


class LogFile:
    """Appends lines to a file.  One thread uses it.

    A line that cannot be written is left out, and counted: when the file can be written again a
    line says how many are missing there.  See [Note: side business] in
    ``pserver/side_business.py``.

    Args:
        path: of the file.
        anew: existing contents are dropped.
        say: reports that lines cannot be written, and that they can again.

    Raises:
        OSError: it cannot be opened; it names the path.
    """

    def __init__(self, path: Path, anew: bool, say: Callable[[str], None]) -> None:
        more = os.O_TRUNC if anew else os.O_APPEND
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | more, 0o666)
        self._filing = SideBusiness(f"the log {path}", say)
        self._missing = 0  # lines
        self._torn = False  # the last line is there in part

    def add(self, text: str) -> None:
        """Appends a line; never raises."""
        if self._filing.do(lambda: self._add(text)) is None:
            self._missing += 1

    def close(self) -> None:
        """Closes the file."""
        with suppress(OSError):
            os.close(self._descriptor)

    def _add(self, text: str) -> bool:
        begin = "\n" if self._torn else ""
        gap = f"... {self._missing} lines could not be written here\n" if self._missing else ""
        self._write(f"{begin}{gap}{text}\n".encode(errors="replace"))
        self._missing = 0
        return True

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            written = os.write(self._descriptor, left)
            self._torn = bool(left[written:])
            left = left[written:]
