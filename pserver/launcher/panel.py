"""The live panel of ``launch`` on a terminal: the pass over the data, the script's values, and the
state and memory of each process.

::

    watch.py, a process --a line of JSON a second--> Feed --View--> panel_rows --> Terminal.show
                                                               four times a second, in a thread

``launch`` itself only gives the list of processes; it waits for nothing here.
"""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import StringIO
from typing import IO, Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from pserver.launcher.processes import ChildProcess, Group, Row, Terminal
from pserver.onlookers import onlooker
from transpiler.files import bounded_json

# ---- panel state ----
#
# What the panel of ``launch`` shows, computed from what servers say: pure, but for its memory.


STALE_SECONDS = 5.0  # after which an answer says nothing of now
RATE_SECONDS = 10.0  # over which samples are counted

Server = Mapping[str, Any]  # what ``watch.panel_answer`` makes of a server's answer


@dataclass(frozen=True, slots=True)
class DataProgress:
    """The progress of the slowest trainer in the data.

    Attributes:
        number: of the pass, from 1.
        batch: the one that it has been given.
        batches: of the pass; 0: not known.
        seconds_left: of the pass; None: not known yet.
    """

    number: int
    batch: int
    batches: int
    seconds_left: float | None = None


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
        samples_per_second: of all trainers together; None: not known.
        values: of ``fleet.report``, by name: the mean over the trainers that report it.
    """

    title: str
    seconds: float
    processes: Sequence[ProcessLine]
    progress: DataProgress | None = None
    samples_per_second: float | None = None
    values: Mapping[str, float] = field(default_factory=dict)


class Feed:
    """The successive states of a job's servers.

    One thread calls :meth:`update`; another that reads meanwhile gets the state before or after it.
    """

    def __init__(self) -> None:
        self._servers: Sequence[Server] = ()
        self._taken = 0.0
        self._seen = set[int]()  # trainers that a server has ever known
        self._samples = deque[tuple[float, int]]()  # when, and how many in all
        self._pass = (0, 0)  # which one is timed, and how many batches it has
        self._began = (0.0, 0)  # when it was first seen, and at which batch
        self._view: tuple[DataProgress | None, float | None, Mapping[str, float]] = (None, None, {})

    def update(self, servers: Sequence[Server], now: float) -> None:
        """Takes the present states of all servers.

        Args:
            servers: by number.
            now: in seconds of any clock that only goes on.
        """
        self._servers, self._taken = servers, now
        if not any(server["state"] for server in servers):
            return  # they have ended, or are unreachable: the last state stays
        trainers = self._trainers()
        self._seen |= trainers.keys()
        reports = [trainer["report"] for trainer in trainers.values()]
        self._view = self._progress(reports, now), self._rate(reports, now), means(reports)

    def view(self, title: str, seconds: float, processes: Sequence[ProcessLine]) -> View:
        """The state as a panel shows it."""
        return View(title, seconds, processes, *self._view)

    def server(self, number: int, now: float) -> str:
        """A server's state in a word or two; "" where none has been asked."""
        if number >= len(self._servers):
            return ""
        if now - self._taken > STALE_SECONDS or not self._servers[number]["state"]:
            return "no answer"
        return str(self._servers[number]["state"])

    def version(self, number: int) -> int | None:
        """The updates that a server has applied."""
        if number >= len(self._servers) or not self._servers[number]["state"]:
            return None
        return int(self._servers[number]["version"])

    def trainer(self, number: int) -> tuple[str, int | None]:
        """A trainer's state in words, "" where no server knows it, and its step."""
        known = self._trainers().get(number)
        if known is None:
            return "running" if number in self._seen else "", None
        state, doing = str(known["state"]), str(known["activity"])
        if state == "joined":
            state = "training" if not doing or doing.startswith("step ") else doing
        return state, int(known["step"])

    def _trainers(self) -> dict[int, Mapping[str, Any]]:
        """Each trainer by number, as the first server that knows it reports it."""
        found: dict[int, Mapping[str, Any]] = {}
        for server in self._servers:
            for trainer in server["trainers"]:
                found.setdefault(trainer["trainer_id"], trainer)
        return found

    def _progress(self, reports: Sequence[Mapping[str, Any]], now: float) -> DataProgress | None:
        places = [(each["passes"], each["batch"], each["batches"]) for each in reports]
        number, batch, batches = min((each for each in places if each[0]), default=(0, 0, 0))
        if not number:
            return None
        if self._pass != (number, batches) or batch < self._began[1]:
            self._pass, self._began = (number, batches), (now, batch)
        seconds, done = now - self._began[0], batch - self._began[1]
        left = (batches - batch) * seconds / done if batches and done else None
        return DataProgress(number, batch, batches, left)

    def _rate(self, reports: Sequence[Mapping[str, Any]], now: float) -> float | None:
        samples = sum(each["samples"] for each in reports)
        if self._samples and samples < self._samples[-1][1]:
            self._samples.clear()  # a trainer has left
        self._samples.append((now, samples))
        while now - self._samples[0][0] > RATE_SECONDS:
            self._samples.popleft()
        first, before = self._samples[0]
        return (samples - before) / (now - first) if samples and now > first else None


