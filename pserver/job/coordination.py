"""The file of the state that server 0 alone has of its job.

See [Note: a coordinator that comes back] in pserver/job_log/coordinator.py, and
pserver/job_log/own_state.py for the state itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import Thread
from typing import Any

from pserver.job.program import InstalledProgram
from pserver.job_log.files import WriteAheadLog, read
from pserver.job_log.own_state import OwnState, fold
from pserver.job_log_pb2 import OwnEntry

log = logging.getLogger(__name__)


class Coordination:
    """Writes the changes of server 0's own state to a file.  Its parts call it under the job's
    lock.

    Args:
        path: of the file.
        installed: what the job has installed on server 0.
        lock: the job's.
    """

    def __init__(
        self, path: str, installed: InstalledProgram, lock: AbstractContextManager[Any]
    ) -> None:
        coordinator, leases = installed.decisions.coordinator, installed.leases
        assert coordinator is not None, "server 0 has it"
        self._first = OwnEntry(plan=installed.plan.fingerprint())
        self._path, self._log, self._lock = path, WriteAheadLog(path), lock
        self._writers = coordinator, leases, installed.meetings
        self._state = OwnState(coordinator, leases.state, installed.meetings.state)

    def restore(self) -> None:
        """Restores the state of the process before this one.

        Raises:
            OSError, ValueError, KeyError, TypeError: it cannot be read, or is of another job.
        """
        entries = read(self._path)
        first = next(entries, OwnEntry())
        if first != self._first:
            raise ValueError(f"{self._path}: expected the log of this job, got {first}")
        fold(self._state, entries)
        self._state.settle()

    def begin(self) -> None:
        """Begins the file: every change is written from now on, while the file can be written."""
        self._written(lambda: self._log.begin(self._entries()))
        for writer in self._writers if self._log.is_open else ():
            writer.write = self._write

    def close(self) -> None:
        """Closes the file: the job is over."""
        for writer in self._writers:
            writer.write = None
        self._log.close()

    def _entries(self) -> list[OwnEntry]:
        return [self._first, *self._state.entries()]

    def _write(self, entry: OwnEntry) -> None:
        self._state.follow(entry)
        self._written(lambda: self._log.append(entry))
        if self._log.is_open and self._log.is_long:
            self._log.keep_tail()
            known = self._entries()
            anew = Thread(target=self._write_anew, args=(known,), name="the log anew", daemon=True)
            try:
                anew.start()
            except RuntimeError as error:  # the system has no thread left
                self._stays(error)

    def _write_anew(self, known: list[OwnEntry]) -> None:
        """Replaces a long file, in a thread of its own: steps are decided meanwhile."""
        try:
            file = self._log.write_beside(known)
        except Exception as error:  # of any kind: the present file is whole
            with self._lock:
                self._stays(error)
            return
        with self._lock:
            self._written(lambda: self._log.put_in_place(file, len(known)))

    def _stays(self, error: Exception) -> None:
        self._log.drop_tail()
        log.warning("cannot write the log %s anew, so it grows: %s", self._path, error)

    def _written(self, write: Callable[[], None]) -> None:
        """Calls ``write``; where that fails the job continues, and this process cannot be
        replaced.
        """
        try:
            write()
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        self.close()
        self._log.remove()
        text = "cannot write the log %s, so server 0 cannot come back by itself: %s"
        log.warning(text, self._path, error)
