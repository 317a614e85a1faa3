"""The slices of a lane whose updates come one by one, each by itself: trainers read a slice while
another trainer's step updates it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager

import torch

from pserver.dense.slice_update import SliceUpdate
from pserver.job.snapshot import Snapshot
from pserver.job.sync_round import Contribution

# ``with writing(names)``: these slices change
Writing = Callable[[Collection[str]], AbstractContextManager[None]]


class AsyncSlices:
    """Updates and reads slices side by side.  Any thread may call it.

    Args:
        updates: how the slices are updated, by slice name.
        variables: the memory of these slices, and of those that are held and never updated.
        locks: one for each of them.
        writing: marks slices whose values change while it lasts.
        compensates: delays are compensated: what each trainer has read is kept.  (An attribute,
            too.)
    """

    def __init__(
        self,
        updates: Mapping[str, SliceUpdate],
        variables: Mapping[str, torch.Tensor],
        locks: Mapping[str, threading.Lock],
        writing: Writing,
        compensates: bool,
    ) -> None:
        self._updates = updates
        self._variables = variables
        self._locks = locks
        self._writing = writing
        self.compensates = compensates
        self._snapshots = {name: Snapshot(update.value) for name, update in updates.items()}
        # (trainer, slice) -> the value that the trainer read last; for delay compensation
        self._last_read: dict[tuple[int, str], torch.Tensor] = {}

    def last_read(self, trainer: int, names: Collection[str]) -> dict[str, torch.Tensor]:
        """These slices as a trainer has read them last, where delays are compensated."""
        if not self.compensates:
            return {}
        found = {name: self._last_read.get((trainer, name)) for name in names}
        return {name: value for name, value in found.items() if value is not None}

    def update(self, name: str, contribution: Contribution) -> None:
        """Assigns what a trainer has written into a slice, then applies its gradient, if any."""
        gradient = contribution.gradients.pop(name, None)
        assignment = contribution.assignments.get(name)
        if name not in self._updates:
            assert assignment is not None, "a slice without an update is only assigned"
            with self._locks[name], self._writing((name,)):
                assignment.write(self._variables[name])
            return
        if contribution.skipped:
            gradient = None
        if assignment is None and gradient is None:
            return
        slice_, before = self._updates[name], contribution.before.get(name)
        with self._locks[name], self._snapshots[name].updating(), self._writing((name,)):
            if assignment is not None:
                assignment.write(slice_.value)
                # the gradient was computed at what the trainer wrote
                before = None if before is None else assignment.written(before)
            if gradient is not None:
                slice_.update(gradient, contribution.hparams[slice_.group], before=before)

    def read(self, trainer: int, name: str, in_place: bool = False) -> torch.Tensor:
        """A copy of a slice between two updates, shared with other readers; the memory itself where
        the reader notices that it changes, and nobody need know what was read.
        """
        if in_place and not self.compensates:
            return self._updates[name].value
        copy = self._snapshots[name].read()
        if self.compensates:
            self._last_read[trainer, name] = copy
        return copy

    def discard_snapshots(self) -> None:
        """Drops all copies, because slices have been loaded."""
        for snapshot in self._snapshots.values():
            snapshot.discard()