def means(reports: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean of each value over the reports that have it.

    Example:
        >>> means([{"values": {"loss": 1.0}}, {"values": {"loss": 3.0, "auc": 0.5}}])
        {'auc': 0.5, 'loss': 2.0}
    """
    found: dict[str, list[float]] = {}
    for report in reports:
        for name, value in report["values"].items():
            found.setdefault(name, []).append(float(value))  # "nan" and "inf" are texts
    return {name: sum(values) / len(values) for name, values in sorted(found.items())}


# ---- panel rows ----
#
# The rows of the panel of ``launch``, for a terminal of any width: pure.


BAR = 10  # cells of a bar at least; with less room there is none
VALUE_ROWS = 3  # of the script's values at most
STATE = 40  # cells of a process's state at most
GOOD = ("serving", "training", "running", "finished", "left", "ended")
BAD = ("failed", "lost", "no answer", "exit status", "killed")  # how a state begins that is none


def panel_rows(view: View, width: int, height: int) -> list[Text]:
    """The panel, row by row.

    Args:
        width: cells of a row at most.
        height: rows at most: processes that have no room are counted in the last one.
    """
    rows = [_head(view, width)]
    if view.progress is not None:
        rows.append(_progress(view.progress, width))
    rows += _values(view, width)
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
    time = clock(view.seconds)
    title = Text(_printable(view.title))
    title.truncate(max(1, width - len(time) - 9), overflow="ellipsis")
    left = Text.assemble(("\u2500\u2500 ", "dim"), (title.plain, "bold"), " ")
    rule = max(1, width - left.cell_len - len(time) - 4)
    return left.append("\u2500" * rule, "dim").append(f" {time} ").append("\u2500\u2500", "dim")


def _progress(progress: DataProgress, width: int) -> Text:
    """The pass: a bar where there is room, batches, and the time that is left."""
    row = Text(f"pass {progress.number}  ")
    if not progress.batches:
        return row.append(f"batch {progress.batch}")
    part = min(1.0, progress.batch / progress.batches)
    said = f"{progress.batch}/{progress.batches}  {math.floor(100 * part)}%"
    if progress.seconds_left is not None:
        said += f"  {clock(progress.seconds_left)} left"
    room = width - row.cell_len - cell_len(said) - 2
    if room >= BAR:
        done = math.floor(room * part)
        row.append("\u2501" * done, "green").append("\u2500" * (room - done), "dim").append("  ")
    return row.append(said)


def _values(view: View, width: int) -> list[Text]:
    """The samples per second and the script's values, in as many rows as they need."""
    parts = [f"{_printable(name)} {value:.4g}" for name, value in view.values.items()]
    if view.samples_per_second is not None:
        parts.insert(0, f"{view.samples_per_second:,.0f} samples/s")
    rows = list[str]()
    for part in parts:
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
        state = Text(_printable(each.state), _style(each.state))
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


def _printable(text: str) -> str:
    """Text of other processes, without control codes of a terminal."""
    return "".join(each if each.isprintable() else "?" for each in text)


def clock(seconds: float) -> str:
    """Hours, minutes and seconds.

    Example:
        >>> clock(3725.4)
        '1:02:05'
    """
    whole = max(0, int(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


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
                self._feed.update(bounded_json.loads(line), time.monotonic())

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
            file=StringIO(),  # the output is only captured
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
