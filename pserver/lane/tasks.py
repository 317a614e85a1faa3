"""A committed step's update, as batches that any worker thread can claim, with its progress.

[Note: going on]  Where updates come one by one, each waits for the one before.  If each ran in the
thread of its own trainer, every one would begin by waking a thread, which first has to find a free
processor: with many trainers that takes longer than a small update.  So a thread that has ended an
update continues with those behind it, for an instant, and notifies their threads in the end: a
thread that wakes wants a processor.  It does so before it answers its own trainer, which is why it
takes ``GO_ON_SECONDS`` at most: none that is as large as that.

[Note: torch's threads]  Torch can divide one operation among threads, which synchronize after each
operation.  Slices that are updated side by side need no synchronization, so each worker sets
torch's own number of threads to 1.  Where one slice is most of the work, torch divides its
operations as usual.  Never more threads compute than torch was told to use.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import torch

from pserver.dense.update import SliceUpdate, batches
from pserver.membership.waits import ALL, WaitEvent, Waits

# ---- update task ----


Batch = tuple[str, ...]  # names of slices and tables that one call updates
GO_ON_SECONDS = 0.002  # see [Note: going on]


class UpdateTask:
    """The update of one committed step: the batches that are left, and what is done.

    Any thread may call :meth:`advance`.  Without arguments it is the task of a step that was
    applied before: finished, with nothing to do.

    Args:
        waits: the job's, with the lock that guards everything here.
        batches: what is to be updated.
        work: updates one batch; called without the lock.
        on_end: called under the lock, once: when every batch is updated (with None), or when one
            has failed and none runs any more (with what it raised).
        after: the update before; no batch begins before that one is finished.  See [Note: turns]
            in independent.py.  The caller holds the lock.

    Attributes:
        updated: names of the slices and tables that have their new values.
        finished: every batch is updated, and ``on_end`` has returned.
        failure: what the first batch that failed raised.
        in_workers: threads of their own update it; otherwise those do that wait for it.
        early: a part of it may be done long before all is.
    """

    def __init__(
        self,
        waits: Waits | None = None,
        batches: Iterable[Batch] = (),
        work: Callable[[Batch], None] = lambda batch: None,
        on_end: Callable[[BaseException | None], None] = lambda failure: None,
        after: UpdateTask | None = None,
    ) -> None:
        self.updated: set[str] = set()
        self.finished = waits is None
        self.failure: BaseException | None = None
        self.in_workers = False
        self._waits = waits or Waits()
        self._lock = self._waits.lock
        self._events: dict[str, WaitEvent] = {}  # by slice or table; "": of the end
        self._left = deque(batches)
        self.early = len(self._left) > 1
        self._running = 0
        self._seconds = 0.0  # that its batches have taken
        self._work, self._on_end = work, on_end
        # the updates before and behind it, until the one of both that comes first is finished
        self._after = after if after is not None and not after.finished else None
        self._behind: UpdateTask | None = None
        if self._after is not None:
            self._after._behind = self
            if self._after.failure is not None:
                self._fail(self._after.failure)

    def advance(self, limit: int) -> bool:
        """Updates the next batch in this thread; and when that was the last one, also updates
        behind this one: see [Note: going on].

        Args:
            limit: the number of batches that may run at once.

        Returns:
            False if no batch is left, or ``limit`` of them run already, or the update before is not
            finished.

        Raises:
            Exception: what the update raised.
        """
        began, behind = self._advance(limit)
        if behind is not None:
            behind._go_on(self._seconds)
        return began

    def _advance(
        self, limit: int, ended: list[UpdateTask] | None = None
    ) -> tuple[bool, UpdateTask | None]:
        """Gives also the update behind this one, where the batch was the last one of this.

        Args:
            ended: collects those that end here, whose threads are not notified; None: all are
                notified.
        """
        with self._lock:
            if not self._may_begin(limit):
                return False, None
            batch = self._left.popleft()
            self._running += 1
        failure: BaseException | None = None
        since = time.monotonic()
        try:
            self._work(batch)
        except BaseException as error:
            failure = error
            raise
        finally:
            behind = self._batch_ended(batch, failure, time.monotonic() - since, ended)
        return True, behind

    def _may_begin(self, limit: int) -> bool:
        return bool(self._left) and self._running < limit and self._after is None

    def _go_on(self, seconds: float) -> None:
        """Continues with this update in the thread that has ended the one before.

        Args:
            seconds: that it has taken.
        """
        until = time.monotonic() + GO_ON_SECONDS - seconds
        ended: list[UpdateTask] = []
        task: UpdateTask | None = self
        while task is not None and not task.in_workers and time.monotonic() < until:
            try:
                began, behind = task._advance(1, ended)
            except Exception:
                break  # it has failed, and tells that itself
            if behind is not None or not began:
                task = behind
        with self._lock:
            for each in ended:
                each._tell_all()
            if task is not None:
                task._tell_one()

    def advance_all(self, limit: int) -> None:
        """Updates batches in this thread until none is left, or ``limit`` of them run already."""
        while (before := self._after) is not None:
            before.wait_for(helpers=ALL)
        while self.advance(limit):
            pass

    def finish(self) -> None:
        """Updates the rest; returns at once where workers do.

        Raises:
            Exception: what the update raised.
        """
        if not self.in_workers:
            self.wait_for()

    def wait_for(self, name: str = "", helpers: int = 1) -> None:
        """Updates, or waits for, a slice or table; without a name all of them, and ``on_end``.

        See [Note: answers begin early] in lane.py.

        Args:
            helpers: threads that may update at once, this one included.

        Raises:
            Exception: what the update raised.
        """
        while not self._is_there(name):
            if self.in_workers or not self._help(helpers):
                with self._lock:
                    self._wait(name, helpers)

    def _is_there(self, name: str) -> bool:
        if name in self.updated or self.finished:
            return True
        if self.failure is not None:
            raise self.failure
        return False

    def _first(self) -> UpdateTask:
        """The first update that is not finished, of those before this one and itself.

        Raises:
            Exception: what it raised, where it has failed.
        """
        task = self
        while (before := task._after) is not None:
            task = before
        if task.failure is not None:
            raise task.failure
        return task

    def _help(self, helpers: int) -> bool:
        """Updates something, of this update or one before; False: there is nothing now."""
        task = self._first()
        return task.advance(helpers if task is self else ALL)

    def _may_help(self, helpers: int) -> bool:
        task = self._first()
        return not self.in_workers and task._may_begin(helpers if task is self else ALL)

    def _wait(self, name: str, helpers: int) -> None:
        """Waits until it is updated, or this thread may update something."""
        event = self._events.get(name)
        if event is None:
            event = self._events[name] = self._waits.event()
        self._waits.wait(event, lambda: self._is_there(name) or self._may_help(helpers))

    def _batch_ended(
        self,
        batch: Batch,
        failure: BaseException | None,
        seconds: float,
        ended: list[UpdateTask] | None,
    ) -> UpdateTask | None:
        """Gives the update behind this one, where this one is finished."""
        behind = None
        with self._lock:
            self._running -= 1
            self._seconds += seconds
            if (failure := self.failure or failure) is not None:
                self._fail(failure)
                return None
            self.updated.update(batch)
            if self._left or self._running:
                self._tell(batch)
                return None
            if (failure := self._end(None)) is not None:
                self._fail(failure)
                return None
            self.finished = True
            if ended is None:
                self._tell_all()
            else:
                ended.append(self)
            if self._behind is not None:
                behind, self._behind = self._behind, None
                behind._after = None
        return behind

    def _fail(self, failure: BaseException) -> None:
        """Fails the update, as a batch or an earlier update has failed: nothing that is left is
        ever updated, nor any later update.
        """
        task: UpdateTask | None = self
        while task is not None:
            task.failure = failure
            task._left.clear()
            task._tell_all()
            if task._running:  # it comes here again
                return
            task._end(failure)
            task = task._behind

    def _end(self, failure: BaseException | None) -> BaseException | None:
        """Calls ``on_end``, once; returns the failure, or what ``on_end`` raised, for the threads
        that wait for the step.
        """
        on_end, self._on_end = self._on_end, lambda failure: None
        try:
            on_end(failure)
        except BaseException as error:
            return failure or error
        return failure

    def _tell(self, batch: Batch) -> None:
        """Notifies, after a batch that was not the last one, the threads that wait for something in
        it; or, where batches are left and no thread is notified, one that may help.
        """
        stand = {name: event for name, event in self._events.items() if event.standing}
        told = [stand[name] for name in batch if name in stand]
        for event in told:
            event.notify()
        if self._left and not told and not self.in_workers:
            self._tell_one()

    def _tell_all(self) -> None:
        for event in self._events.values():
            event.notify()

    def _tell_one(self) -> None:
        """Notifies a thread that may help: one that waits for this update, or else for a later
        one.
        """
        task: UpdateTask | None = self
        while task is not None:
            for event in task._events.values():
                if event.standing:
                    event.notify(1)
                    return
            task = task._behind


# ---- update batches ----
#
# What of a lane one call updates, and how large that is.


# a lane whose slices have fewer bytes is updated in one thread: see [Note: answers begin early] in
# lane.py
LARGE_BYTES = 2**20


class UpdateBatches:
    """The batches of every update of one lane.

    Args:
        updates: how its slices are updated, by slice name.
        tables: the names of its tables.
        threads: that may update at once; one updates all tables one after the other.

    Attributes:
        sizes: bytes of each.  A table counts as 0: how many rows a step touches is not known
            before.
    """

    def __init__(
        self,
        updates: Mapping[str, SliceUpdate],
        tables: Collection[str],
        threads: int,
    ) -> None:
        self._updates = updates
        self._batches: list[Batch] = batches(updates)
        if threads > 1:
            self._batches += [(name,) for name in tables]
        elif tables:
            self._batches.append(tuple(tables))
        self.sizes = [
            sum(updates[name].value.nbytes for name in batch if name in updates)
            for batch in self._batches
        ]

    @property
    def large(self) -> bool:
        """Whether several threads are worth their while."""
        return sum(self.sizes) >= LARGE_BYTES

    def with_held(self, assigned: Iterable[str]) -> list[Batch]:
        """The batches of a step that assigns these slices: those that are never updated are one."""
        held = tuple(name for name in assigned if name not in self._updates)
        return [*self._batches, held] if held or not self._batches else self._batches


# ---- workers ----
#
# The worker threads that update large steps, several slices at a time, where a server may use more
# than one thread.


# torch divides a batch of more than this part of a step's bytes; see [Note: torch's threads]
DIVIDED = 0.5


class Workers:
    """The worker threads of one installed program.

    They start when there is work for them, and end when nothing refers to this object.

    Args:
        threads: how many may compute at once.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._single = ThreadPoolExecutor(1, "update")
        self._parallel = ThreadPoolExecutor(
            threads, "update", initializer=_use_one_thread, initargs=(torch.get_num_threads(),)
        )

    def start(self, task: Callable[[int], None], sizes: Sequence[int]) -> None:
        """Calls ``task(n)`` in each of n threads; returns at once.

        Args:
            sizes: bytes of each batch of the task.  See [Note: torch's threads].
        """
        if max(sizes) > DIVIDED * sum(sizes):
            self._single.submit(task, 1)
        else:
            for _ in range(self.threads):
                self._parallel.submit(task, self.threads)


def _use_one_thread(others: int) -> None:
    """Makes torch not divide the operations of this thread; new threads begin with ``others``, as
    before.
    """
    # a thread's first call takes over the process's number: so read it before setting it
    torch.get_num_threads()
    torch.set_num_threads(1)
    other = Thread(target=torch.set_num_threads, args=(others,))
    other.start()
    other.join()
