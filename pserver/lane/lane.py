"""The steps of one lane of a running job.  In the modes "sync" and "diloco" all trainers' steps are
one update; in the other modes each trainer's step is an update of its own, as it arrives.

[Note: who updates]  A step is applied when its record stands: see [Note: the job's log] in
pserver/job_log/coordinator.py.  A sync step is merged and applied once: one thread leads the round,
and moves its phase under the job's lock (``rounds.py`` draws the phases).
After that no slice changes until every trainer has committed again, so replies are sent straight
from the slices' memory.  In async mode an update holds its slice's lock, so that updates of one
slice never race, and readers get a copy (``values.py``), or notice that a value has changed while
they read it where it is (:mod:`pserver.transport.zones`).

[Note: answers begin early]  Nothing is applied before a step is complete: what a lost trainer had
sent leaves no trace.  Once a step is complete nothing can stop its update, so a slice may leave as
soon as it has its new value.  With several threads, workers update large steps while the threads
that answer trainers send the slices that are updated.  With one thread, and for small steps, the
threads that answer update: a trainer that reads values where they are is notified of those that are
updated, and reads them while the server goes on.  Where values travel, all are updated before the
first is sent: taking turns was measured to cost more than it saved.  A thread that answers updates
the rest also where its stream breaks.

[Note: a record is all]  Two servers that apply the same steps in the same order hold the same bits,
and so does one that reads them from a recorded log.  So an update reads nothing but its steps and
what the server holds: what a trainer had read, and what the other trainers' buffers are, is taken
into the steps before the update begins (:meth:`LaneUpdates.prepare`).

[Note: turns]  Two servers that apply the same records hold the same bits.  So the updates of a lane
begin in the order of the log, and none begins a batch before the one before it is done; a thread
that waits for an earlier update helps with it (tasks.py).  A staged step always has a thread
that waits here, so every turn is taken.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from pserver.dense.update import SliceUpdate
from pserver.errors import FingerprintMismatch, PServerError, Refused, TrainerLost, Unprepared
from pserver.job_log.records import Process, ProcessStep
from pserver.lane.judge import NonFiniteSteps, OutlierPushes
from pserver.lane.leases import JobLeases
from pserver.lane.recorder import PendingEntry
from pserver.lane.recording import LogRecording
from pserver.lane.rounds import (
    Clipping,
    Contribution,
    DecidedSteps,
    Hparams,
    RoundPhase,
    SharedBuffers,
    SyncRound,
)
from pserver.lane.tasks import Batch, UpdateBatches, UpdateTask, Workers
from pserver.lane.values import AsyncSlices, Writing
from pserver.membership.decisions import Decisions, Quiesce, process_of
from pserver.membership.lifecycle import Lifecycle
from pserver.membership.members import Member, Membership, TrainerWait, wait_until_done
from pserver.membership.waits import WaitEvent
from pserver.membership.watermark import Outcome, Watermark
from pserver.telemetry.metrics import JobSteps, LaneSteps
from pserver.telemetry.trace import now
from pserver.undone import or_undone
from transpiler.plan.plan import Lane

if TYPE_CHECKING:
    from pserver.lane.tables import LockedTable


# ---- applied rounds ----
#
# The applied sync rounds of one lane: what they leave behind, and the answer to a trainer
# that asks again.


class AppliedRounds:
    """The caller holds the job's lock.

    [Note: norms again]  Where norms clip, each trainer gets every server's part of them, and tells
    all servers the coefficient.  A server that has it from one trainer applies the round, while
    another one may have lost its connection before it heard the norms.  So the last round's are
    sent again: a coefficient of some servers' norms alone would be another one, and the rest of the
    servers might hear it first.

    Args:
        index: of the lane.
        members: the job's trainers.
        leases: of the samples that steps consume.
        steps: the lane's measurements.
    """

    def __init__(
        self, index: int, members: Membership, leases: JobLeases, steps: LaneSteps
    ) -> None:
        self._index, self._members, self._leases, self._steps = index, members, leases, steps
        self._clipped: Clipping | None = None

    def add(self, current: SyncRound) -> None:
        """Moves the watermark of every trainer in an applied round."""
        for trainer, contribution in current.contributions.items():
            member = self._members.by_trainer[trainer]
            refuses = current.refuses(trainer)
            self._steps.pushed(refused=refuses or current.overflow)
            member.watermark(self._index).apply(
                current.committed, current.overflow, refuses, current.nonfinite, current.outliers
            )
            self._leases.decided(trainer, member.incarnation, contribution.leases)
        done = SyncRound(steps=current.steps)
        self._clipped = Clipping(done, current.norms, scaled=True) if current.norms else None

    def again(self, member: Member, step: int) -> UpdateTask | Clipping:
        """The answer to a repeated step, which has been applied."""
        self._steps.repeated()
        clipped, this = self._clipped, ProcessStep(process_of(member), step)
        return clipped if clipped is not None and this in clipped.round.steps else UpdateTask()


# ---- lane updates ----
#
# What the decided steps of one lane change: a function of the records, and of what is in them.


@dataclass(frozen=True, slots=True)
class PreparedSteps:
    """Decided steps with all that their update reads.

    Attributes:
        kept: what is recorded of them; None: nothing is.
    """

    steps: DecidedSteps
    recording: LogRecording
    kept: PendingEntry | None

    @property
    def record(self) -> int:
        """The record that decides them."""
        return self.steps.record

    def begins(self) -> None:
        """Notes that their update begins; the caller holds the job's lock."""
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
        recording: LogRecording,
    ) -> None:
        self._lane, self._updates, self._variables = lane, updates, variables
        self._locks, self._writing, self._tables = locks, writing, tables
        self._buffers, self._one_by_one = buffers, one_by_one
        self._recording = recording

    def new_round(self) -> SyncRound:
        """A new round of the lane."""
        return SyncRound(self._lane.kind.outer_optimizer, self._lane.averages)

    def take_round(self, lane: int, current: SyncRound) -> PreparedSteps:
        """See :meth:`prepare`; before anything of the round is merged.

        Args:
            lane: the index of this one.
        """
        decided = current.record, current.time, current.steps
        return self.prepare(DecidedSteps(lane, *decided, current.contributions))

    def prepare(self, steps: DecidedSteps) -> PreparedSteps:
        """Takes into steps what else their update reads.  Once, in the order of the updates, and
        not under the job's lock.
        """
        self._complete(steps)
        return PreparedSteps(steps, self._recording, self._recording.copies_of(steps))

    def takes_nothing(self, own: Contribution) -> bool:
        """Whether one trainer's step has all that its update reads, so that no values are
        copied.
        """
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
        """Applies one trainer's step to these slices and tables."""
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
        """Applies a round, whose gradients are merged, to these slices and tables."""
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


