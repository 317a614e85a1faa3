"""Processes that are forked for a job each, some at a time, and ended when their time is over.

A process has a group of its own, which ends with it, and a folder for its temporary files, with a
log of what it writes.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
FOREVER = 1e6
MEMORY = 4 << 30  # bytes of a process
LOOK_SECONDS = 0.1  # between two looks at a process's limits
BROKEN = 70  # the status of a process whose job has raised


@dataclass(frozen=True)
class Job:
    """``body`` returns the exit status; it has a limit of seconds, and one of ``MEMORY``.

    ``subject``: for the caller.
    """

    subject: Any
    body: Callable[[], int]
    limit: float = FOREVER


class Process:
    """A job's process."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._folder = tempfile.mkdtemp(prefix="m")  # sockets' paths must be short
        self._began = time.monotonic()
        self._pid = os.fork()
        if self._pid == 0:
            self._run()
        self.descriptor = os.pidfd_open(self._pid)

    def _run(self) -> None:
        status = BROKEN
        try:
            os.setsid()
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            log = os.open(os.path.join(self._folder, "log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for stream in (1, 2):
                os.dup2(log, stream)
            os.environ["PYTEST_DEBUG_TEMPROOT"] = os.environ["TMPDIR"] = self._folder
            tempfile.tempdir = None
            status = self.job.body()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    @property
    def late(self) -> bool:
        """Whether it has reached a limit; that of memory is no rlimit, as tables reserve more."""
        with suppress(OSError, IndexError):
            pages = int(Path(f"/proc/{self._pid}/statm").read_text().split()[1])
            if pages * resource.getpagesize() > MEMORY:
                return True
        return time.monotonic() > self._began + self.job.limit

    def wait(self) -> None:
        """Waits for its end."""
        select.select([self.descriptor], [], [])

    def end(self) -> tuple[int, float, str]:
        """Ends what is left of its group: the status, how long it took, and its log."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)
        _, status = os.waitpid(self._pid, 0)
        took = time.monotonic() - self._began
        os.close(self.descriptor)
        log = Path(self._folder, "log")
        text = log.read_text(errors="replace") if log.exists() else ""
        shutil.rmtree(self._folder, ignore_errors=True)
        return os.waitstatus_to_exitcode(status), took, text


def in_processes(jobs: Iterator[Job], count: int) -> Iterator[tuple[Any, int | None, float]]:
    """Runs jobs, ``count`` at a time: each one's subject, status and time.  The status is None
    where a limit was reached.
    """
    running: dict[int, Process] = {}  # by descriptor
    following = next(jobs, None)
    while running or following:
        while following and len(running) < count:
            process = Process(following)
            running[process.descriptor] = process
            following = next(jobs, None)
        ended, _, _ = select.select([*running], [], [], LOOK_SECONDS)
        for descriptor, process in [*running.items()]:
            if descriptor in ended or process.late:
                del running[descriptor]
                status, took, _ = process.end()
                late = descriptor not in ended or status == -signal.SIGXCPU
                yield process.job.subject, None if late else status, took
