"""One process that ``launch`` started: its output on the terminal and in its log file, its end, and
the process group that dies with ``launch``.

[Note: no orphans]  Every process joins one process group, whose leader (the guard) only reads a
pipe that only ``launch`` can write to.  When ``launch`` ends, even by kill -9, the kernel closes
the pipe; the guard wakes and kills the group: servers, trainers, and the processes that these have
started (data loader workers).  The kernel reuses the group's number only after the guard has ended.
A process joins at the fork, so it is guarded from its first moment on.  The group is not the
terminal's foreground group: Ctrl-C reaches ``launch`` alone, which passes it on.
"""

from __future__ import annotations

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

from pserver.launcher.log_file import LogFile
from pserver.launcher.terminal import CONTROL, Terminal
from pserver.side_business import SideBusiness
from pserver.telemetry.memory import resident_bytes

TAIL_LINES = 20
TRACE_LINES = 200  # of a traceback, and of what follows it
_TRACE = "Traceback (most recent call last):"
# a line of a process that another process's end has ended
_TOLD = re.compile(
    r"^(pserver\.errors\.(JobFailed|TrainerLost|ServerLost|Draining): |pserver: the job failed: )"
)
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


class Process:
    """A running process.  Two threads serve it: one reads its output, one waits for its end.

    Args:
        command, environment: of the process.
        attempt: how often it was started before, in this job: its log goes on.
        group: the group that it joins.
        terminal: where its lines go.
        owns_terminal: see [Note: who owns the terminal] in terminal.py.
        line: called for each line, in the reading thread.
        ended: called once, in the waiting thread.

    Attributes:
        name: "trainer 0".
        log: the file that holds its output.
        tail: its last lines; from its last traceback on, where there is one.
        told: the line in which it says that another process has ended it; "" where there is none.
        status: None while it runs; then its exit status, or 128 + the signal that killed it.
        stopped: ``launch`` asked it to end, so that its status says nothing about the job.
        killed: it did not, and ``launch`` killed it.
        preempted_after: the last step that it has taken, where it has left in order, because
            somebody asked it to; None: it has not.
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
        line: Callable[[Process, str], None] | None = None,
        ended: Callable[[Process], None],
    ) -> None:
        self.name, self.log, self.told = name, log, ""
        self._last, self._trace = deque[str](maxlen=TAIL_LINES), list[str]()
        self.status: int | None = None
        self.stopped = self.killed = False
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
        """Whether a signal has ended it, and not the script: also one that a handler has answered
        with the status of that signal, as ours does with SIGTERM's.
        """
        return killer(self.status) is not None

    @property
    def lived_seconds(self) -> float:
        """For how long it ran; 0 while it runs."""
        return self._over - self._began

    @property
    def tail(self) -> Sequence[str]:
        """See the class."""
        return self._trace or list(self._last)

    @property
    def suspended(self) -> bool:
        """Whether it runs no more, but has not ended: a SIGSTOP, or a debugger."""
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
            if self._owns:
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
        if not self._owns:
            self._showing.do(partial(self._terminal.line, self.name, text))
        if self._line is not None:
            self._seeing.do(partial(self._line, self, text))

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
            self.told = text
        elif text == _TRACE:
            self.told = ""
        self._last.append(text)
