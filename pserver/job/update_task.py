"""The update of a committed step, batch by batch, by whoever has time for it; and how far it has
come.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

Batch = tuple[str, ...]  # slices that are updated in one go


class UpdateTask:
    """See the module's docstring.  Without arguments: of a step that has been applied before.

    Args:
        changed: the job's lock, which guards everything here; told of every batch.
        batches: what is to be updated.
        work: updates one; called without the lock.
        end: called under the lock, once: when every batch is updated (with None), or one has failed
            (with what it raised).

    Attributes:
        updated: slices that have their new values.
        over: all of them, and the step's marks too.
        failure: what ended it before that.
    """

    def __init__(
        self,
        changed: threading.Condition | None = None,
        batches: Iterable[Batch] = (),
        work: Callable[[Batch], None] = lambda batch: None,
        end: Callable[[BaseException | None], None] = lambda failure: None,
    ) -> None:
        self.updated: set[str] = set()
        self.over = changed is None
        self.failure: BaseException | None = None
        self._changed = changed or threading.Condition()
        self._left = deque(batches)
        self._running = 0
        self._work, self._end = work, end

    def advance(self, most: int) -> bool:
        """Updates the next batch, if one is left and fewer than ``most`` are being updated.

        Raises:
            Exception: what the update raised.
        """
        with self._changed:
            if not self._left or self._running >= most:
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
            self._ended(batch, failure)
        return True

    def _ended(self, batch: Batch, failure: BaseException | None) -> None:
        with self._changed:
            self._running -= 1
            self.failure = self.failure or failure
            if self.failure is not None:
                self._left.clear()
            else:
                self.updated.update(batch)
            if not self._left and not self._running:
                self._end(self.failure)
                self.over = self.failure is None
            self._changed.notify_all()
