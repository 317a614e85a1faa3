"""Steps change the table one at a time per slice; whoever wants it between two steps, with its
marks, closes the gate.

A step passes the gate from the first change of a tensor to the change of its mark.  A save or a
load closes it: it waits until nobody passes, and until it is open again no step begins to change
anything.  Marks and values are then of one moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pserver.job.blocking_waits import Standing

WAKE_SECONDS = 0.2  # between two looks whether the job still stands


class Quiesce:
    """See the module's docstring."""

    def __init__(self, job: Standing) -> None:
        self._job = job
        self._passing = 0  # guarded, with the next, by the job's lock
        self._closed = 0

    @contextmanager
    def passing(self) -> Iterator[None]:
        """While it lasts a step changes tensors, and then its mark.

        Raises:
            PServerError: the job ended while the gate was closed.
        """
        with self._job.changed:
            while self._closed:
                self._job.check_standing()
                self._job.changed.wait(WAKE_SECONDS)
            self._passing += 1
        try:
            yield
        finally:
            with self._job.changed:
                self._passing -= 1
                self._job.changed.notify_all()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """While it lasts no step changes anything."""
        with self._job.changed:
            self._closed += 1
            while self._passing:
                self._job.changed.wait(WAKE_SECONDS)
        try:
            yield
        finally:
            with self._job.changed:
                self._closed -= 1
                self._job.changed.notify_all()
