"""Copies of all slices and optimizer states of a server, as of one moment."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from pserver.dense.slice_store import SliceStore

PARTS = 8  # copies are read in about so many parts
LEAST_BYTES = 2**26  # of a part


class SliceCopies:
    """Memory for copies of all that a store holds, which :meth:`take` fills.

    [Note: memory that is there before]  A copy into memory that no process has touched takes two to
    three times as long, as the system finds each page when it is first written to.  So the memory
    is touched when this is made, while steps go on, and the copies are made while they wait.

    One caller at a time.

    Args:
        store: may be updated while this is made.  A state that comes into being meanwhile is copied
            into memory of its own.
    """

    def __init__(self, store: SliceStore) -> None:
        self._store = store
        self._room = {
            name: torch.zeros(shape, dtype=dtype).fill_(0) for name, shape, dtype in store.shapes()
        }
        self._taken: dict[str, torch.Tensor] = {}

    def take(self) -> None:
        """Copies every slice, and every state that exists, as it is now; nothing is updated
        meanwhile.
        """
        for name, _, _ in self._store.shapes():
            self._taken[name] = self._store.copy(name, self._room.pop(name, None))
        self._room.clear()

    @property
    def bytes_held(self) -> int:
        """Memory of the copies that were not read yet, in bytes."""
        return sum(copied.nbytes for copied in self._taken.values())

    def parts(self) -> Iterator[dict[str, torch.Tensor]]:
        """All copies by name, some at a time; each part is forgotten before the next is read."""
        most = max(LEAST_BYTES, math.ceil(self.bytes_held / PARTS))
        while self._taken:
            part: dict[str, torch.Tensor] = {}
            size = 0
            for name in list(self._taken):
                size += self._taken[name].nbytes
                if part and size > most:
                    break
                part[name] = self._taken.pop(name)
            yield part
            part.clear()
