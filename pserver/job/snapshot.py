"""A slice as it is between two updates, for threads that read it during an update.

[Note: reading beside an update]  torch's optimizers update a slice in its own memory.  So before an
update begins, a copy of the slice is made, and readers get that copy until the update has ended: a
reader waits for a copy at most, never for an update.  Between two updates one copy is made, by the
thread that needs it first, and all readers share it.
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
        # guards the next; held while the copy is made, so that no update begins meanwhile
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
        self.read()
        try:
            yield
        finally:
            self.discard()

    def discard(self) -> None:
        """Drops the copy, because the slice has another value."""
        with self._lock:
            self._copy = None
