"""A slice as it is between two updates, for threads that read it during an update.

[Note: reading beside an update]  torch's optimizers update a slice in its own memory.  So readers
get a copy.  Between two updates one copy is made, by the thread that needs it first, and all
readers share it.  While the next update runs they get that copy: where slices are read after every
update, nobody waits for one.  Where nobody has read since the last update, nothing is copied before
the next, and a reader that comes meanwhile waits for that one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch


class Snapshot:
    """A readable copy of one slice.  Any thread may read; one thread at a time updates.

    Args:
        value: the slice's memory.
    """

    def __init__(self, value: torch.Tensor) -> None:
        self._value = value
        # guards the next; held while the copy is made, so that no update begins meanwhile, and
        # during an update where there is no copy to be read
        self._lock = Lock()
        # the slice as it is, or as it was before the update that runs
        self._copy: torch.Tensor | None = None

    def read(self) -> torch.Tensor:
        """The slice after the last update that has ended.  The tensor is shared: do not write to
        it.
        """
        with self._lock:
            if self._copy is None:
                self._copy = self._value.clone()
            return self._copy

    @contextmanager
    def updating(self) -> Iterator[None]:
        """While it lasts the caller, and no other thread, updates the slice."""
        self._lock.acquire()
        readable = self._copy is not None
        if readable:
            self._lock.release()
        try:
            yield
        finally:
            if readable:
                self._lock.acquire()
            self._copy = None
            self._lock.release()

    def discard(self) -> None:
        """Drops the copy, because the slice has another value."""
        with self._lock:
            self._copy = None
