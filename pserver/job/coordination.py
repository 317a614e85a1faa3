"""The state that server 0 alone has of its job, in a file: its log, its lease table, and what it
remembers of the trainers' meetings.

See [Note: a coordinator that comes back] in pserver/job_log/coordinator.py.  Each part writes its
changes to the file, and the process that replaces this one reads them.

[Note: between a record and its samples]  A record names the samples that its steps consume, and the
lease table learns of them when the steps are applied.  A server that dies between the two has
written the record alone; so the samples of such records are given to the table at the end.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import chain
from threading import Thread
from typing import Any, Protocol

from pserver.job.program import InstalledProgram
from pserver.job_log.files import WriteAheadLog, read
from pserver.job_log.records import (
    Consumed,
    Decided,
    Process,
    read_consumed,
    read_process,
    read_record,
    write_process,
)
from pserver.job_log_pb2 import OwnEntry

log = logging.getLogger(__name__)


class StatePart(Protocol):
    """A part of the state that server 0 alone has.

    Attributes:
        write: called with each change.
    """

    write: Callable[[OwnEntry], None] | None

    def entries(self) -> list[OwnEntry]:
        """All entries, for a replacement of the process."""

    def restore_entry(self, entry: OwnEntry) -> None:
        """Takes an entry of the process before."""


class Coordination:
    """Writes the changes of server 0's parts of a job to a file.  Its parts call it under the job's
    lock.

    Args:
        path: of the file.
        installed: what the job has installed on server 0.
        lock: the job's.
    """

    def __init__(
        self, path: str, installed: InstalledProgram, lock: AbstractContextManager[Any]
    ) -> None:
        coordinator, meetings = installed.decisions.coordinator, installed.meetings
        assert coordinator is not None, "server 0 has it"
        self._fingerprint = installed.plan.fingerprint()
        self._path, self._log, self._lock = path, WriteAheadLog(path), lock
        self._leases = installed.leases
        self._parts: dict[str, StatePart] = {
            **dict.fromkeys(("log", "record", "left"), coordinator),
            **dict.fromkeys(("leases", "lease"), self._leases),
            **dict.fromkeys(("barrier", "put_off", "round", "text"), meetings),
        }
        # by process: what its decided steps consume, and the lease table has not heard of
        self._unheard: dict[Process, deque[Consumed]] = defaultdict(deque)

    def restore(self) -> None:
        """Restores the entries of the process before this one.

        Raises:
            OSError, ValueError, KeyError, TypeError: it cannot be read, or is of another job.
        """
        entries = read(self._path)
        first = next(entries, OwnEntry())
        if first.plan != self._fingerprint:
            raise ValueError(f"{self._path}: expected the log of this job, got {first}")
        for entry in entries:
            self._restore_entry(entry)
        for process, steps in self._unheard.items():
            for ranges in steps:
                self._leases.decided(process.trainer, process.incarnation, ranges)
        self._unheard.clear()

    def _restore_entry(self, entry: OwnEntry) -> None:
        kind = entry.WhichOneof("what")
        if kind == "unheard":
            self._hear(read_process(entry.unheard.process), read_consumed(entry.unheard.consumed))
        elif kind in self._parts:
            self._parts[kind].restore_entry(entry)
            self._follow(entry)
        else:
            raise ValueError(f"{self._path}: expected an entry of this version, got {kind}")

    def begin(self) -> None:
        """Begins the file: every change is written from now on, while the file can be written."""
        self._written(lambda: self._log.begin(self._entries()))
        for part in self._parts.values() if self._log.is_open else ():
            part.write = self._write

    def close(self) -> None:
        """Closes the file: the job is over."""
        for part in self._parts.values():
            part.write = None
        self._log.close()

    def _entries(self) -> Iterator[OwnEntry]:
        yield OwnEntry(plan=self._fingerprint)
        for part in dict.fromkeys(self._parts.values()):
            yield from part.entries()
        for process, steps in self._unheard.items():
            for ranges in steps:
                entry = OwnEntry()
                write_process(entry.unheard.process, process)
                entry.unheard.consumed.ranges.extend(chain.from_iterable(ranges))
                yield entry

    def _write(self, entry: OwnEntry) -> None:
        self._follow(entry)
        self._written(lambda: self._log.append(entry))
        if self._log.is_open and self._log.is_long:
            self._log.keep_tail()
            known = list(self._entries())
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

    def _follow(self, entry: OwnEntry) -> None:
        """See [Note: between a record and its samples]."""
        kind = entry.WhichOneof("what")
        if kind == "record" and entry.record.record.WhichOneof("what") == "decided":
            what = read_record(entry.record.record).what
            assert isinstance(what, Decided), "it is one"
            for step, ranges in zip(what.steps, what.consumed, strict=False):
                if ranges:
                    self._hear(step.process, ranges)
        elif kind == "lease" and entry.lease.change == "decided":
            process = self._leases.decided_by(entry.lease)
            self._unheard[process].popleft()
            if not self._unheard[process]:
                del self._unheard[process]

    def _hear(self, process: Process, ranges: Consumed) -> None:
        self._unheard[process].append(ranges)
