"""A committed step's update, as batches that any worker thread can claim, with its progress."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

Batch = tuple[str, ...]  # names of slices and tables that one call updates


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

    Attributes:
        updated: names of the slices and tables that have their new values.
        finished: every batch is updated, and ``on_end`` has returned.
        failure: what the first batch that failed raised.
    """

    def __init__(
        self,
        condition: threading.Condition | None = None,
        batches: Iterable[Batch] = (),
        work: Callable[[Batch], None] = lambda batch: None,
        on_end: Callable[[BaseException | None], None] = lambda failure: None,
    ) -> None:
        self.updated: set[str] = set()
        self.finished = condition is None
        self.failure: BaseException | None = None
        self._condition = condition or threading.Condition()
        self._left = deque(batches)
        self._running = 0
        self._work, self._on_end = work, on_end

    def advance(self, limit: int) -> bool:
        """Updates the next batch in this thread.

        Args:
            limit: the number of batches that may run at once.

        Returns:
            False if no batch is left, or ``limit`` of them run already.

        Raises:
            Exception: what the update raised.
        """
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

    def _batch_ended(self, batch: Batch, failure: BaseException | None) -> None:
        with self._condition:
            self._running -= 1
            self.failure = self.failure or failure
            if self.failure is not None:
                self._left.clear()
            else:
                self.updated.update(batch)
            if not self._left and not self._running:
                self._on_end(self.failure)
                self.finished = self.failure is None
            self._condition.notify_all()
