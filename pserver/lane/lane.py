"""The steps of one lane of a running job.  In the modes "sync" and "diloco" all trainers' steps are
one update; in the other modes each trainer's step is an update of its own, as it arrives.

[Note: who updates]  A step is applied when its record stands: see [Note: the job's log] in
pserver/job_log/coordinator.py.  A sync step is merged and applied once: one thread leads the round,
and moves its phase under the job's lock (``sync_round.py`` draws the phases).
After that no slice changes until every trainer has committed again, so replies are sent straight
from the slices' memory.  In async mode an update holds its slice's lock, so that updates of one
slice never race, and readers get a copy (``snapshot.py``), or notice that a value has changed while
they read it where it is (:mod:`pserver.transport.zones`).

[Note: answers begin early]  Nothing is applied before a step is complete: what a lost trainer had
sent leaves no trace.  Once a step is complete nothing can stop its update, so a slice may leave as
soon as it has its new value.  With several threads, workers update large steps while the threads
that answer trainers send the slices that are updated.  With one thread, and for small steps, the
threads that answer update: a trainer that reads values where they are is told of those that are
updated, and reads them while the server goes on.  Where values travel, all are updated before the
first is sent: taking turns was measured to cost more than it saved.  Who answers updates the rest
also where its stream breaks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from pserver.dense.slice_update import SliceUpdate
from pserver.errors import FingerprintMismatch, Refused, TrainerLost
from pserver.job.applied_rounds import AppliedRounds
from pserver.job.async_slices import AsyncSlices, Writing
from pserver.job.decided_steps import DecidedSteps
from pserver.job.decisions import Decisions
from pserver.job.job_leases import JobLeases
from pserver.job.lane_updates import LaneUpdates, Taken
from pserver.job.lane_waits import LaneWaits
from pserver.job.lifecycle import Lifecycle
from pserver.job.membership import Member, Membership
from pserver.job.nonfinite_steps import NonFiniteSteps
from pserver.job.outcome import Outcome
from pserver.job.outlier_pushes import OutlierPushes
from pserver.job.partial_steps import count_decided
from pserver.job.quiesce import Quiesce
from pserver.job.recording import Recording
from pserver.job.shared_buffers import SharedBuffers
from pserver.job.staged_steps import StagedStep, StagedSteps, waiting
from pserver.job.step_checks import StepChecks
from pserver.job.sync_round import Clipping, Contribution, Hparams, Phase, SyncRound
from pserver.job.update_batches import UpdateBatches
from pserver.job.update_task import Batch, UpdateTask
from pserver.job.update_tasks import UpdateTasks
from pserver.job.workers import Workers
from pserver.job_log.records import ProcessStep
from pserver.metrics.job_steps import JobSteps
from pserver.tracing.spans import now
from transpiler.plan.plan import Lane

if TYPE_CHECKING:
    from pserver.job.locked_table import LockedTable


class LaneExecutor:
    """Takes the committed steps of one lane and applies each of them once.

    Any thread may call it.  The job's lock guards the sync round and the watermarks; tensors are
    merged and updated outside that lock.  See [Note: who updates].

    Args:
        index, lane: which lane of the plan.
        updates: how its slices are updated, by slice name.
        locks: one for each slice of the server.
        members: the job's trainers.
        job: for its lock and its end.
        decisions: of the job's log.
        leases: of the job's samples, which steps consume.
        quiesce: keeps steps from changing values during a save or a load.
        workers: the threads that update large steps.
        tables: the tables of the lane, by name.
        held: the memory of the slices that servers hold and never update, by name: a step of any
            lane may assign them.
        writing: marks slices whose values change while it lasts.
        steps: what is measured of the job's.
        recording: of the job's log.

    Attributes:
        version: updates applied so far, counted in steps.
        hparams: of the last step, by group.
        nonfinite: what becomes of steps with a NaN or an infinity, and how many were refused.
        outliers: the same of steps with a norm far beyond its history.
        buffers: of models, which trainers share.
        record: the number of the last record that is applied.
    """

    def __init__(
        self,
        index: int,
        lane: Lane,
        updates: Mapping[str, SliceUpdate],
        locks: Mapping[str, threading.Lock],
        members: Membership,
        job: Lifecycle,
        decisions: Decisions,
        leases: JobLeases,
        quiesce: Quiesce,
        workers: Workers,
        tables: Mapping[str, LockedTable],
        held: Mapping[str, torch.Tensor],
        writing: Writing,
        steps: JobSteps,
        recording: Recording,
    ) -> None:
        self.index, self.lane = index, lane
        self.updates, self.tables = updates, tables
        # what a step may assign, by slice
        self.variables = {name: update.value for name, update in updates.items()} | dict(held)
        self.version = self.record = 0
        self.hparams: Hparams = {}
        self._members, self._job = members, job
        self._decisions, self._leases = decisions, leases
        self._staged = StagedSteps(job)
        self._last_task = UpdateTask()
        self._clips_by_norm = any(update.scaled is not None for update in updates.values())
        self.nonfinite = NonFiniteSteps(lane, job, steps.nonfinite)
        self.outliers = OutlierPushes(lane, job, steps.outlier)
        self._steps = steps.lane(index)
        self._batches = UpdateBatches(updates, tables, lane.kind.waits_for_all, workers.threads)
        self._tasks = UpdateTasks(self._batches, job, quiesce, workers, self._steps)
        self._waits = LaneWaits(index, members, job, self._steps)
        first, merges = (lambda: members.first), lane.kind.merges_gradients
        self.buffers = SharedBuffers(lane.buffers, merges, held, locks, first)
        self._checks = StepChecks(lane, updates, self.variables, tables)
        slices = updates, self.variables, locks, writing
        self._one_by_one = AsyncSlices(*slices, bool(lane.dc_asgd))
        self._updates = LaneUpdates(
            lane, *slices, tables, self.buffers, self._one_by_one, recording
        )
        self._round = self._updates.new_round()
        self._taken: Taken | None = None  # of the round
        self._staging = False  # the thread that has the job's lock brings a step of the lane
        self._rounds = AppliedRounds(index, members, leases, self._steps)

    def commit(
        self, member: Member, step: int, contribution: Contribution
    ) -> UpdateTask | Clipping:
        """Takes a trainer's step; in sync mode waits for the others'.  A step is applied once,
        however often it arrives.

        Returns:
            Its update, for :meth:`updated_slices` and :meth:`outcome`; or, where norms clip, the
            merged step for :meth:`scale`.

        Raises:
            TrainerLost: its trainer was lost before.
            Refused: a step out of order.
            FingerprintMismatch: sync trainers disagree on a hyper-parameter.
            NonFinite, Outlier: a value is not finite, or a norm an outlier, and the job is to stop.
            PServerError: the job failed meanwhile.
        """
        watermark = member.watermark(self.index)
        with self._job.lock:
            self._staged.check(member)
            if step <= watermark.applied:
                return self._rounds.again(member, step)
            if step != (due := watermark.applied + 1):
                raise Refused(f"trainer {member.trainer}: expected step {due}, got step {step}")
            self._checks.check(step, member.trainer, contribution)
            self.buffers.check(step, member.trainer, contribution.buffers)
            self._leases.check(member.trainer, member.incarnation, contribution.leases)
            again = watermark.take(step, contribution.rows)
            self.hparams = contribution.hparams
            self._staged.wait_for_place(member, watermark, again, lambda: not self._round.time)
            current, staged = self._round, None
            if again:
                self._steps.repeated()
            else:
                self.nonfinite.judge(contribution)
                self.outliers.judge(member.trainer, step, contribution, watermark.histories)
                staged = self._stage(current, member, step, contribution)
            if again and not self.lane.kind.waits_for_all:
                self._staged.wait_until_applied(member, step, watermark)
                return UpdateTask()
            if staged is not None and self._updates.takes_nothing(contribution):
                return self._commit_async(staged)
        if staged is None:
            return self._commit_sync(member, step, current)
        return self._commit_async(staged)

    # ---- the job's log: see decisions.py; the caller holds the job's lock ----

    def decided(self, steps: Sequence[ProcessStep], time: float, record: int) -> None:
        """The record of these steps stands: they are applied."""
        if self.lane.kind.waits_for_all:
            contributions = self._round.decide(steps, time, record)
            if not self._staging:
                self._waits.moved.tell(1)  # it leads
        else:
            contributions = self._staged.decide(steps, time, record)
        count_decided(self._members, self.index, contributions)

    @property
    def staged(self) -> Sequence[tuple[Member, int, int]]:
        """The steps that have no record: trainer, number, and rows of tables that they change."""
        return [*self._staged.waiting, *waiting(self._round, self._members, self.index)]

    @property
    def unapplied(self) -> Mapping[int, Contribution]:
        """By trainer, the step that is decided and not applied."""
        return self._round.unapplied if self.lane.kind.waits_for_all else self._staged.unapplied

    def has_applied(self, record: int) -> bool:
        """Whether each decided step is applied whose record stands before this one."""
        return self._round.has_applied(record) and self._staged.have_applied(record)

    def drop(self, member: Member) -> None:
        """A trainer is lost; what it has staged never counts."""
        if self._staged.drop(member) or self._round.drop(member.trainer):
            watermark = member.watermark(self.index)
            watermark.taking = watermark.applied

    # ---- the result of a step ----

    def updated_slices(
        self, member: Member, step: int, task: UpdateTask, buffers_only: bool = False
    ) -> Iterator[str]:
        """The names of the lane's slices, each as soon as it has its new value, and then those of
        the buffers that the trainer is told; where staleness is bounded, not before the trainer may
        read them.

        Raises:
            PServerError: the update failed, or a wait for others.
        """
        if self.lane.staleness is not None:
            self.outcome(member, step, task)
        for name in () if buffers_only else self.updates:
            task.wait_for(name)
            yield name
        task.wait_for()
        yield from self.buffers.told(member.trainer)

    def outcome(self, member: Member, step: int, task: UpdateTask) -> Outcome:
        """Waits until a step is applied; where staleness is bounded, also until the slowest trainer
        is near enough.

        Raises:
            PServerError: as :meth:`updated_slices`.
        """
        watermark = member.watermark(self.index)
        task.wait_for()
        with self._job.lock:
            if self.lane.staleness is not None:
                self._waits.wait_for_slowest(member, step, self.lane.staleness)
            version = self.version if self.lane.kind.waits_for_all else watermark.version
            return watermark.outcome(version or self.version)

    # ---- the update ----

    def _commit_async(self, staged: StagedStep) -> UpdateTask:
        """Applies one trainer's step as an update of its own, when its turn comes.  The caller may
        hold the job's lock where there is nothing to be taken: then no other turn waits for it.
        """
        began = now()
        with self._job.lock:
            self._staged.wait_for_turn(staged)
        # not under the lock, and nobody else's turn
        taken = self._job.or_fail(lambda: self._updates.take(staged.decided(self.index)))
        with self._job.lock:
            # under the lock: workers take updates in their order
            self._last_task = task = self._tasks.begin(
                self.version,
                partial(self._updates.update, taken.steps),
                lambda: self._applied_one(staged, began),
                staged.contribution.assigned,
                self._last_task,
                taken,
            )
            self._staged.begin()
            return task

    def _applied_one(self, staged: StagedStep, began: float) -> None:
        """Ends one trainer's step.  The caller holds the job's lock."""
        member, contribution = staged.member, staged.contribution
        watermark = member.watermark(self.index)
        if watermark.version:
            self._steps.stale(self.version - watermark.version)
        self.version += 0 if contribution.skipped else 1
        self.record = staged.record
        self._steps.pushed(refused=contribution.skipped)
        self._steps.applied(began)
        seen = contribution.nonfinite, contribution.outliers
        watermark.apply(1, contribution.overflow, contribution.refused, *seen)
        watermark.version = self.version
        self._staged.applied(staged)
        self._waits.took(staged.step)
        self._leases.decided(member.trainer, member.incarnation, contribution.leases)

    def _commit_sync(self, member: Member, step: int, current: SyncRound) -> UpdateTask | Clipping:
        """Waits until the sync round has its record, and applies the round once."""
        with self._job.lock:
            self._waits.wait_for_record(member, step, current)
            if member.trainer not in current.contributions:
                if current.goes_on:
                    self._waits.moved.tell(1)  # another one leads
                raise TrainerLost(member.fenced)
            self._waits.wait_for_leader(current, lambda: current.goes_on)
            current.led = True
            clips = self._clips_by_norm and bool(current.counted)
            merges = clips and current.phase is Phase.COLLECTING
            current.phase = Phase.MERGING if merges else current.phase
        if not clips:
            return self._apply(current, Phase.COLLECTING, {})
        if merges:
            self._taken = self._take_round(current)
            norms = partial(current.measure, self.updates, self.tables)
            measure = self._steps.traced("merge", lambda _: norms(), self.version + 1)
            self._job.or_fail(partial(measure, ()))
            with self._job.lock:
                current.phase = Phase.MERGED
                self._waits.moved.tell()
        if current.norms:
            return Clipping(current, current.norms)
        return self._apply(current, Phase.MERGED, {})

    def _take_round(self, current: SyncRound) -> Taken:
        return self._job.or_fail(lambda: self._updates.take_round(self.index, current))

    def _stage(
        self, current: SyncRound, member: Member, step: int, contribution: Contribution
    ) -> StagedStep | None:
        """Gives the step, where it is an update of its own."""
        staged = None
        if self.lane.kind.waits_for_all:
            self._add(current, member, contribution)
        else:
            staged = self._staged.add(member, step, contribution)
        self._staging = True
        try:
            self._decisions.staged(self.index, member, step, contribution.rows, contribution.leases)
        finally:
            self._staging = False
        return staged

    def _add(self, current: SyncRound, member: Member, contribution: Contribution) -> None:
        try:
            current.add(member.trainer, contribution)
        except FingerprintMismatch as error:
            self._job.fail(error)
            raise
        # no other step waits for it from here on, and not before this one is in the round
        if contribution.last:
            member.leaving.add(self.index)
            self._job.wake_all()
        current.began = current.began or now()
        self._steps.arrived(member.trainer, now() - current.began)

    def scale(self, clipping: Clipping, coefficients: Mapping[str, float]) -> UpdateTask:
        """Applies the merged step, once, with the clipping coefficients of the trainer that calls
        first (all trainers compute the same).

        Returns:
            Its update, for :meth:`updated_slices` and :meth:`outcome`.

        Raises:
            PServerError: the job failed meanwhile.
        """
        with self._job.lock:
            self._job.check_running()
        if clipping.scaled:
            return UpdateTask()
        return self._apply(clipping.round, Phase.MERGED, coefficients)

    def _apply(
        self, current: SyncRound, ready: Phase, coefficients: Mapping[str, float]
    ) -> UpdateTask:
        """Begins the update of a sync round that is in the phase ``ready``, unless it has begun."""
        merge = self._steps.traced("merge", current.merge, self.version + 1)
        with self._job.lock:
            first = current.phase is ready
            current.phase = Phase.APPLYING if first else current.phase
        if first:
            self._job.or_fail(lambda: current.agree(self.variables, self.tables))
            taken = self._taken or self._take_round(current)
            taken.steps.coefficients, self._taken = coefficients, None

            def update(batch: Batch) -> None:
                if ready is Phase.COLLECTING:
                    merge(batch)
                self._updates.update_round(current, taken.steps, batch)

            with self._job.lock:
                current.task = self._tasks.begin(
                    self.version,
                    update,
                    lambda: self._applied(current),
                    (*current.assignments, *taken.steps.buffers),
                    taken=taken,
                )
                if current.task.early:
                    self._waits.moved.tell()
                return current.task
        with self._job.lock:
            self._waits.wait_for_leader(current, lambda: current.answers)
            assert current.task is not None, "it answers"
            return current.task

    def _applied(self, current: SyncRound) -> None:
        """Ends the sync round: moves the watermark of every trainer in it and begins the next one.

        The caller holds the job's lock.
        """
        current.phase, self.record = Phase.APPLIED, current.record
        self.version += 1 if current.counted else 0
        self._steps.applied(current.began)
        self._rounds.add(current)
        self._round = self._updates.new_round()
        self._waits.moved.tell()
        self._staged.placed.tell()

    def replay(self, steps: DecidedSteps) -> None:
        """Applies decided steps of a recorded log, in this thread."""
        self.version += 1 if self._updates.replay(steps, self._batches) else 0
        self.record = steps.record
        self.hparams = next(iter(steps.contributions.values())).hparams

    @property
    def undecided(self) -> int:
        """Steps that have come and have no record."""
        with self._job.lock:
            return len(self.staged)

    @property
    def queued(self) -> int:
        """Steps that have come and are not applied."""
        with self._job.lock:
            return len(self._round.contributions) + len(self._staged) + self._tasks.running

    @property
    def begun(self) -> int:
        """Updates applied so far, and those under way."""
        with self._job.lock:
            return self.version + self._tasks.running

    # ---- reading slices ----

    def read(self, member: Member, name: str, in_place: bool = False) -> torch.Tensor:
        """A slice of this lane between two updates: the memory itself in sync mode, and for who
        notices that it changes (``in_place``); otherwise a copy.
        """
        if self.lane.kind.waits_for_all:
            return self.updates[name].value
        return self._one_by_one.read(member.trainer, name, in_place)

    def discard_snapshots(self) -> None:
        """Drops all copies, because slices have been loaded."""
        self._one_by_one.discard_snapshots()
        self.buffers.discard()
