"""The live panel of ``launch`` on a terminal: the pass over the data, the script's values, and the
state and memory of each process.

::

    watch.py, a process --a line of JSON a second--> Panel --View--> panel_rows --> Terminal.show
                                                                four times a second, in a thread

``launch`` itself only gives the list of processes; it waits for nothing here.
"""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from io import StringIO
from typing import IO, Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from pserver.launcher.processes import ChildProcess, Group, Row, Terminal
from pserver.onlookers import onlooker
from transpiler.files import bounded_json

# ---- panel view ----
#
# What the panel of ``launch`` shows: the job's state, as ``watch`` prints it, and the processes.


STALE_SECONDS = 5.0  # after which a state says nothing of now
UNREACHABLE = "unreachable"

Job = Mapping[str, Any]  # a line of ``watch``; empty before the first one


@dataclass(frozen=True, slots=True)
class ProcessLine:
    """One process.

    Attributes:
        step: None: it has none, or none is known.
        memory_bytes: resident; 0: not known.
    """

    name: str
    state: str
    step: int | None = None
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class View:
    """All that a panel shows.

    Attributes:
        seconds: since the launch.
    """

    title: str
    seconds: float
    processes: Sequence[ProcessLine]
    job: Job = field(default_factory=dict)


def known(name: str, job: Job, age: float) -> tuple[str, int | None]:
    """A process's state by the job's state: its own in words, "" where no server knows it,
    and its step.

    Args:
        name: "server 0", "trainer 1".
        age: of the state, in seconds.
    """
    kind, _, number = name.partition(" ")
    if kind == "server":
        found = job.get("servers", ())[int(number) : int(number) + 1]
        state = UNREACHABLE if age > STALE_SECONDS else "".join(each["state"] for each in found)
        return (state, found[0]["version"]) if found else ("", None)
    by_number = {each["number"]: each for each in job.get("trainers", ())}
    trainer = by_number.get(int(number))
    return ("", None) if trainer is None else (trainer["word"], trainer["step"])


# ---- panel rows ----
#
# The rows of the panel of ``launch``, for a terminal of any width: pure.


BAR = 10  # cells of a bar at least; with less room there is none
VALUE_ROWS = 3  # of the script's values at most
NOTICE_ROWS = 2  # of what is wrong at most
STATE = 40  # cells of a process's state at most
GOOD = ("serving", "training", "running", "finished", "left", "ended")
BAD = ("failed", "lost", UNREACHABLE, "exit status", "killed")  # how a state begins that is none


def panel_rows(view: View, width: int, height: int) -> list[Text]:
    """The panel, row by row.

    Args:
        width: cells of a row at most.
        height: rows at most: processes that have no room are counted in the last one.
    """
    rows = [_head(view, width)]
    if progress := view.job.get("progress"):
        rows.append(_progress(progress, width))
    rows += _values(view.job.get("headline", ()), width)
    wrong = [each["text"] for each in view.job.get("notices", ()) if each["kind"] == "warn"]
    rows += [Text(text, style="yellow") for text in wrong[:NOTICE_ROWS]]
    room = max(1, height - len(rows))
    shown = view.processes if len(view.processes) <= room else view.processes[: room - 1]
    rows += _processes(shown, width)
    if left := len(view.processes) - len(shown):
        rows.append(Text(f"and {left} more processes", style="dim"))
    for row in rows:
        row.truncate(width, overflow="ellipsis")
    return rows[: max(1, height)]


def _head(view: View, width: int) -> Text:
    """A rule with the script's name, and the time since the launch."""
    time = str(timedelta(seconds=int(view.seconds)))
    title = Text(view.title)
    title.truncate(max(1, width - len(time) - 9), overflow="ellipsis")
    left = Text.assemble(("\u2500\u2500 ", "dim"), (title.plain, "bold"), " ")
    rule = max(1, width - left.cell_len - len(time) - 4)
    return left.append("\u2500" * rule, "dim").append(f" {time} ").append("\u2500\u2500", "dim")