# ---- lane waits ----
#
# For whom a lane's steps wait: for all trainers of a sync round, or for the slowest one.


class LaneWaits:
    """The waits of trainers for one another in one lane.  The caller holds the job's lock.

    Args:
        index: of the lane.
        members: the job's trainers.
        job: for its lock and its end.
        steps: what is measured of them.
    """

    def __init__(self, index: int, members: Membership, job: Lifecycle, steps: LaneSteps) -> None:
        self._index, self._members, self._job, self._steps = index, members, job, steps
        self._nearer = job.waits.event()  # the slowest trainer has taken a step
        # a round's record stands, or it is merged, or updated
        self.moved = job.waits.event()

    def slowest(self) -> int:
        """The least step among the trainers that have not left; one that has not joined yet has
        taken none.
        """
        steps = [
            self._members.step(trainer, self._index)
            for trainer in self._members.awaited(self._index)
        ]
        return min(steps, default=2**63)

    def wait_for_slowest(self, member: Member, step: int, staleness: int) -> None:
        """Waits until no trainer is more than ``staleness`` steps behind; a long wait is logged
        with the awaited trainers.

        Raises:
            PServerError: what ended the job meanwhile.
        """

        least = step - staleness

        def missing() -> list[int]:
            awaited = self._members.awaited(self._index)
            return [t for t in awaited if self._members.step(t, self._index) < least]

        self._wait(member, step, lambda: self.slowest() >= least, missing, self._nearer)

    def took(self, step: int) -> None:
        """Notes that a trainer has taken a step: it may have been the slowest one."""
        if self._nearer.standing and self.slowest() >= step:
            self._nearer.notify()

    def wait_for_record(self, member: Member, step: int, current: SyncRound) -> None:
        """Waits until a round's record stands, or the trainer is lost, as
        :meth:`wait_for_slowest` does.
        """

        def missing() -> list[int]:
            needed = self._members.awaited_together(self._index)
            return [trainer for trainer in needed if trainer not in current.contributions]

        self._wait(member, step, lambda: bool(current.time or member.fenced), missing, self.moved)

    def wait_for_leader(self, current: SyncRound, done: Callable[[], bool]) -> None:
        """Waits for the thread that leads a round.

        Raises:
            PServerError: what ended the job before the round's update began.
        """

        def check() -> None:
            if current.task is None:  # otherwise it ends, or has failed
                self._job.check_running()

        self._job.waits.wait(self.moved, done, check=check)

    def _wait(
        self,
        member: Member,
        step: int,
        done: Callable[[], bool],
        missing: Callable[[], list[int]],
        event: WaitEvent,
    ) -> None:
        since = self._steps.traced_since
        wait = TrainerWait(member, f"lane {self._index}", f"step {step}", done, missing=missing)
        wait_until_done(self._job, self._members, wait, missing, event)
        self._steps.waited(member.trainer, step, since)


