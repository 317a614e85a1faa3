"""The live panel of ``launch`` on a terminal: the pass over the data, the script's values, and the
state and memory of each process.

::

    watch.py, a process --a line of JSON a second--> Feed --View--> panel_rows --> Terminal.show
                                                               four times a second, in a thread

``launch`` itself only says which processes there are; it waits for nothing here.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from io import StringIO
from typing import IO

from rich.console import Console
from rich.text import Text

from pserver.launcher.panel_rows import panel_rows
from pserver.launcher.panel_state import Feed, ProcessLine
from pserver.launcher.process import Group, Process
from pserver.launcher.terminal import Row, Terminal
from pserver.onlookers import onlooker
from transpiler.files import bounded_json

WATCH = (sys.executable, "-m", "pserver.launcher.watch")
DRAW_SECONDS = 0.25
END_SECONDS = 1.0  # for a drawing that is under way


class Panel:
    """Shows the panel while the block runs; a context manager.

    Where the terminal's owner draws a display of its own, the panel ends by itself.

    Args:
        title: what it is called.
        terminal: where it stands.
        group: which the asking process joins.
        environ: the variables of ``launch``; NO_COLOR counts.
        processes: those that have been started, so far.
        token: the path of the job's token file, or ""; None: the job has no servers to ask.
    """

    def __init__(
        self,
        title: str,
        terminal: Terminal,
        group: Group,
        environ: Mapping[str, str],
        processes: Callable[[], Sequence[Process]],
        token: str | None,
    ) -> None:
        self._title, self._terminal, self._group = title, terminal, group
        self._environ, self._processes = environ, processes
        self._feed, self._began = Feed(), time.monotonic()
        self._asking = None if token is None else self._start(token)
        self._over = threading.Event()
        self._drawing = threading.Thread(target=self._draw, name="panel", daemon=True)

    @onlooker("the panel", end=lambda panel: panel.leave())
    def _start(self, token: str) -> subprocess.Popen[bytes]:
        """Starts the asking process, which waits for endpoints."""
        return subprocess.Popen(
            [*WATCH, token, self._environ.get("PSERVER_KEYS", "")],
            env=dict(self._environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=self._group.id,
        )

    @onlooker("the panel", end=lambda panel: panel.leave())
    def watch(self, endpoints: Sequence[str]) -> None:
        """Asks servers how the job goes, from now on.

        Args:
            endpoints: of all servers, by number.
        """
        if self._asking is None or self._over.is_set():
            return
        assert self._asking.stdin is not None and self._asking.stdout is not None, "pipes"
        # it, and the pipe, may have been ended meanwhile
        with suppress(BrokenPipeError, ValueError), self._asking.stdin as line:
            line.write(f"{','.join(endpoints)}\n".encode())
        lines = self._asking.stdout
        threading.Thread(
            target=self._read, args=(lines,), name="panel: servers", daemon=True
        ).start()

    @onlooker("the panel", end=lambda panel: panel.leave())
    def _read(self, lines: IO[bytes]) -> None:
        with lines:
            for line in lines:
                self._feed.take(bounded_json.loads(line), time.monotonic())

    @onlooker("the panel", end=lambda panel: panel.leave())
    def _draw(self) -> None:
        while self._terminal.panel:
            height, width = self._terminal.size()
            now = time.monotonic()
            lines = list(self._lines(now))
            view = self._feed.view(self._title, now - self._began, lines)
            # half of the terminal, and the last column empty: no row wraps
            rows = panel_rows(view, width - 1, max(1, height // 2))
            self._terminal.show([self._row(row, width) for row in rows])
            if self._over.wait(DRAW_SECONDS):
                return
        self.close()

    def _row(self, row: Text, width: int) -> Row:
        console = Console(
            file=StringIO(),  # nothing is written but what is captured
            force_terminal=True,
            color_system="standard",
            width=width,
            no_color="NO_COLOR" in self._environ,
        )
        with console.capture() as written:
            console.print(row, end="", no_wrap=True, highlight=False)
        return written.get(), row.cell_len

    def _lines(self, now: float) -> Iterator[ProcessLine]:
        for process in self._processes():
            kind, _, number = process.name.partition(" ")
            of_server = kind == "server"
            if of_server:
                state, step = self._feed.server(int(number), now), self._feed.version(int(number))
            else:
                state, step = self._feed.trainer(int(number))
            if process.status is not None:
                state = f"exit status {process.status}" if process.status else "ended"
            waiting = "running" if self._asking is None or of_server else "starting"
            yield ProcessLine(process.name, state or waiting, step, process.memory_bytes)

    def close(self) -> None:
        """Removes the panel, and ends what it has started; harmless when called twice."""
        self.leave()
        self._end_asking()

    def leave(self) -> None:
        """Gives the rows back to the terminal."""
        self._over.set()
        self._terminal.end_panel()

    @onlooker("the process that asks for the panel")
    def _end_asking(self) -> None:
        if self._asking is not None:
            self._asking.kill()
            self._asking.wait()
            if self._asking.stdin is not None:
                with suppress(BrokenPipeError):
                    self._asking.stdin.close()

    def __enter__(self) -> Panel:
        self._begin()
        return self

    @onlooker("the panel", end=lambda panel: panel.leave())
    def _begin(self) -> None:
        self._terminal.panel = True
        self._drawing.start()

    def __exit__(self, *_: object) -> None:
        self.close()
        if self._drawing.ident is not None:  # it could be started
            self._drawing.join(END_SECONDS)