def _progress(progress: Mapping[str, Any], width: int) -> Text:
    """The pass: a bar where there is room, batches, and the time that is left."""
    row, said = Text(f"pass {progress['number']}  "), progress["text"]
    room = width - row.cell_len - cell_len(said) - 2
    if progress["batches"] and room >= BAR:
        done = math.floor(room * min(1.0, progress["batch"] / progress["batches"]))
        row.append("\u2501" * done, "green").append("\u2500" * (room - done), "dim").append("  ")
    return row.append(said)


def _values(headline: Sequence[str], width: int) -> list[Text]:
    """The samples per second and the script's values, in as many rows as they need."""
    rows = list[str]()
    for part in headline:
        if rows and cell_len(rows[-1]) + 3 + cell_len(part) <= width:
            rows[-1] += f"   {part}"
        else:
            rows.append(part)
    return [Text(row) for row in rows[:VALUE_ROWS]]


def _processes(processes: Sequence[ProcessLine], width: int) -> Iterator[Text]:
    """A row for each process: its name, state, step and memory."""
    names = max((len(each.name) for each in processes), default=0)
    steps = max((len(_step(each)) for each in processes), default=0)
    sizes = max((len(_memory(each)) for each in processes), default=0)
    states = max((cell_len(each.state) for each in processes), default=0)
    states = max(1, min(states, STATE, width - names - steps - sizes - 6))
    for each in processes:
        state = Text(each.state, _style(each.state))
        state.truncate(states, overflow="ellipsis", pad=True)
        numbers = f"  {_step(each):>{steps}}" if steps else ""
        row = Text(f"{each.name:<{names}}  ").append_text(state)
        row.append(f"{numbers}  {_memory(each):>{sizes}}".rstrip())
        row.rstrip()
        yield row


def _step(process: ProcessLine) -> str:
    return "" if process.step is None else f"step {process.step}"


def _memory(process: ProcessLine) -> str:
    if not process.memory_bytes:
        return ""
    count = process.memory_bytes
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def _style(state: str) -> str:
    if state in GOOD:
        return "green"
    return "bold red" if state.startswith(BAD) else "yellow"


# ---- panel ----


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
        processes: those that have been started so far.
        token: the path of the job's token file, or ""; None: the job has no servers to ask.
    """

    def __init__(
        self,
        title: str,
        terminal: Terminal,
        group: Group,
        environ: Mapping[str, str],
        processes: Callable[[], Sequence[ChildProcess]],
        token: str | None,
    ) -> None:
        self._title, self._terminal, self._group = title, terminal, group
        self._environ, self._processes = environ, processes
        self._job, self._taken = dict[str, Any](), 0.0  # what ``watch`` has printed last, and when
        self._seen = set[str]()  # processes that servers have ever known
        self._began = time.monotonic()
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
        """Begins to ask servers for the job's progress.

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
                self._job, self._taken = bounded_json.loads(line), time.monotonic()

    @onlooker("the panel", end=lambda panel: panel.leave())
    def _draw(self) -> None:
        while self._terminal.panel:
            height, width = self._terminal.size()
            now = time.monotonic()
            job, age = self._job, now - self._taken
            view = View(self._title, now - self._began, list(self._lines(job, age)), job)
            # half of the terminal, and the last column empty: no row wraps
            rows = panel_rows(view, width - 1, max(1, height // 2))
            self._terminal.show([self._row(row, width) for row in rows])
            if self._over.wait(DRAW_SECONDS):
                return
        self.close()

    def _row(self, row: Text, width: int) -> Row:
        console = Console(
            file=StringIO(),  # the output is only captured
            force_terminal=True,
            color_system="standard",
            width=width,
            no_color="NO_COLOR" in self._environ,
        )
        with console.capture() as written:
            console.print(row, end="", no_wrap=True, highlight=False)
        return written.get(), row.cell_len

    def _lines(self, job: Job, age: float) -> Iterator[ProcessLine]:
        for process in self._processes():
            state, step = known(process.name, job, age)
            if state:
                self._seen.add(process.name)
            if process.status is not None:
                state = f"exit status {process.status}" if process.status else "ended"
            starts = process.name.startswith("trainer ") and process.name not in self._seen
            waiting = "starting" if starts and self._asking is not None else "running"
            yield ProcessLine(process.name, state or waiting, step, process.memory_bytes)

    def close(self) -> None:
        """Removes the panel, and ends its process; harmless when called twice."""
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
