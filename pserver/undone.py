"""Undoing whatever has begun and does not end well."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def or_undone(undo: Callable[[], None]) -> Iterator[None]:
    """While it lasts something begins; where an exception ends it, of whatever kind, it is undone.

    So a refusal, or a failure of ours, leaves nothing half done for which others would wait.

    Args:
        undo: takes it back; called before the exception goes on.

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