# ---- partial steps ----
#
# Steps of a lost trainer of which some lanes have their part, and others don't.
#
# In a job of several lanes each lane's step is a record of its own, as lanes never hold up one
# another.  The samples count with the step of the first lane.  A lost trainer's steps that were
# decided in some lanes but not in others are counted and reported here; averaged_steps.py does the
# same for averages among trainers, which are no lane.


def count_decided(members: Membership, lane: int, decided: Mapping[int, Contribution]) -> None:
    """Counts the steps of a lane that a record decides.

    Args:
        decided: by trainer.
    """
    for trainer, step in decided.items():
        watermark = members.by_trainer[trainer].watermark(lane)
        watermark.script_steps += 0 if step.overflow else step.steps


def partial_steps(watermarks: Mapping[int, Watermark], lanes: Sequence[Lane]) -> int:
    """The number of steps of a trainer's script that are decided in one lane and not in another of
    the same optimizer.

    Args:
        watermarks: of the trainer, by lane, when its staged steps were dropped.
        lanes: of the plan.
    """
    decided: dict[int, list[int]] = {}  # by optimizer: in each of its lanes
    for index, lane in enumerate(lanes):
        watermark = watermarks.get(index, Watermark())
        decided.setdefault(lane.optimizer, []).append(watermark.script_steps)
    return sum(max(each) - min(each) for each in decided.values())


# ---- staged steps ----
#
# The staged steps of one lane whose updates come one by one: each waits for its record, and for its
# turn.


@dataclass(slots=True)
class StagedStep:
    """One trainer's step that has arrived whole.

    Attributes:
        event: that its turn has come, or it is applied.
        time: of its record, in seconds since 1970.
        record: the record's number.
        turn: its place among the lane's updates; -1: it has no record.
        dropped: its trainer was lost before it had one.
    """

    member: Member
    step: int
    contribution: Contribution
    event: WaitEvent
    time: float = 0.0
    record: int = 0
    turn: int = -1
    dropped: bool = False

    def decided(self, lane: int) -> DecidedSteps:
        """The step with its record, as an update of its own."""
        process = Process(self.member.trainer, self.member.incarnation)
        return DecidedSteps(
            lane,
            self.record,
            self.time,
            (ProcessStep(process, self.step),),
            {self.member.trainer: self.contribution},
        )


