"""The values of slices while steps update them: snapshots, and slices whose updates come one by
one.

[Note: reading beside an update]  torch's optimizers update a slice in its own memory.  So readers
get a copy.  Between two updates one copy is made, by the thread that needs it first, and all
readers share it.  While the next update runs they get that copy: where slices are read after every
update, no reader waits for one.  Where none has read since the last update, nothing is copied
before the next, and a reader that arrives meanwhile waits for that one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from threading import Lock

import torch

from pserver.dense.update import SliceUpdate
from pserver.lane.step import Step

# ---- snapshot ----
#
# A slice as it is between two updates, for threads that read it during an update.


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
        """Marks, while the block runs, that the caller, and no other thread, updates the slice."""
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


# ---- async slices ----
#
# The slices of a lane whose updates come one by one, each by itself: trainers read a slice while
# another trainer's step updates it.


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
        """Slices as a trainer has read them last, where delays are compensated."""
        if not self.compensates:
            return {}
        found = {name: self._last_read.get((trainer, name)) for name in names}
        return {name: value for name, value in found.items() if value is not None}

    def update(self, name: str, step: Step) -> None:
        """Assigns what a trainer has written into a slice, then applies its gradient, if any."""
        gradient = step.gradients.pop(name, None)
        assignment = step.assignments.get(name)
        if name not in self._updates:
            assert assignment is not None, "a slice without an update is only assigned"
            with self._locks[name], self._writing((name,)):
                assignment.write(self._variables[name])
            return
        if step.skipped:
            gradient = None
        if assignment is None and gradient is None:
            return
        slice_, before = self._updates[name], step.before.get(name)
        with self._locks[name], self._snapshots[name].updating(), self._writing((name,)):
            if assignment is not None:
                assignment.write(slice_.value)
                # the gradient was computed at what the trainer wrote
                before = None if before is None else assignment.applied_to(before)
            if gradient is not None:
                slice_.update(gradient, step.hparams[slice_.group], before=before)

    def read(self, trainer: int, name: str, in_place: bool = False) -> torch.Tensor:
        """A copy of a slice between two updates, shared with other readers; the memory itself where
        the reader notices that it changes, and reads need not be remembered.
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
