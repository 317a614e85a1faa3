"""A committed step's update, as batches that any worker thread can claim, with its progress."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

from pserver.job.blocking_waits import WAKE_SECONDS

Batch = tuple[str, ...]  # names of slices and tables that one call updates
ALL = 2**31  # threads: those that wait


class UpdateTask:
    """The update of one committed step: the batches that are left, and what is done.

    Any thread may call :meth:`advance`.  Without arguments it is the task of a step that was
    applied before: finished, with nothing to do.

    Args:
        condition: the job's; guards everything here, and is notified after every batch.
        batches: what is to be updated.
        work: updates one batch; called without the lock.
        on_end: called under the lock, once: when every batch is updated (with None), or when one
            has failed and none runs any more (with what it raised).
        after: the update before; no batch begins before that one is finished.  See [Note: turns]
            in staged_steps.py.

    Attributes:
        updated: names of the slices and tables that have their new values.
        finished: every batch is updated, and ``on_end`` has returned.
        failure: what the first batch that failed raised.
        in_workers: threads of their own update it; otherwise those do that wait for it.
    """

    def __init__(
        self,
        condition: threading.Condition | None = None,
        batches: Iterable[Batch] = (),
        work: Callable[[Batch], None] = lambda batch: None,
        on_end: Callable[[BaseException | None], None] = lambda failure: None,
        after: UpdateTask | None = None,
    ) -> None:
        self.updated: set[str] = set()
        self.finished = condition is None
        self.failure: BaseException | None = None
        self.in_workers = False
        self._condition = condition or threading.Condition()
        self._left = deque(batches)
        self._running = 0
        self._work, self._on_end = work, on_end
        self._after = after

    def advance(self, limit: int) -> bool:
        """Updates the next batch in this thread.

        Args:
            limit: the number of batches that may run at once.

        Returns:
            False if no batch is left, or ``limit`` of them run already.

        Raises:
            Exception: what the update raised.
        """
        if (before := self._after) is not None:
            before.wait_for(helpers=ALL)
            self._after = None
        with self._condition:
            if not self._left or self._running >= limit:
                return False
            batch = self._left.popleft()
            self._running += 1
        failure: BaseException | None = None
        try:
            self._work(batch)
        except BaseException as error:
            failure = error
            raise
        finally:
            self._batch_ended(batch, failure)
        return True

    def advance_all(self, limit: int) -> None:
        """Updates batches in this thread until none is left, or ``limit`` of them run already."""
        while self.advance(limit):
            pass

    def finish(self) -> None:
        """Updates what is left, where no worker does; what another thread updates is left to it.

        Raises:
            Exception: what the update raised.
        """
        while not self.in_workers and self.advance(1):
            pass

    def wait_for(self, name: str = "", helpers: int = 1) -> None:
        """Updates, or waits for, a slice or table; without a name all of them, and ``on_end``.

        See [Note: answers begin early] in lane_executor.py.

        Args:
            helpers: threads that may update at once, this one included.

        Raises:
            Exception: what the update raised.
        """
        others = False  # have the rest
        while True:
            with self._condition:
                if name in self.updated or self.finished:
                    return
                if self.failure is not None:
                    raise self.failure
                if others:
                    self._condition.wait(WAKE_SECONDS)
            others = self.in_workers or not self.advance(helpers)

    def _batch_ended(self, batch: Batch, failure: BaseException | None) -> None:
        with self._condition:
            self._running -= 1
            self.failure = self.failure or failure
            if self.failure is not None:
                self._left.clear()
            else:
                self.updated.update(batch)
            if not self._left and not self._running:
                self._end()
            self._condition.notify_all()

    def _end(self) -> None:
        try:
            self._on_end(self.failure)
        except BaseException as error:  # who waits for the step is told
            self.failure = self.failure or error
        self.finished = self.failure is None
