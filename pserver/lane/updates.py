"""The state of one lane that its updates change, and the updates that have begun."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from pserver.dense.update import SliceUpdate
from pserver.lane.leases import JobLeases
from pserver.lane.recording import LogRecording
from pserver.lane.rounds import Clipping, SharedBuffers
from pserver.lane.step import Hparams, LaneUpdate
from pserver.lane.tasks import Batch, UpdateBatches, UpdateTask, Workers
from pserver.lane.values import Writing
from pserver.membership.decisions import Quiesce
from pserver.membership.lifecycle import Lifecycle
from pserver.membership.members import Member, Membership, TrainerWait, wait_until_done
from pserver.membership.waits import WaitEvent
from pserver.telemetry.metrics import LaneSteps
from pserver.telemetry.trace import now
from pserver.undone import or_undone
from transpiler.plan.plan import Lane

if TYPE_CHECKING:
    from pserver.lane.tables import LockedTable

# Takes a step that is staged: waits for its record, and for its turn or its round, and begins its
# update; or, where norms clip, merges the round.
#
# Raises:
#     TrainerLost: its trainer was lost before it had its record.
#     PServerError: what ended the job meanwhile.
Take = Callable[[], UpdateTask | Clipping]


@dataclass(slots=True, eq=False)
class LaneState:
    """One lane of a server's job: what its steps change, and what they concern.

    Attributes:
        index, lane: which lane of the plan.
        updates: how its slices are updated, by slice name.
        variables: what a step may assign, by slice: those slices, and the ones that are never
            updated.
        tables: of the lane, by name.
        locks: one for each slice of the server.
        writing: marks slices whose values change while it lasts.
        buffers: of models, which trainers share.
        members: the job's trainers.
        job: for its lock and its end.
        leases: of the job's samples, which steps consume.
        recording: of the job's log.
        measured: the lane's measurements.
        version: updates applied so far, counted in steps.
        record: the number of the last record that is applied.
        hparams: of the last step, by group.
    """

    index: int
    lane: Lane
    updates: Mapping[str, SliceUpdate]
    variables: Mapping[str, torch.Tensor]
    tables: Mapping[str, LockedTable]
    locks: Mapping[str, threading.Lock]
    writing: Writing
    buffers: SharedBuffers
    members: Membership
    job: Lifecycle
    leases: JobLeases
    recording: LogRecording
    measured: LaneSteps
    version: int = 0
    record: int = 0
    hparams: Hparams = field(default_factory=dict)

    def prepare(self, update: LaneUpdate) -> LaneUpdate:
        """Takes into an update what else it reads: once, in the order of the updates, and not under
        the job's lock.  See [Note: a record is all] in lane.py.
        """
        sent = {trainer: each.buffers for trainer, each in update.steps.items()}
        names = sorted({name for each in sent.values() for name in each})
        update.buffers = self.buffers.gathered(
            {name: {trainer: each.get(name) for trainer, each in sent.items()} for name in names}
        )
        update.entry = self.recording.copies_of(update)
        return update

    def wait_for_trainers(
        self,
        member: Member,
        number: int,
        done: Callable[[], bool],
        missing: Callable[[], list[int]],
        event: WaitEvent,
    ) -> None:
        """Waits, in a step of a trainer, for others.  The caller holds the job's lock.

        Args:
            number: of the step.
            missing: gives the awaited trainers.
            event: notifies when it may be done.

        Raises:
            PServerError: what ended the job meanwhile.
        """
        since = self.measured.traced_since
        wait = TrainerWait(member, f"lane {self.index}", f"step {number}", done, missing=missing)
        wait_until_done(self.job, self.members, wait, missing, event)
        self.measured.waited(member.trainer, number, since)

    def ended(self, record: int, counted: bool, began: float) -> None:
        """Notes that an update is applied.  The caller holds the job's lock.

        Args:
            counted: its gradients did.
            began: when its first step arrived, as metrics measure it.
        """
        self.version += counted
        self.record = record
        self.measured.applied(began)


class UpdateTasks:
    """Begins the updates of one lane.  Any thread may call it.

    Args:
        state: of the lane.
        batches: of every update.
        quiesce: keeps steps from changing values during a save or a load.
        workers: the threads that update large steps.

    Attributes:
        running: updates that have begun and not ended; the job's lock guards it.
    """

    def __init__(
        self, state: LaneState, batches: UpdateBatches, quiesce: Quiesce, workers: Workers
    ) -> None:
        self.running = 0
        self._state, self._job, self._batches = state, state.job, batches
        self._quiesce, self._workers = quiesce, workers

    def begin(
        self,
        update: LaneUpdate,
        apply: Callable[[Batch], None],
        applied: Callable[[], None],
        assigned: Iterable[str],
        after: UpdateTask | None = None,
    ) -> UpdateTask:
        """A task that applies an update to every batch and then calls ``applied``, which moves
        watermarks.  A large one begins in the workers; others run in the threads that wait for
        them.  See [Note: answers begin early] in lane.py.

        No save, load or shrink runs from here until it ends.

        Args:
            update: is recorded when no save, load or shrink can come before it any more.
            apply: applies it to one batch.
            assigned: the slices that it assigns; those that are never updated are a batch.
            after: the update before, if they come one by one.

        Raises:
            PServerError: the job ended while a save, a load or a shrink ran.
        """
        apply = self._state.measured.traced("update", apply, self._state.version + 1)
        with self._job.lock:
            self._quiesce.begin_step(update.record)
        began = now()

        def end(failure: BaseException | None) -> None:
            self.running -= 1
            self._state.measured.updated(began)
            if failure is None:
                applied()
            else:
                self._job.wake_all()  # threads that wait for its end

        def on_end(failure: BaseException | None) -> None:
            try:
                self._job.or_fail(lambda: end(failure))
            finally:  # the step ends, whatever happens here
                self._quiesce.end_step()

        def task() -> UpdateTask:
            self._state.recording.begins(update)
            task = UpdateTask(
                self._job.waits,
                self._batches.with_held(assigned),
                lambda batch: self._job.or_fail(lambda: apply(batch)),
                on_end,
                after,
            )
            if self._workers.threads > 1 and self._batches.large:
                task.in_workers = True
                self._workers.start(task.advance_all, self._batches.sizes)
            self.running += 1  # a worker ends it under the lock, so later
            return task

        with self._job.lock, or_undone(self._quiesce.end_step):
            return self._job.or_fail(task)  # it is decided: it is applied, or the job ends