class StagedSteps:
    """The staged steps of one lane.  The caller holds the job's lock.  See [Note: turns].

    Args:
        job: for its lock and its end.
    """

    def __init__(self, job: Lifecycle) -> None:
        self._job = job
        self._waiting: dict[int, StagedStep] = {}  # by trainer
        self._deciding: dict[int, StagedStep] = {}  # by trainer: with a record, and not applied
        self._turns: dict[int, StagedStep] = {}  # with a record, and not begun
        self._decided = self._begun = 0  # updates
        # another step may be staged
        self.placed = job.waits.event()

    def __len__(self) -> int:
        return len(self._waiting)

    def check(self, member: Member) -> None:
        """Returns if a trainer's step can count.

        Raises:
            TrainerLost: the trainer was lost.
            PServerError: what has ended the job.
        """
        self._job.check_running()
        if member.fenced:
            raise TrainerLost(member.fenced)

    def add(self, member: Member, step: int, contribution: Contribution) -> StagedStep:
        """Adds a step, before its record can arrive."""
        staged = StagedStep(member, step, contribution, self._job.waits.event())
        self._waiting[member.trainer] = staged
        return staged

    def decide(
        self, steps: Iterable[ProcessStep], time: float, record: int
    ) -> dict[int, Contribution]:
        """Takes the record of these steps.

        Returns:
            The steps, by trainer.
        """
        found = {}
        for step in steps:
            staged = self._waiting.pop(step.process.trainer)
            staged.time, staged.record, staged.turn = time, record, self._decided
            self._turns[self._decided] = staged
            self._decided += 1
            self._deciding[staged.member.trainer] = staged
            found[staged.member.trainer] = staged.contribution
        self._tell_next()
        return found

    def _tell_next(self) -> None:
        if (following := self._turns.get(self._begun)) is not None:
            following.event.notify()

    @property
    def waiting(self) -> list[tuple[Member, int, int]]:
        """The steps that have no record: trainer, number, and rows of tables that they change."""
        return [(s.member, s.step, s.contribution.rows) for s in self._waiting.values()]

    @property
    def unapplied(self) -> dict[int, Contribution]:
        """By trainer, the step that has its record and is not applied."""
        return {trainer: each.contribution for trainer, each in self._deciding.items()}

    def have_applied(self, record: int) -> bool:
        """Whether each step is applied whose record stands before this one."""
        return all(each.record > record for each in self._deciding.values())

    def applied(self, staged: StagedStep) -> None:
        """Removes a step, which has been applied."""
        del self._deciding[staged.member.trainer]
        staged.event.notify()

    def drop(self, member: Member) -> bool:
        """Drops the staged steps of a lost trainer.

        Returns:
            Whether it had staged a step.
        """
        staged = self._waiting.get(member.trainer)
        if staged is not None and staged.member is member:
            del self._waiting[member.trainer]
            staged.dropped = True
            return True
        return False

    def wait_for_turn(self, staged: StagedStep) -> None:
        """Waits until a step has its record, and the lane's earlier updates have begun.

        Raises:
            TrainerLost: its trainer was lost before.
            PServerError: what ended the job meanwhile.
        """
        self._wait(staged.event, staged.member, lambda: staged.turn == self._begun, staged)

    def wait_until_applied(self, member: Member, step: int, watermark: Watermark) -> None:
        """Waits for a step that runs in another thread, from an earlier stream.

        Args:
            watermark: of the trainer, in this lane.

        Raises:
            TrainerLost, PServerError: as :meth:`wait_for_turn`.
        """
        trainer = member.trainer
        staged = self._waiting.get(trainer) or self._deciding.get(trainer)
        event = self._job.changed if staged is None else staged.event
        self._wait(event, member, lambda: watermark.applied >= step)

    def wait_for_place(
        self, member: Member, watermark: Watermark, again: bool, done: Callable[[], bool]
    ) -> None:
        """Waits until a step may be staged: the step of a trainer that has just joined may arrive
        before the others' round is applied.

        Args:
            watermark: of the trainer, in this lane.
            again: it is staged already.
            done: whether another one may be.

        Raises:
            TrainerLost: the trainer was lost, and its step has arrived after the record of that:
                nothing of it stays, so that another process may take its number.
            PServerError: what ended the job meanwhile.
        """
        try:
            self._wait(self.placed, member, lambda: again or done())
            if member.fenced and not again:
                raise TrainerLost(member.fenced)
        except PServerError:
            watermark.taking = watermark.applied
            raise

    def _wait(
        self,
        event: WaitEvent,
        member: Member,
        done: Callable[[], bool],
        staged: StagedStep | None = None,
    ) -> None:
        """Waits until ``done``, for a trainer.

        Args:
            staged: the step; one that has its record is done, whatever happens to its trainer.

        Raises:
            TrainerLost: the trainer was lost before.
            PServerError: what ended the job meanwhile.
        """

        def check() -> None:
            if member.fenced and (staged is None or staged.dropped):
                raise TrainerLost(member.fenced)
            self._job.check_running()

        self._job.waits.wait(event, done, check=check)

    def begin(self) -> None:
        """Notes that the update whose turn it is has begun."""
        del self._turns[self._begun]
        self._begun += 1
        self._tell_next()


