"""A slice as it is between two updates, for those who read it while it is updated.

[Note: reading beside an update]  An update works in the slice's own memory, because torch's
optimizers do.  So whoever begins one sees to it that a copy stands beside it, which readers get
until it has ended: they wait for a copy at most, never for an update. A copy is made once between
two updates, by whoever needs it first, and all readers share it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch


class Snapshot:
    """See the module's docstring.

    Args:
        value: the slice's memory.
    """

    def __init__(self, value: torch.Tensor) -> None:
        self._value = value
        # guards the next; held while the copy is made, so that no update begins meanwhile
        self._lock = Lock()
        # the slice as it is, or as it was before the update that is under way
        self._copy: torch.Tensor | None = None

    def read(self) -> torch.Tensor:
        """The slice after the last update that has ended; nobody writes to it."""
        with self._lock:
            if self._copy is None:
                self._copy = self._value.clone()
            return self._copy

    @contextmanager
    def updating(self) -> Iterator[None]:
        """While it lasts the slice is updated, by one at a time."""
        self.read()
        try:
            yield
        finally:
            self.forget()

    def forget(self) -> None:
        """The slice has another value."""
        with self._lock:
            self._copy = None
