"""One process that ``launch`` started: its output on the terminal and in its log file, its end, and
the process group that dies with ``launch``.

[Note: no orphans]  Every process joins one process group, whose leader (the guard) only reads a
pipe that only ``launch`` can write to.  When ``launch`` ends, even by kill -9, the kernel closes
the pipe; the guard wakes and kills the group: servers, trainers, and the processes that these have
started (data loader workers).  The kernel reuses the group's number only after the guard has ended.
A process joins at the fork, so it is guarded from its first moment on.  The group is not the
terminal's foreground group: Ctrl-C reaches ``launch`` alone, which passes it on.

[Note: who owns the terminal]  Lines are prefixed with the process's name and written whole.  On a
real terminal one process may own it: that process writes to a pseudo terminal, and its bytes pass
through unchanged, so that a live progress display works.  Other processes' lines first clear the
line of the display, which the display draws again below.  The log file holds the display's final
text, without control codes.

Where a panel is shown, it stands below everything else, and the owner's whole lines pass through
above it, in their colours; a line that it has not ended yet is the panel's first row.  An owner
that draws a display of its own (a carriage return that begins a line again, a backspace, a code
that moves the cursor or erases) needs the last lines for itself: the panel goes, for good, and the
bytes pass through as they would have without it.
"""

from __future__ import annotations

import math
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TextIO

from pserver.launcher.log_file import LogFile
from pserver.side_business import SideBusiness
from pserver.telemetry.memory import resident_bytes

# ---- terminal ----
#
# Standard output of ``launch``: the lines of all processes, and a panel below them.


MOST_UNENDED = 1 << 16  # bytes of a line of the owner: what has more is no text in lines
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"  # the cursor
CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-Z\\-_]")
# a carriage return that no line's end follows, a backspace, and all codes but colours
_DRAWS = re.compile(rb"\r(?![\r\n]|\Z)|\x08|\x1b\[[0-9;?]*[ -/]*[@-ln-~]|\x1b[78]")

# a row of the panel as it is written, and the cells that it fills
Row = tuple[str, int]


class Terminal:
    """The output of all processes, line by line.  Any thread may write.

    See [Note: who owns the terminal].

    Args:
        out: standard output.
        width: characters of the longest process name.
        environ: the variables that say what kind of terminal it is.

    Attributes:
        interactive: whether ``out`` is a real terminal that can clear its lines.
        panel: whether a panel is, or may be, shown.
    """

    def __init__(self, out: TextIO, width: int, environ: Mapping[str, str] | None = None) -> None:
        self._out = out
        self._width = width
        self._lock = threading.Lock()  # guards all below; writing happens under it, nothing else
        self.interactive = out.isatty() and (environ or {}).get("TERM") not in ("dumb", "unknown")
        self.panel = False
        self._rows: Sequence[Row] = ()
        self._drawn: Sequence[int] = ()  # the cells of the rows that stand there
        self._unended = b""  # of the owner: what has come of its last line

    def line(self, name: str, text: str) -> None:
        """Writes one line of a process."""
        clear = "\r\x1b[2K" if self.interactive else ""
        with self._lock:
            self._write(f"{'' if self._drawn else clear}{name:<{self._width}} | {text}\n")

    def through(self, data: bytes) -> None:
        """Passes on the output of the terminal's owner."""
        with self._lock:
            if not self.panel:
                self._write(data.decode(errors="replace"))
                return
            self._unended += data
            if _DRAWS.search(self._unended) or len(self._unended) > MOST_UNENDED:
                self._end_panel()
                return
            lines, end, self._unended = self._unended.rpartition(b"\n")
            self._write((lines + end).decode(errors="replace"))

    def show(self, rows: Sequence[Row]) -> None:
        """Draws the panel anew, where there still is one: as many rows as have room."""
        with self._lock:
            if self.panel:
                self._rows = rows
                self._write("")

    def end_panel(self) -> None:
        """Removes the panel for good; harmless where there is none."""
        with self._lock:
            self._end_panel()

    def _end_panel(self) -> None:
        if self.panel:
            self.panel = False
            unended, self._unended = self._unended, b""
            self._write(unended.decode(errors="replace"))

    def size(self) -> tuple[int, int]:
        """Lines and columns of a real terminal."""
        try:
            lines, columns = termios.tcgetwinsize(self._out.fileno())
        except termios.error:  # it has been closed: the log files continue
            lines, columns = 0, 0
        return lines or 24, columns or 80  # one that does not know says 0

    def restore(self) -> None:
        """Shows the cursor, which a display that was killed may have hidden."""
        if self.interactive:
            with self._lock:
                self._write(SHOW)

    def _write(self, text: str) -> None:
        """Writes text in the panel's place, and the panel below it.  The caller holds the lock."""
        # the reader of the pipe has ended (`| head`); the logs and the job continue
        with suppress(BrokenPipeError):
            self._out.write(self._erased() + text + self._drawn_anew())
            self._out.flush()

    def _erased(self) -> str:
        """The codes that erase the panel; a narrower terminal has wrapped its rows."""
        if not self._drawn:
            return ""
        _, columns = self.size()
        lines = sum(max(1, math.ceil(cells / columns)) for cells in self._drawn)
        self._drawn = ()
        return "\r" + (f"\x1b[{lines - 1}A" if lines > 1 else "") + "\x1b[J" + SHOW

    def _drawn_anew(self) -> str:
        if not (self.panel and self._rows):
            return ""
        lines, columns = self.size()
        rows = list(self._rows)
        if self._unended:
            from rich.cells import set_cell_size  # here: a probe of readiness imports no rich

            text = CONTROL.sub("", self._unended.decode(errors="replace")).rstrip("\r")
            text = set_cell_size(text.expandtabs(), columns - 1)
            rows.insert(0, (text, columns - 1))
        rows = rows[: max(1, lines - 1)]
        self._drawn = [cells for _, cells in rows]
        return HIDE + "\n".join(text for text, _ in rows)


