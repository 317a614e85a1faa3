"""Saves that are written while the job goes on: one at a time, each by a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from pserver.errors import Busy, PServerError, Refused
from pserver.job.job_files import Saving
from pserver.membership.lifecycle import EventLog
from pserver.membership.waits import patience
from pserver.telemetry.memory import trim_memory
from pserver.undone import or_undone
from transpiler.files.files import shown

BEGIN_SECONDS = 20.0  # that a save waits for one that has not begun everywhere


@dataclass(slots=True)
class SaveProgress:
    """The progress of a save.  The job's lock guards it.

    Attributes:
        number: of the call that began it, in its session.
        path: where it is written.
        bytes: that are written.
        pause_seconds: for how long steps waited.
        seconds: since it began; once it is done, how long it took.
        done: it is whole, and may be read, or has failed.
        failure: why it has failed; "": it has not.
        identity: of what is whole; "": it is not.
    """

    number: int
    path: str
    bytes: int = 0
    pause_seconds: float = 0.0
    seconds: float = 0.0
    done: bool = False
    failure: str = ""
    identity: str = ""


class BackgroundSaves:
    """The saves of one server.

    Any thread may call it.

    Args:
        condition: the job's lock; notified when a save is done.
        log: is notified of saves.
        clock: seconds that never go back.

    Attributes:
        last: the save that was begun last, which may still run; None before the first.
        bytes_written: of all saves, failed ones too.
        failed: how many have failed.
    """

    def __init__(
        self,
        condition: threading.Condition,
        log: EventLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._condition, self._log, self._clock = condition, log, clock
        self.last: SaveProgress | None = None
        self.bytes_written = self.failed = 0
        self._session = ""
        self._beginning = threading.Lock()  # held while a save's moment is fixed
        self._began = 0.0

    def begin(
        self,
        session: str,
        number: int,
        path: str,
        begin: Callable[[], Saving],
        took: Callable[[float], None],
    ) -> SaveProgress:
        """Begins a save, or reports the progress of the one of this number.

        Args:
            session: of the caller.
            number: of the caller's saves, from 1; each has a higher one.
            path: where it is written.
            begin: fixes the save's moment.
            took: called with the seconds that it took, where it has not failed.

        Raises:
            Busy: another save is being written, or waits for the other servers.
            Refused: the number is not above that of the last save; and what ``begin`` raises.
        """
        # a call that came twice finds the save that the first began
        if not self._beginning.acquire(timeout=BEGIN_SECONDS):
            raise Busy("a save waits for the other servers here: ask again when they are ready")
        try:
            with self._condition:
                last = self.last
                again = last is not None and session == self._session
                if last is not None and again and number == last.number:
                    return self._told(last)
                if number < 1 or (last is not None and again and number < last.number):
                    raise Refused(
                        f"expected the number of a new save or of the last one, got {number}"
                    )
            began = self._clock()
            saving = begin()
            progress = SaveProgress(number, path, pause_seconds=saving.pause_seconds)
            thread = threading.Thread(
                target=self._write, args=(saving, progress, took), name="save", daemon=True
            )
            with or_undone(saving.close), self._condition:
                thread.start()  # which may fail: the host has no more threads
                self.last, self._session, self._began = progress, session, began
            return self.present or progress
        finally:
            self._beginning.release()

    @property
    def present(self) -> SaveProgress | None:
        """A copy of ``last``, as of now."""
        with self._condition:
            return None if self.last is None else self._told(self.last)

    def _told(self, progress: SaveProgress) -> SaveProgress:
        seconds = progress.seconds if progress.done else self._clock() - self._began
        return replace(progress, seconds=seconds)

    def _write(self, saving: Saving, progress: SaveProgress, took: Callable[[float], None]) -> None:
        def wrote(size: int) -> None:
            with self._condition:
                self.bytes_written += size - progress.bytes
                progress.bytes = size

        failure = "it has ended before it was complete"  # until it is known
        try:
            failure = self._failure_of(lambda: wrote(saving.write(wrote)))
            with self._condition:
                progress.seconds = self._clock() - self._began
            trim_memory()  # what was copied is free again
            if failure:
                self._log.log("unsaved", f"a save has failed: {failure}", logging.ERROR)
            else:
                took(progress.seconds)
                self._log.log("saved", f"saved to {shown(progress.path)}", logging.INFO)
        finally:  # in any case: notifies the threads that wait for it
            with self._condition:
                progress.failure, progress.done = failure, True
                progress.identity = "" if failure else saving.identity
                self.failed += bool(failure)
                self._condition.notify_all()

    def _failure_of(self, write: Callable[[], None]) -> str:
        """The reason why a save could not be written; "": it is written."""
        try:
            write()
        except PServerError as error:
            return str(error)
        except Exception as error:  # of any kind: the job continues, and callers learn of it
            return f"{type(error).__name__}: {error}"
        return ""

    @property
    def under_way(self) -> bool:
        """Whether a save is being written."""
        with self._condition:
            return self.last is not None and not self.last.done

    def wait(self, seconds: float) -> bool:
        """Waits for the save that is being written.

        Returns:
            Whether none is any more.
        """
        end = time.monotonic() + seconds
        with self._condition:
            while self.under_way and time.monotonic() < end:
                self._condition.wait(patience(end))
            return not self.under_way