def waiting(current: SyncRound, members: Membership, lane: int) -> list[tuple[Member, int, int]]:
    """The staged steps of a round of all trainers, as :attr:`StagedSteps.waiting` in other
    lanes.
    """
    found = {} if current.time else current.contributions
    staged = [(members.by_trainer[trainer], each.rows) for trainer, each in found.items()]
    return [(member, member.watermark(lane).taking, rows) for member, rows in staged]


# ---- step checks ----
#
# What a committed step must say before it is taken.  Pure checks.


class StepChecks:
    """The checks of one lane's steps.

    Args:
        lane: whose steps they are.
        updates: how the lane's slices are updated, by slice name.
        variables: what a step may assign: those slices, and the ones that are never updated.
        tables: of the lane, by name.
    """

    def __init__(
        self,
        lane: Lane,
        updates: Mapping[str, SliceUpdate],
        variables: Collection[str],
        tables: Mapping[str, LockedTable],
    ) -> None:
        self._lane, self._updates = lane, updates
        self._known = {*variables, *tables}
        self._groups = {update.group for update in updates.values()}.union(
            *(table.groups for table in tables.values())
        )

    def check(self, step: int, trainer: int, contribution: Contribution) -> None:
        """Returns if a step may be taken.

        Args:
            step: its number in the lane.
            trainer: whose.

        Raises:
            Unprepared: it writes a slice that is not here.
            Refused: hyper-parameters or norms are missing, or its external writes have another form
                than the lane takes.
        """
        who = f"step {step} of trainer {trainer}"
        missing = self._groups - contribution.hparams.keys()
        if missing:
            raise Refused(f"{who} has no hyper-parameters for group {min(missing)}")
        self._check_written(who, contribution)
        self._check_norms(who, contribution)

    def _check_norms(self, who: str, contribution: Contribution) -> None:
        """Checks that a step has all of its norms, where its lane refuses steps, or stops, by them:
        with "apply" they may be missing.
        """
        if self._lane.outlier_push in ("off", "apply") or contribution.overflow:
            return
        brought = {self._updates[name].parameter for name in contribution.gradients}
        brought.update(n for n, rows in contribution.row_gradients.items() if len(rows.ids))
        if missing := brought - contribution.norms.keys():
            raise Refused(
                f"{who}: expected the norm of what it brings of {min(missing)!r}, as outlier_push "
                f"is {self._lane.outlier_push!r}, got none"
            )

    def _check_written(self, who: str, contribution: Contribution) -> None:
        """Checks the form of a step's external writes: with checksums in a lane whose trainers wait
        for one another, without them otherwise.
        """
        unknown = contribution.written.keys() - self._known
        if unknown:
            raise Unprepared(
                f"{who}: {min(unknown)!r} cannot be written in this lane of this server"
            )
        waits = self._lane.kind.waits_for_all
        if contribution.written and not waits:
            raise Refused(
                f"{who}: expected no checksums in a lane without joint steps, got one of "
                f"{min(contribution.written)!r}"
            )
        if not waits or not contribution.assignments:
            return
        assigned = contribution.assignments.keys() & self._updates.keys()
        if unsaid := assigned - contribution.written.keys():
            raise Refused(f"{who} assigns {min(unsaid)!r} without its checksum")


