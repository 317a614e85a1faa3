"""The undoing of a beginning that fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def or_undone(undo: Callable[[], None]) -> Iterator[None]:
    """Undoes what the block has begun, if any exception ends it.

    So a refusal, or a failure of ours, leaves nothing half done for which others would wait.

    Args:
        undo: takes it back; called before the exception is raised further.

    Example::

        self.paused = True
        with or_undone(self.resume):
            self.wait_for_steps()
    """
    try:
        yield
    except BaseException:
        undo()
        raise
