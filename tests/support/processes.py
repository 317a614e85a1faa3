"""Servers and trainers as real processes, started by hand: a test has each one's pid, its output as
it comes, and its end.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tests.support.fork_server import started
from tests.support.load import factor, patiently, scaled

PATIENCE = 60.0  # seconds, for what takes a few on an idle machine; they grow with the load

DEADLINES = (  # of a process that is tested
    "--heartbeat-timeout",
    "--start-timeout",
    "PSERVER_HEARTBEAT_TIMEOUT",
    "PSERVER_START_TIMEOUT",
)


class Started:
    """One process, and what it has said so far."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        role: Mapping[str, str],
        cwd: Path,
        company: list[Started],
    ) -> None:
        self.name = name
        # itself among them: what they have said explains what this one has not
        self._company = company
        self.lines: list[str] = []
        self.times: list[float] = []  # by line, when it came
        self.ended_at = 0.0  # of the clock that every process on this machine shares
        self._changed = threading.Condition()
        self._popen = started(arguments, {**os.environ, "PYTHONUNBUFFERED": "1", **role}, cwd)
        self.pid = self._popen.pid
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            with self._changed:
                self.times.append(time.monotonic())
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        self._popen.wait()
        with self._changed:
            self.ended_at = time.monotonic()
            self._changed.notify_all()

    def __repr__(self) -> str:
        return f"---- {self.name}\n" + "\n".join(self.lines)

    def said(self, pattern: str, begin: int = 0, patience: float = PATIENCE) -> re.Match[str]:
        """The first line from number ``begin`` on that holds the pattern; waits for it."""

        def found() -> re.Match[str] | None:
            return next(
                (match for line in self.lines[begin:] if (match := re.search(pattern, line))), None
            )

        with self._changed:
            patiently(
                lambda left: self._changed.wait_for(
                    lambda: found() is not None or self.ended_at > 0, left
                ),
                patience,
            )
            match = found()
        assert match is not None, f"{self.name} did not say {pattern!r}\n{self._company}"
        return match

    def tell(self, line: str) -> None:
        """Writes a line to its input."""
        assert self._popen.stdin is not None
        self._popen.stdin.write(line + "\n")
        self._popen.stdin.flush()

    def send(self, number: signal.Signals) -> None:
        """Sends it a signal."""
        self._popen.send_signal(number)

    def status(self, patience: float = PATIENCE) -> int:
        """Its exit status; waits for its end."""
        with self._changed:
            ended = patiently(
                lambda left: self._changed.wait_for(lambda: self.ended_at > 0, left), patience
            )
        assert ended, f"{self.name} has not ended within {scaled(patience):g} s\n{self._company}"
        return int(self._popen.returncode)

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._popen.poll() is None

    def end(self) -> None:
        """Whatever it does, it ends now."""
        if self.running:
            self._popen.kill()
        patiently(self._popen.wait, PATIENCE)
        self._reader.join(scaled(PATIENCE))
        for pipe in (self._popen.stdin, self._popen.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # what it was told and has not read
                pipe.close()


class Processes:
    """What a test, or a test file, has started.

    The deadlines of its processes are those at the load of when the first of them could start: all
    of a job have the same.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._factor = factor()
        self.all: list[Started] = []

    def python(self, name: str, *arguments: str, **role: str) -> Started:
        """A Python process with these arguments and environment variables; its deadlines are those
        at this load.
        """
        told = {name: self._told([name, value])[1] for name, value in role.items()}
        process = Started(name, self._told(arguments), told, self.path, self.all)
        self.all.append(process)
        return process

    def scaled(self, deadline: float) -> float:
        """What the processes have been told where a test says so many seconds."""
        return round(deadline * self._factor, 1)

    def _told(self, words: Sequence[str]) -> list[str]:
        """Arguments, with the deadlines among them as they are at this load."""
        told = list(words)
        for place, flag in enumerate(words[:-1]):
            if flag in DEADLINES:
                told[place + 1] = str(self.scaled(float(words[place + 1])))
        return told

    def servers(self, count: int, deadline: float, *flags: str) -> list[tuple[Started, str]]:
        """Parameter servers that are ready, each with its endpoint."""
        command = ["-m", "pserver", "serve", "--heartbeat-timeout", str(deadline), *flags]
        servers = [self.python(f"server {number}", *command) for number in range(count)]
        return [(server, server.said(r"pserver ready at (\S+)")[1]) for server in servers]

    def trainers(
        self, count: int, endpoints: list[str], deadline: float, *arguments: str
    ) -> list[Started]:
        """Trainers of one job."""
        job = {
            "TRAINING_ROLE": "TRAINER",
            "TRAINERS": str(count),
            "PSERVER_ENDPOINTS": ",".join(endpoints),
        }
        return [
            self.python(
                f"trainer {number}",
                *arguments,
                **job,
                TRAINER_ID=str(number),
                PSERVER_HEARTBEAT_TIMEOUT=str(deadline),
            )
            for number in range(count)
        ]

    def end(self) -> None:
        """Leaves nothing behind."""
        for process in reversed(self.all):
            process.end()
