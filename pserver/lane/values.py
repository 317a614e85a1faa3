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
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, ExitStack
from threading import Lock

import torch

from pserver.dense.update import SliceUpdate, update_all
from pserver.lane.step import Step

# ---- snapshot ----
#
# A slice as it is between two updates, for threads that read it during an update.


class Snapshot:
    """A readable copy of one slice.  Any thread may read; one thread at a time updates.

    A context manager: while its block runs the caller, and no other thread, updates the slice.

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
        self._readable = False  # during the update that runs

    def read(self) -> torch.Tensor:
        """The slice after the last update that has ended.  The tensor is shared: do not write to
        it.
        """
        with self._lock:
            if self._copy is None:
                self._copy = self._value.clone()
            return self._copy

    def __enter__(self) -> None:
        self._lock.acquire()
        self._readable = self._copy is not None
        if self._readable:
            self._lock.release()

    def __exit__(self, *_: object) -> None:
        if self._readable:
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

    def update(self, names: Collection[str], step: Step) -> None:
        """Assigns what a trainer has written into slices, then applies their gradients, if any:
        those of small slices of one rule in one call.
        """
        changed = step.assignments.keys() | (() if step.skipped else step.gradients.keys())
        updated = [name for name in names if name in changed and name in self._updates]
        for name in names:
            if name in self._updates or name not in step.assignments:
                continue
            with self._locks[name], self._writing((name,)):
                step.assignments[name].write(self._variables[name])
        match updated:
            case []:
                return
            case [name]:
                with self._locks[name], self._snapshots[name], self._writing(updated):
                    self._update(updated, step)
            case _:
                with ExitStack() as stack:
                    for name in updated:
                        stack.enter_context(self._locks[name])
                        stack.enter_context(self._snapshots[name])
                    stack.enter_context(self._writing(updated))
                    self._update(updated, step)

    def _update(self, names: Collection[str], step: Step) -> None:
        gradients, before = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        for name in names:
            gradient, read = step.gradients.pop(name, None), step.before.get(name)
            if (assignment := step.assignments.get(name)) is not None:
                assignment.write(self._updates[name].value)
                # the gradient was computed at what the trainer wrote
                read = None if read is None else assignment.applied_to(read)
            if gradient is not None and not step.skipped:
                gradients[name] = gradient
            if read is not None:
                before[name] = read
        update_all(self._updates, gradients, step.hparams, before=before)

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
