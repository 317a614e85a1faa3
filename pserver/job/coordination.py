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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from pserver.job.program import InstalledProgram
from pserver.job_log.files import WriteAheadLog, read
from pserver.job_log.records import Consumed, Process

log = logging.getLogger(__name__)


class StatePart(Protocol):
    """A part of the state that server 0 alone has.

    Attributes:
        write: called with each change.
    """

    write: Callable[..., None] | None

    def entries(self) -> list[list[Any]]:
        """All entries, for a replacement of the process."""


class Coordination:
    """Writes the changes of server 0's parts of a job to a file.  Its parts call it under the job's
    lock.

    Args:
        path: of the file.
        installed: what the job has installed on server 0.
    """

    def __init__(self, path: str, installed: InstalledProgram) -> None:
        coordinator, meetings = installed.decisions.coordinator, installed.meetings
        assert coordinator is not None, "server 0 has it"
        self._fingerprint = installed.plan.fingerprint()
        self._path, self._log = path, WriteAheadLog(path)
        self._leases = installed.leases
        self._parts: list[StatePart] = [coordinator, self._leases, meetings]
        self._takes: Mapping[str, Callable[..., None]] = {
            **dict.fromkeys(("log", "record", "left"), coordinator.restore_entry),
            **dict.fromkeys(("leases", "lease"), self._leases.restore_entry),
            **dict.fromkeys(("barrier", "put off", "round", "text"), meetings.restore_entry),
        }
        # by process: what its decided steps consume, and the lease table has not heard of
        self._unheard: dict[Process, deque[Consumed]] = defaultdict(deque)

    def restore(self) -> None:
        """Restores the entries of the process before this one.

        Raises:
            OSError, ValueError, KeyError, TypeError: it cannot be read, or is of another job.
        """
        entries = read(self._path)
        first = next(entries, None)
        if first != ["plan", self._fingerprint]:
            raise ValueError(f"{self._path}: expected the log of this job, got {first}")
        for entry in entries:
            if entry[0] == "unheard":
                _, trainer, incarnation, ranges = entry
                self._unheard[Process(trainer, incarnation)].append(_consumed(ranges))
                continue
            self._takes[entry[0]](*entry)
            self._follow(entry)
        for process, steps in self._unheard.items():
            for ranges in steps:
                self._leases.decided(process.trainer, process.incarnation, ranges)
        self._unheard.clear()

    def begin(self) -> None:
        """Begins the file: every change is written from now on, while the file can be written."""
        self._written(lambda: self._log.begin(self._entries()))
        for part in self._parts if self._log.is_open else ():
            part.write = self._write

    def close(self) -> None:
        """Closes the file: the job is over."""
        for part in self._parts:
            part.write = None
        self._log.close()

    def _entries(self) -> Iterable[list[Any]]:
        yield ["plan", self._fingerprint]
        for part in self._parts:
            yield from part.entries()
        for process, steps in self._unheard.items():
            for ranges in steps:
                yield ["unheard", process.trainer, process.incarnation, ranges]

    def _write(self, *entry: Any) -> None:
        self._follow(entry)
        self._written(lambda: self._log.append(list(entry)))
        if self._log.is_open and self._log.is_long:
            self._written(lambda: self._log.begin(self._entries()))

    def _written(self, write: Callable[[], None]) -> None:
        """Calls ``write``; where that fails the job continues, and this process cannot be
        replaced.
        """
        try:
            write()
        except OSError as error:
            self.close()
            self._log.remove()
            text = "cannot write the log %s, so server 0 cannot come back by itself: %s"
            log.warning(text, self._path, error)

    def _follow(self, entry: Sequence[Any]) -> None:
        """See [Note: between a record and its samples]."""
        if entry[0] == "record":
            for trainer, incarnation, ranges in entry[3]:
                self._unheard[Process(trainer, incarnation)].append(_consumed(ranges))
        elif entry[0] == "lease" and entry[1] == "decided":
            process = Process(entry[2], entry[3])
            self._unheard[process].popleft()
            if not self._unheard[process]:
                del self._unheard[process]


def _consumed(ranges: Iterable[Sequence[int]]) -> Consumed:
    return tuple((epoch, start, stop) for epoch, start, stop in ranges)