# ---- update tasks ----
#
# The updates of one lane that have begun: each is a task of batches, during which no save, load or
# shrink runs.


class UpdateTasks:
    """Begins the updates of one lane.  Any thread may call it.

    Args:
        batches: of every update.
        job: for its lock, and its end where an update fails.
        quiesce: keeps steps from changing values during a save or a load.
        workers: the threads that update large steps.
        steps: the lane's measurements.

    Attributes:
        running: updates that have begun and not ended; the job's lock guards it.
    """

    def __init__(
        self,
        batches: UpdateBatches,
        job: Lifecycle,
        quiesce: Quiesce,
        workers: Workers,
        steps: LaneSteps,
    ) -> None:
        self.running = 0
        self._batches, self._job, self._quiesce = batches, job, quiesce
        self._workers, self._steps = workers, steps

    def begin(
        self,
        version: int,
        update: Callable[[Batch], None],
        applied: Callable[[], None],
        assigned: Iterable[str],
        after: UpdateTask | None = None,
        taken: PreparedSteps | None = None,
    ) -> UpdateTask:
        """A task that updates every batch and then calls ``applied``, which moves watermarks.  A
        large one begins in the workers; others run in the threads that wait for them.  See [Note:
        answers begin early] in lane.py.

        No save, load or shrink runs from here until it ends.

        Args:
            version: of the lane, before it.
            assigned: the slices that the step assigns; those that are never updated are a batch.
            after: the update before, if they come one by one.
            taken: what it applies, which is notified when no save, load or shrink can come before
                it any more, under the job's lock.

        Raises:
            PServerError: the job ended while a save, a load or a shrink ran.
        """
        update = self._steps.traced("update", update, version + 1)
        with self._job.lock:
            self._quiesce.begin_step(0 if taken is None else taken.record)
        began = now()

        def end(failure: BaseException | None) -> None:
            self.running -= 1
            self._steps.updated(began)
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
            if taken is not None:
                taken.begins()
            task = UpdateTask(
                self._job.waits,
                self._batches.with_held(assigned),
                lambda batch: self._job.or_fail(lambda: update(batch)),
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


# ---- lane executor ----


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
        steps: the job's measurements.
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
        recording: LogRecording,
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
        self._taken: PreparedSteps | None = None  # of the round
        self._staging = False  # the thread that has the job's lock brings a step of the lane
        self._rounds = AppliedRounds(index, members, leases, self._steps)

    def commit(
        self, member: Member, step: int, contribution: Contribution
    ) -> UpdateTask | Clipping:
        """Takes a trainer's step; in sync mode waits for the others' steps.  A step is applied
        once, however often it arrives.

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
            again = watermark.begin(step, contribution.rows)
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

    # ---- the job's log: see membership/decisions.py; the caller holds the job's lock ----

    def decided(self, steps: Sequence[ProcessStep], time: float, record: int) -> None:
        """Takes the record of these steps: the threads that brought them may apply them now."""
        if self.lane.kind.waits_for_all:
            contributions = self._round.decide(steps, time, record)
            if not self._staging:
                self._waits.moved.notify(1)  # it leads
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
        """Drops the staged steps of a lost trainer."""
        if self._staged.drop(member) or self._round.drop(member.trainer):
            watermark = member.watermark(self.index)
            watermark.taking = watermark.applied

    # ---- the result of a step ----

    def updated_slices(
        self, member: Member, step: int, task: UpdateTask, buffers_only: bool = False
    ) -> Iterator[str]:
        """The names of the lane's slices, each as soon as it has its new value, and then those of
        the buffers for the trainer; where staleness is bounded, not before the trainer may read
        them.

        Raises:
            PServerError: the update failed, or a wait for others.
        """
        if self.lane.staleness is not None:
            self.outcome(member, step, task)
        for name in () if buffers_only else self.updates:
            task.wait_for(name)
            yield name
        task.wait_for()
        yield from self.buffers.answer(member.trainer)

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
        # not under the lock, and no other step's turn
        taken = self._job.or_fail(lambda: self._updates.prepare(staged.decided(self.index)))
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
        """Ends one trainer's step, which has been applied.  The caller holds the job's lock."""
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
                    self._waits.moved.notify(1)  # another one leads
                raise TrainerLost(member.fenced)
            self._waits.wait_for_leader(current, lambda: current.goes_on)
            current.led = True
            clips = self._clips_by_norm and bool(current.counted)
            merges = clips and current.phase is RoundPhase.COLLECTING
            current.phase = RoundPhase.MERGING if merges else current.phase
        if not clips:
            return self._apply(current, RoundPhase.COLLECTING, {})
        if merges:
            self._taken = self._take_round(current)
            norms = partial(current.measure, self.updates, self.tables)
            measure = self._steps.traced("merge", lambda _: norms(), self.version + 1)
            self._job.or_fail(partial(measure, ()))
            with self._job.lock:
                current.phase = RoundPhase.MERGED
                self._waits.moved.notify()
        if current.norms:
            return Clipping(current, current.norms)
        return self._apply(current, RoundPhase.MERGED, {})

    def _take_round(self, current: SyncRound) -> PreparedSteps:
        return self._job.or_fail(lambda: self._updates.take_round(self.index, current))

    def _stage(
        self, current: SyncRound, member: Member, step: int, contribution: Contribution
    ) -> StagedStep | None:
        """Stages a step; returns it, where it is an update of its own."""
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
        return self._apply(clipping.round, RoundPhase.MERGED, coefficients)

    def _apply(
        self, current: SyncRound, ready: RoundPhase, coefficients: Mapping[str, float]
    ) -> UpdateTask:
        """Begins the update of a sync round that is in the phase ``ready``, unless it has begun."""
        merge = self._steps.traced("merge", current.merge, self.version + 1)
        with self._job.lock:
            first = current.phase is ready
            current.phase = RoundPhase.APPLYING if first else current.phase
        if first:
            self._job.or_fail(lambda: current.agree(self.variables, self.tables))
            taken = self._taken or self._take_round(current)
            taken.steps.coefficients, self._taken = coefficients, None

            def update(batch: Batch) -> None:
                if ready is RoundPhase.COLLECTING:
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
                    self._waits.moved.notify()
                return current.task
        with self._job.lock:
            self._waits.wait_for_leader(current, lambda: current.answers)
            assert current.task is not None, "it answers"
            return current.task

    def _applied(self, current: SyncRound) -> None:
        """Ends the sync round: moves the watermark of every trainer in it and begins the next one.

        The caller holds the job's lock.
        """
        current.phase, self.record = RoundPhase.APPLIED, current.record
        self.version += 1 if current.counted else 0
        self._steps.applied(current.began)
        self._rounds.add(current)
        self._round = self._updates.new_round()
        self._waits.moved.notify()
        self._staged.placed.notify()

    def replay(self, steps: DecidedSteps) -> None:
        """Applies decided steps of a recorded log, in this thread."""
        self.version += 1 if self._updates.replay(steps, self._batches) else 0
        self.record = steps.record
        self.hparams = next(iter(steps.contributions.values())).hparams

    @property
    def undecided(self) -> int:
        """The number of steps that have arrived and have no record."""
        with self._job.lock:
            return len(self.staged)

    @property
    def queued(self) -> int:
        """The number of steps that have arrived and are not applied."""
        with self._job.lock:
            return len(self._round.contributions) + len(self._staged) + self._tasks.running

    @property
    def updates_started(self) -> int:
        """Updates applied so far, and those under way."""
        with self._job.lock:
            return self.version + self._tasks.running

    # ---- reading slices ----

    def read(self, member: Member, name: str, in_place: bool = False) -> torch.Tensor:
        """A slice of this lane between two updates: the memory itself in sync mode, and for a
        reader that notices when it changes (``in_place``); otherwise a copy.
        """
        if self.lane.kind.waits_for_all:
            return self.updates[name].value
        return self._one_by_one.read(member.trainer, name, in_place)

    def discard_snapshots(self) -> None:
        """Drops all copies, because slices have been loaded."""
        self._one_by_one.discard_snapshots()
        self.buffers.discard()