# ---- process ----


TAIL_LINES = 20
TRACE_LINES = 200  # of a traceback, and of what follows it
_TRACE = "Traceback (most recent call last):"
# a line of a process that another process's end has ended
_TOLD = re.compile(
    r"^(pserver\.errors\.(JobFailed|TrainerLost|ServerLost|Draining): |pserver: the job failed: )"
)
# in such a line of a trainer: its job has lost it, and continues
_DROPPED = re.compile(r"TrainerLost: .*(goes on|gone on, or ended,) without it")
# a line of a trainer that has left its job because its host takes it away
_PREEMPTED = re.compile(r"^pserver: trainer \d+ was preempted after step (\d+)$")
_GUARD = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
sys.stdin.buffer.read()
os.killpg(0, signal.SIGKILL)
"""


class Group:
    """A process group that is killed when the block, or this whole process, ends.

    See [Note: no orphans].
    """

    def __init__(self) -> None:
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD], stdin=subprocess.PIPE, process_group=0
        )
        self.id = self._guard.pid

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.killpg(self.id, signal.SIGKILL)
        self._guard.wait()
        if self._guard.stdin is not None:
            self._guard.stdin.close()


def killer(status: int | None) -> signal.Signals | None:
    """The signal that an exit status of 128 and more stands for; None: it stands for none."""
    with suppress(ValueError):
        return signal.Signals((status or 0) - 128)
    return None


class ChildProcess:
    """A running process.  Two threads serve it: one reads its output, one waits for its end.

    Args:
        command, environment: of the process.
        attempt: how often it was started before, in this job: its log continues.
        group: the group that it joins.
        terminal: where its lines go.
        owns_terminal: see [Note: who owns the terminal] in processes.py.
        line: called for each line, in the reading thread.
        ended: called once, in the waiting thread.

    Attributes:
        name: "trainer 0".
        log: the file that holds its output.
        tail: its last lines; from its last traceback on, where there is one.
        reported_error: its line about the error by which another process has ended it; "":
            none.
        status: None while it runs; then its exit status, or 128 + the signal that killed it.
        stopped: ``launch`` asked it to end, so that its status does not count for the job.
        killed: it did not end, and ``launch`` killed it.
        preempted_after: the last step that it has taken, where it has left in order after a
            request; None: it has not.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        attempt: int,
        group: Group,
        terminal: Terminal,
        *,
        owns_terminal: bool = False,
        line: Callable[[ChildProcess, str], None] | None = None,
        ended: Callable[[ChildProcess], None],
    ) -> None:
        self.name, self.log, self.reported_error = name, log, ""
        self._last, self._trace = deque[str](maxlen=TAIL_LINES), list[str]()
        self.status: int | None = None
        self.stopped = self.killed = self._interrupted = self._hides = False
        self.preempted_after: int | None = None
        self._began = self._over = time.monotonic()
        self._terminal, self._owns, self._line, self._ended = terminal, owns_terminal, line, ended
        self._output, child_side = pty.openpty() if owns_terminal else os.pipe()
        if owns_terminal:
            termios.tcsetwinsize(child_side, terminal.size())
        self._file = LogFile(log, not attempt, self._say)
        self._showing = SideBusiness("the lines on standard output", self._file.add)
        self._seeing = SideBusiness(f"what is seen in the lines of {name}", self._say)
        try:
            self._popen = subprocess.Popen(
                list(command),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=child_side,
                stderr=child_side,
                process_group=group.id,
            )
        finally:
            os.close(child_side)
        self._reader = threading.Thread(target=self._read, name=f"{name}: output", daemon=True)
        self._reader.start()
        threading.Thread(target=self._wait, name=f"{name}: end", daemon=True).start()

    @property
    def failed(self) -> bool:
        """Whether it ended by itself, with another status than 0."""
        return self.status not in (None, 0) and not self.stopped

    @property
    def signalled(self) -> bool:
        """Whether a signal has ended it, and not the script: also where a handler has exited with
        the status of that signal, as ours does with SIGTERM's.  A process that has left in order
        was not ended by a signal.
        """
        return killer(self.status) is not None and self.preempted_after is None

    @property
    def blameless(self) -> bool:
        """Whether a signal has ended it, or its job has lost it, as its output says: not a fault of
        its script.
        """
        return self.signalled or bool(_DROPPED.search(self.reported_error))

    @property
    def lived_seconds(self) -> float:
        """The seconds for which it ran; 0 while it runs."""
        return self._over - self._began

    @property
    def tail(self) -> Sequence[str]:
        """See the class."""
        return self._trace or list(self._last)

    @property
    def suspended(self) -> bool:
        """Whether it is stopped but has not ended: by SIGSTOP, or a debugger."""
        try:
            stat = Path(f"/proc/{self._popen.pid}/stat").read_text(encoding="utf-8")
        except OSError:  # it has ended, or the system has no such files
            return False
        return self.status is None and stat.rpartition(")")[2].split()[0] in ("T", "t")

    @property
    def memory_bytes(self) -> int:
        """Bytes of it that are in memory now; 0: it has ended, or the system does not say."""
        if self.status is not None:
            return 0
        return resident_bytes(Path(f"/proc/{self._popen.pid}/statm"))

    def stop(self, number: int) -> None:
        """Sends a signal that asks it to end."""
        if self.status is None:
            self.killed = self.stopped and number == signal.SIGKILL
            self.stopped = True
            self._interrupted |= number == signal.SIGINT
            self._popen.send_signal(number)

    def _wait(self) -> None:
        status = self._popen.wait()
        # a process that it started may hold the output open for longer
        self._reader.join(timeout=1.0)
        self._over = time.monotonic()
        self.status = 128 - status if status < 0 else status
        self._ended(self)

    def _read(self) -> None:
        rest = b""
        while chunk := self._chunk():
            if self._owns and not self._interrupted:
                self._showing.do(partial(self._terminal.through, chunk))
            *lines, rest = (rest + chunk).split(b"\n")
            # drop the text that a carriage return has overwritten
            rest = rest[rest.rfind(b"\r", 0, -1) + 1 :]
            for line in lines:
                self._take(line)
        if rest:
            self._take(rest)
        self._file.close()
        os.close(self._output)

    def _chunk(self) -> bytes:
        try:
            return os.read(self._output, 1 << 16)
        except OSError:  # on Linux: the other side of the pseudo terminal is closed
            return b""

    def _take(self, raw: bytes) -> None:
        text = CONTROL.sub("", raw.decode(errors="replace")).rstrip("\r").rpartition("\r")[2]
        self._remember(text)
        self._file.add(text)
        if (self._interrupted or not self._owns) and not self._is_of_interrupt(text):
            self._showing.do(partial(self._terminal.line, self.name, text))
        if self._line is not None:
            self._seeing.do(partial(self._line, self, text))

    def _is_of_interrupt(self, text: str) -> bool:
        """Whether a line is of the traceback with which Ctrl-C ends Python; the log has it."""
        within, self._hides = self._hides, self._interrupted and text == _TRACE
        if within and (text.startswith(" ") or not text):
            self._hides = True
        return self._hides or (within and text.startswith("KeyboardInterrupt"))

    def _say(self, text: str) -> None:
        self._terminal.line(self.name, f"pserver launch: {text}")

    def _remember(self, text: str) -> None:
        """Keeps the lines that a report may need."""
        if text == _TRACE and not any("exception" in line for line in list(self._last)[-2:]):
            self._trace = [text]  # not one of a chain of exceptions
        elif self._trace and len(self._trace) < TRACE_LINES:
            self._trace.append(text)
        if found := _PREEMPTED.match(text):
            self.preempted_after = int(found[1])
        if _TOLD.match(text):
            self.reported_error = text
        elif text == _TRACE:
            self.reported_error = ""
        self._last.append(text)
