"""Copies of all slices and optimizer states of a server, as of one moment."""

from __future__ import annotations

import torch

from pserver.dense.slice_store import SliceStore


class SliceCopies:
    """Memory for copies of all that a store holds, which :meth:`take` fills.

    [Note: memory that is there before]  A copy into memory that no process has touched takes two to
    three times as long, as the system finds each page when it is first written to.  So the memory
    is touched when this is made, while steps go on, and the copies are made while they wait.

    One caller at a time.

    Args:
        store: may be updated while this is made.  A state that comes into being meanwhile is copied
            into memory of its own.

    Attributes:
        taken: the copies by name; who writes them takes them out one by one, so that their memory
            is free again.
    """

    def __init__(self, store: SliceStore) -> None:
        self._store = store
        self._room = {
            name: torch.zeros(shape, dtype=dtype).fill_(0) for name, shape, dtype in store.shapes()
        }
        self.taken: dict[str, torch.Tensor] = {}

    def take(self) -> None:
        """Copies every slice, and every state that exists, as it is now; nothing is updated
        meanwhile.
        """
        for name, _, _ in self._store.shapes():
            self.taken[name] = self._store.copy(name, self._room.pop(name, None))
        self._room.clear()
