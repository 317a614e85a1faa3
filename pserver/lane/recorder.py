"""Writes a recorded log, in a thread of its own.

[Note: what a recording may cost]  A step's arrays are copied, and a thread writes them while the
job runs.  Copies that are not written take up to ``MOST_BYTES``; then steps wait until there is
room.  Where a file cannot be written any more, as on a full disk, nothing more is recorded: an
error is logged, the file ends with the last whole entry, and the job continues.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pserver.job_log.files import MAGIC, head_of
from pserver.job_log_pb2 import Closing, Entry
from pserver.membership.lifecycle import EventLog
from pserver.membership.waits import patience
from pserver.storage import plain_file

MOST_BYTES = 2**28  # of copies that are not written


@dataclass(slots=True)
class PendingEntry:
    """An entry that is to be written: it does not change any more.

    Attributes:
        entry: its message.
        message: the part of the message that is serialized already.
        payload: the bytes of its arrays.
        size: the bytes by which it counts while it waits.
    """

    entry: Entry
    message: bytes
    payload: Sequence[memoryview]
    size: int


class Recorder:
    """Writes one file.  Any thread may call it, also while it holds the job's lock, but for
    :meth:`make_room` and :meth:`wait`.

    Args:
        folder: where the file is; it is made.
        server: this one's place in the plan.
        log: notified when nothing more can be recorded.
        most_bytes: see [Note: what a recording may cost].

    Attributes:
        recording: its name, which is a part of the file's.
        path: of the file.
        entries: how many have been appended.
        failure: why nothing more is recorded; "": it is.
    """

    def __init__(
        self, folder: str, server: int, log: EventLog, most_bytes: int = MOST_BYTES
    ) -> None:
        self.recording = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
        self.path = Path(folder) / f"server-{server}-{self.recording}.log"
        self.entries, self.failure = 0, ""
        self._log, self._most = log, most_bytes
        self._condition = threading.Condition()  # guards all here; never taken before the job's
        self._queue: deque[tuple[int, PendingEntry]] = deque()
        self._waiting = 0  # bytes in the queue
        self._end = self._written = 0  # of whole entries in the file: bytes, and how many
        self._closed = False
        self._thread = threading.Thread(target=self._write_all, name="record log", daemon=True)
        self._thread.start()

    # ---- pending entries ----

    def make_room(self) -> bool:
        """Waits until copies may be made.

        Returns:
            Whether they will be written.
        """
        with self._condition:
            while self._waiting > self._most and not self.failure:
                self._condition.wait(patience())
            return not self.failure and not self._closed

    def append(self, kept: PendingEntry) -> None:
        """Adds the next entry.  Returns at once."""
        with self._condition:
            if self.failure or self._closed:
                return
            self.entries += 1
            self._queue.append((self.entries, kept))
            self._waiting += kept.size
            self._condition.notify_all()

    def close(self) -> None:
        """Ends the recording.  Returns at once; :meth:`wait` waits for unwritten entries."""
        self.append(pending_entry(Entry(closing=Closing())))
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def wait(self, seconds: float) -> bool:
        """Waits, after :meth:`close`, until all is written.

        Returns:
            Whether it is.
        """
        self._thread.join(seconds)
        return not self._thread.is_alive()

    # ---- the thread ----

    def _write_all(self) -> None:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            descriptor = plain_file.descriptor(self.path, flags, 0o600)
        except OSError as error:
            self._fail(error)
            return
        try:
            self._end = _write(descriptor, [memoryview(MAGIC)])
            while (next_one := self._next()) is not None:
                number, kept = next_one
                message = kept.message + kept.entry.SerializeToString()
                head = head_of(number, message, kept.payload)
                self._end += _write(descriptor, [memoryview(head + message), *kept.payload])
                self._written = number
                with self._condition:
                    self._waiting -= kept.size
                    self._condition.notify_all()
            os.fsync(descriptor)
        except OSError as error:
            self._fail(error)
            self._cut(descriptor)
        finally:
            os.close(descriptor)

    def _next(self) -> tuple[int, PendingEntry] | None:
        with self._condition:
            while not self._queue and not self._closed:
                self._condition.wait(patience())
            return self._queue.popleft() if self._queue else None

    def _fail(self, error: OSError) -> None:
        with self._condition:
            self.failure = f"{self.path}: {error.strerror or error}"
            self._queue.clear()
            self._waiting = 0
            self._condition.notify_all()
        self._log.log(
            "unrecorded",
            f"the job goes on, and its log is not recorded any more: {self.failure}",
            logging.ERROR,
        )

    def _cut(self, descriptor: int) -> None:
        """Cuts the file to whole entries, and appends one with the reason why there are no more."""
        message = Entry(closing=Closing(failure=self.failure)).SerializeToString()
        begin = b"" if self._end else MAGIC
        closing = [memoryview(begin + head_of(self._written + 1, message, ()) + message)]
        with suppress(OSError):  # the end is torn then, which a reader bears
            os.ftruncate(descriptor, self._end)
            os.lseek(descriptor, self._end, os.SEEK_SET)
            _write(descriptor, closing)


def pending_entry(entry: Entry) -> PendingEntry:
    """An entry without arrays."""
    return PendingEntry(entry, b"", (), entry.ByteSize())


def _write(descriptor: int, pieces: Sequence[memoryview]) -> int:
    """Writes pieces, one behind the other; returns how many bytes they have."""
    left = [piece.cast("B") for piece in pieces if piece.nbytes]
    total = sum(piece.nbytes for piece in left)
    while left:
        written = os.writev(descriptor, left[:512])
        while left and written >= left[0].nbytes:
            written -= left.pop(0).nbytes
        if written:
            left[0] = left[0][written:]
    return total
