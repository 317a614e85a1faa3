"""The last lines of a log, of those that lie in one folder."""

from __future__ import annotations

import os
import stat
from pathlib import Path

SUFFIX = ".log"
LAST_BYTES = 2**16
MOST_LINES = 500


class LogFiles:
    """The regular files "*.log" that lie directly in a folder: no links, no other folders.

    Args:
        folder: the folder; None: there are none.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def names(self) -> list[str]:
        """The names of all of them, sorted."""
        if self._folder is None:
            return []
        try:
            with os.scandir(self._folder) as entries:
                return sorted(
                    entry.name
                    for entry in entries
                    if entry.name.endswith(SUFFIX) and entry.is_file(follow_symlinks=False)
                )
        except OSError:  # it is not there yet
            return []

    def tail(self, name: str, lines: int) -> list[str]:
        """The last lines of a log.

        Args:
            name: one of :meth:`names`; not a path.
            lines: the largest number of them.

        Raises:
            KeyError: there is no such log.
        """
        if self._folder is None or name not in self.names():
            raise KeyError(name)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # it may have been replaced
        try:
            descriptor = os.open(self._folder / name, flags)
        except OSError:
            raise KeyError(name) from None
        with open(descriptor, "rb") as file:
            size = os.fstat(descriptor).st_size
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise KeyError(name)
            file.seek(max(0, size - LAST_BYTES))
            text = file.read(LAST_BYTES).decode(errors="replace")
        found = text.splitlines()
        whole = found[1:] if size > LAST_BYTES else found  # the first may be half a line
        return whole[-max(0, min(lines, MOST_LINES)) :] if lines > 0 else []
