"""The lines of all processes, at the driver."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

from pserver.launcher.log_file import LogFile
from pserver.launcher.processes import Terminal


class Output:
    """Standard output of the driver, and a file for each process; a context manager.

    Args:
        width: characters of the longest process name.
        log_dir: the folder of ``server-0.log``, ``trainer-0.log``, ...; None: there are no files.
    """

    def __init__(self, width: int, log_dir: str | None) -> None:
        self._terminal = Terminal(sys.stdout, width)
        self._folder = None if log_dir is None else Path(log_dir)
        self._files: dict[str, LogFile] = {}
        self._stack = ExitStack()

    def line(self, name: str, text: str) -> None:
        """A line of a process."""
        self._terminal.line(name, text)
        if self._folder is not None:
            if name not in self._files:
                self._folder.mkdir(parents=True, exist_ok=True)
                path = self._folder / f"{name.replace(' ', '-')}.log"
                self._files[name] = LogFile(path, True, self._say)
                self._stack.callback(self._files[name].close)
            self._files[name].add(text)

    def _say(self, text: str) -> None:
        self._terminal.line("driver", text)

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
