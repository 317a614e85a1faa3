"""What the decided steps of one lane change: a function of the records, and of what is in them.

[Note: a record is all]  Two servers that apply the same steps in the same order hold the same bits,
and so does one that reads them from a recorded log.  So an update reads nothing but its steps and
what the server holds: what a trainer had read, and what the other trainers' buffers are, is taken
into the steps before the update begins (:meth:`LaneUpdates.take`).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pserver.dense.slice_update import SliceUpdate
from pserver.job.async_slices import AsyncSlices, Writing
from pserver.job.decided_steps import DecidedSteps
from pserver.job.recorder import Kept
from pserver.job.recording import Recording
from pserver.job.shared_buffers import SharedBuffers
from pserver.job.sync_round import Contribution, SyncRound
from pserver.job.update_batches import UpdateBatches
from pserver.job.update_task import Batch
from transpiler.plan.plan import Lane

if TYPE_CHECKING:
    from pserver.job.locked_table import LockedTable


@dataclass(frozen=True, slots=True)
class Taken:
    """Decided steps with all that their update reads.

    Attributes:
        kept: what is recorded of them; None: nothing is.
    """

    steps: DecidedSteps
    recording: Recording
    kept: Kept | None

    @property
    def record(self) -> int:
        """That decides them."""
        return self.steps.record

    def begins(self) -> None:
        """Their update begins; the caller holds the job's lock."""
        self.recording.applied(self.kept, self.steps.coefficients)


class LaneUpdates:
    """Changes the slices and tables of one lane.  One update at a time, its batches in any threads.

    Args:
        lane: whose steps they are.
        updates: how its slices are updated, by slice name.
        variables: what a step may assign, by slice.
        locks: one for each slice of the server.
        writing: marks slices whose values change while it lasts.
        tables: the tables of the lane, by name.
        buffers: of models, which trainers share.
        one_by_one: the lane's slices, where each trainer's step is an update of its own.
        recording: of the job's log.
    """

    def __init__(
        self,
        lane: Lane,
        updates: Mapping[str, SliceUpdate],
        variables: Mapping[str, torch.Tensor],
        locks: Mapping[str, threading.Lock],
        writing: Writing,
        tables: Mapping[str, LockedTable],
        buffers: SharedBuffers,
        one_by_one: AsyncSlices,
        recording: Recording,
    ) -> None:
        self._lane, self._updates, self._variables = lane, updates, variables
        self._locks, self._writing, self._tables = locks, writing, tables
        self._buffers, self._one_by_one = buffers, one_by_one
        self._recording = recording

    def new_round(self) -> SyncRound:
        """A round of the lane, before anything of it has come."""
        return SyncRound(self._lane.kind.outer_optimizer, self._lane.averages)

    def take_round(self, lane: int, current: SyncRound) -> Taken:
        """See :meth:`take`; before anything of the round is merged.

        Args:
            lane: the index of this one.
        """
        decided = current.record, current.time, current.steps
        return self.take(DecidedSteps(lane, *decided, current.contributions))

    def take(self, steps: DecidedSteps) -> Taken:
        """Takes into steps what else their update reads.  Once, in the order of the updates, and
        not under the job's lock.
        """
        self._complete(steps)
        return Taken(steps, self._recording, self._recording.kept(steps))

    def takes_nothing(self, own: Contribution) -> bool:
        """Whether one trainer's step has all that its update reads: no values are copied."""
        reads = own.buffers or own.row_gradients or self._one_by_one.compensates
        return not reads and self._recording.recorder is None

    def _complete(self, steps: DecidedSteps) -> None:
        sent = {trainer: each.buffers for trainer, each in steps.contributions.items()}
        names = sorted({name for each in sent.values() for name in each})
        steps.buffers = self._buffers.gathered(
            {name: {trainer: each.get(name) for trainer, each in sent.items()} for name in names}
        )
        if self._lane.kind.waits_for_all or steps.own.skipped:
            return
        ((trainer, own),) = steps.contributions.items()
        own.before = self._one_by_one.last_read(trainer, own.gradients)
        for name, gradient in own.row_gradients.items():
            before = self._tables[name].read_before(gradient, trainer)
            if before is not None:
                own.rows_before[name] = before

    def update(self, steps: DecidedSteps, batch: Batch) -> None:
        """One trainer's step, of these slices and tables."""
        own = steps.own
        for name in batch:
            if name in steps.buffers:
                self._buffers.assign(name, steps.buffers[name])
            elif name not in self._tables:
                self._one_by_one.update(name, own)
            elif (rows := own.row_gradients.pop(name, None)) is not None and not own.skipped:
                before = own.rows_before.pop(name, None)
                self._tables[name].update(rows, own.hparams, {}, steps.time, before)

    def update_round(self, current: SyncRound, steps: DecidedSteps, batch: Batch) -> None:
        """A round of which the gradients of these slices and tables are merged."""
        with self._writing(batch):
            for name in current.assignments.keys() & batch:
                with self._locks[name]:
                    current.assignments[name].write(self._variables[name])
            for name in steps.buffers.keys() & batch:
                self._buffers.assign(name, steps.buffers[name])
            current.apply(batch, self._updates, steps.coefficients)
        current.apply_rows(batch, self._tables, steps.coefficients)

    def replay(self, steps: DecidedSteps, batches: UpdateBatches) -> bool:
        """Applies complete steps in this thread.

        Returns:
            Whether they count: False where they were skipped.

        Raises:
            PServerError: they do not fit what the server holds.
        """
        if not self._lane.kind.waits_for_all:
            for batch in batches.with_held(steps.own.assigned):
                self.update(steps, batch)
            return not steps.own.skipped
        current = self.new_round()
        current.contributions = dict(steps.contributions)
        current.decide(steps.steps, steps.time, steps.record)
        current.agree(self._variables, self._tables)
        counts = bool(current.counted)
        for batch in batches.with_held((*current.assignments, *steps.buffers)):
            current.merge(batch)
            self.update_round(current, steps, batch)
        return counts
