"""The steps of one lane of a running job.  In the modes "sync" and "diloco" all trainers' steps are
one update; in the other modes each trainer's step is an update of its own, as it arrives.

[Note: who updates]  A step is applied when its record stands: see [Note: the job's log] in
pserver/job_log/coordinator.py.  A sync step is merged and applied once (``together.py``).  In async
mode an update holds its slice's lock, so that updates of one slice never race, and readers get a
copy (``values.py``), or notice that a value has changed while they read it where it is
(:mod:`pserver.transport.zones`).

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
into the steps before the update begins (:meth:`LaneState.prepare`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from pserver.dense.update import SliceUpdate
from pserver.errors import Refused, TrainerLost, Unprepared
from pserver.job_log.records import Decided, ProcessStep, Staged
from pserver.lane.independent import IndependentSteps
from pserver.lane.judge import NONFINITE, NonFiniteSteps, OutlierPushes
from pserver.lane.rounds import Clipping
from pserver.lane.step import Hparams, LaneUpdate, Step
from pserver.lane.tasks import UpdateBatches, UpdateTask, Workers
from pserver.lane.together import JointSteps
from pserver.lane.updates import LaneState, Take, UpdateTasks
from pserver.membership.decisions import Decisions, Quiesce
from pserver.membership.members import Member, Membership
from pserver.membership.watermark import Outcome, Watermark
from pserver.telemetry.metrics import JobSteps
from transpiler.plan.plan import Lane

if TYPE_CHECKING:
    from pserver.lane.tables import LockedTable


# ---- partial steps ----
#
# Steps of a lost trainer of which some lanes have their part, and others don't.
#
# In a job of several lanes each lane's step is a record of its own, as lanes never hold up one
# another.  The samples count with the step of the first lane.  A lost trainer's steps that were
# decided in some lanes but not in others are counted and reported here; averaged_steps.py does the
# same for averages among trainers, which are no lane.


def count_decided(members: Membership, lane: int, decided: Mapping[int, Step]) -> None:
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

    def check(self, step: Step) -> None:
        """Returns if a step may be taken.

        Raises:
            Unprepared: it writes a slice that is not here.
            Refused: hyper-parameters or norms are missing, or its external writes have another form
                than the lane takes.
        """
        who = f"step {step.number} of trainer {step.trainer}"
        missing = self._groups - step.hparams.keys()
        if missing:
            raise Refused(f"{who} has no hyper-parameters for group {min(missing)}")
        self._check_written(who, step)
        self._check_norms(who, step)

    def _check_norms(self, who: str, step: Step) -> None:
        """Checks that a step has all of its norms, where its lane refuses steps, or stops, by them:
        with "apply" they may be missing.
        """
        if self._lane.outlier_push in ("off", "apply") or step.overflow:
            return
        brought = {self._updates[name].parameter for name in step.gradients}
        brought.update(n for n, rows in step.row_gradients.items() if len(rows.ids))
        if missing := brought - step.norms.keys():
            raise Refused(
                f"{who}: expected the norm of what it brings of {min(missing)!r}, as outlier_push "
                f"is {self._lane.outlier_push!r}, got none"
            )

    def _check_written(self, who: str, step: Step) -> None:
        """Checks the form of a step's external writes: with checksums in a lane whose trainers wait
        for one another, without them otherwise.
        """
        unknown = step.written.keys() - self._known
        if unknown:
            raise Unprepared(
                f"{who}: {min(unknown)!r} cannot be written in this lane of this server"
            )
        waits = self._lane.kind.waits_for_all
        if step.written and not waits:
            raise Refused(
                f"{who}: expected no checksums in a lane without joint steps, got one of "
                f"{min(step.written)!r}"
            )
        if not waits or not step.assignments:
            return
        assigned = step.assignments.keys() & self._updates.keys()
        if unsaid := assigned - step.written.keys():
            raise Refused(f"{who} assigns {min(unsaid)!r} without its checksum")


# ---- lane executor ----


class LaneExecutor:
    """Takes the committed steps of one lane and applies each of them once.

    Any thread may call it.  The job's lock guards the steps and the watermarks; tensors are merged
    and updated outside that lock.  See [Note: who updates].

    Args:
        state: of the lane.
        decisions: of the job's log.
        quiesce: keeps steps from changing values during a save or a load.
        workers: the threads that update large steps.
        measured: the job's measurements.

    Attributes:
        index, lane, updates, variables, tables, buffers: see :class:`LaneState`.
        nonfinite: what becomes of steps with a NaN or an infinity.
        outliers: the same of steps with a norm far beyond its history.
    """

    def __init__(
        self,
        state: LaneState,
        decisions: Decisions,
        quiesce: Quiesce,
        workers: Workers,
        measured: JobSteps,
    ) -> None:
        self._state, self._job, self._decisions = state, state.job, decisions
        self.index, self.lane, self.buffers = state.index, state.lane, state.buffers
        self.updates, self.variables, self.tables = state.updates, state.variables, state.tables
        self._batches = UpdateBatches(state.updates, state.tables, workers.threads)
        self._tasks = UpdateTasks(state, self._batches, quiesce, workers)
        policy = JointSteps if state.lane.kind.waits_for_all else IndependentSteps
        self._steps: JointSteps | IndependentSteps = policy(state, self._tasks)
        self.nonfinite = NonFiniteSteps(state.lane, state.job, measured.trainers.count)
        self.outliers = OutlierPushes(state.lane, state.job, measured.trainers.count)
        self._checks = StepChecks(state.lane, state.updates, state.variables, state.tables)
        self._staging = False  # the thread that has the job's lock brings a step of the lane

    # ---- progress ----

    @property
    def version(self) -> int:
        """Updates applied so far, counted in steps."""
        return self._state.version

    @version.setter
    def version(self, version: int) -> None:
        self._state.version = version

    @property
    def record(self) -> int:
        """The number of the last record that is applied."""
        return self._state.record

    @record.setter
    def record(self, record: int) -> None:
        self._state.record = record

    @property
    def hparams(self) -> Hparams:
        """Of the last step, by group."""
        return self._state.hparams

    @hparams.setter
    def hparams(self, hparams: Hparams) -> None:
        self._state.hparams = hparams

    # ---- steps ----

    def commit(self, member: Member, step: Step) -> UpdateTask | Clipping:
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
        watermark, number = member.watermark(self.index), step.number
        with self._job.lock:
            self._job.check_running()
            if member.fenced:
                raise TrainerLost(member.fenced)
            if number <= watermark.applied:
                self._state.measured.repeated()
                return self._steps.answered(member, number)
            if number != (due := watermark.applied + 1):
                raise Refused(f"trainer {member.trainer}: expected step {due}, got step {number}")
            self._checks.check(step)
            self.buffers.check(number, member.trainer, step.buffers)
            self._state.leases.check(member.trainer, member.incarnation, step.leases)
            again = watermark.begin(number, step.rows)
            self._state.hparams = step.hparams
            self._steps.wait_for_place(member, watermark, again)
            if again:
                self._state.measured.repeated()
                take = self._steps.join(member, number)
            else:
                self.nonfinite.judge(step)
                self.outliers.judge(step, watermark.histories)
                take = self._stage(member, step)
                if self._steps.takes_at_once(step):
                    return take()
        return take()

    def _stage(self, member: Member, step: Step) -> Take:
        take, self._staging = self._steps.stage(member, step), True
        try:
            self._decisions.staged(self._notice(step))
        finally:
            self._staging = False
        return take

    def _notice(self, step: Step) -> Staged:
        name = ProcessStep(step.process, step.number)
        return Staged(self.index, name, step.rows, step.leases, step.refused)

    def scale(self, clipping: Clipping, coefficients: Mapping[str, float]) -> UpdateTask:
        """Applies the merged step of a sync lane, once, with the clipping coefficients of the
        trainer that calls first (all trainers compute the same).

        Returns:
            Its update, for :meth:`updated_slices` and :meth:`outcome`.

        Raises:
            PServerError: the job failed meanwhile.
        """
        with self._job.lock:
            self._job.check_running()
        assert isinstance(self._steps, JointSteps), "its steps are merged"
        return self._steps.scale(clipping, coefficients)

    # ---- the job's log: see membership/decisions.py; the caller holds the job's lock ----

    def decided(self, what: Decided, time: float, record: int) -> None:
        """Takes the record of these steps: the threads that brought them may apply them now."""
        steps = self._steps.decide(what.steps, time, record, self._staging)
        for trainer, why in what.refused:  # see [Note: refused by all] in coordinator.py
            (self.nonfinite if why == NONFINITE else self.outliers).refuse(steps[trainer])
        count_decided(self._state.members, self.index, steps)

    @property
    def staged(self) -> Sequence[Staged]:
        """The steps that have no record."""
        return [self._notice(step) for step in self._steps.undecided.values()]

    @property
    def unapplied(self) -> Mapping[int, Step]:
        """By trainer, the step that is decided and not applied."""
        return self._steps.unapplied

    def has_applied(self, record: int) -> bool:
        """Whether each decided step is applied whose record stands before this one."""
        return self._steps.has_applied(record)

    def drop(self, member: Member) -> None:
        """Drops the staged step of a lost trainer."""
        if self._steps.drop(member):
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
            if not task.finished:
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
        task.wait_for()
        with self._job.lock:
            self._steps.wait_for_slowest(member, step)
            watermark = member.watermark(self.index)
            return watermark.outcome(watermark.version or self.version)

    def wait_until_applied(
        self, member: Member, number: int, deadline: float, check: Callable[[], None]
    ) -> bool:
        """Waits until a step of a trainer is applied, in a lane in which all step together.  The
        step may not have arrived yet.

        Args:
            deadline: the longest, by :func:`time.monotonic`.
            check: raises what else ends the wait; called under the job's lock.

        Returns:
            Whether it is applied.

        Raises:
            Refused: the trainers of this lane do not step together.
            PServerError: what ended the job meanwhile.
        """
        if not isinstance(self._steps, JointSteps):
            raise Refused(f"lane {self.index}: its trainers do not step together")

        def ends() -> None:
            self._job.check_running()
            check()

        with self._job.lock:
            return self._steps.wait_until_applied(member, number, deadline, ends)

    def replay(self, update: LaneUpdate) -> None:
        """Applies the steps of a recorded log, in this thread."""
        self.version += self._steps.replay(update, self._batches)
        self.record = update.record
        self.hparams = next(iter(update.steps.values())).hparams

    @property
    def undecided(self) -> int:
        """The number of steps that have arrived and have no record."""
        with self._job.lock:
            return len(self._steps.undecided)

    @property
    def queued(self) -> int:
        """The number of steps that have arrived and are not applied."""
        with self._job.lock:
            return self._steps.arrived + self._tasks.running

    @property
    def updates_started(self) -> int:
        """Updates applied so far, and those under way."""
        with self._job.lock:
            return self.version + self._tasks.running

    # ---- reading slices ----

    def read(self, member: Member, name: str, in_place: bool = False) -> torch.Tensor:
        """A slice of this lane between two updates: the memory itself where trainers step together,
        and for a reader that notices when it changes (``in_place``); otherwise a copy.
        """
        return self._steps.read(member, name, in_place)

    def discard_snapshots(self) -> None:
        """Drops all copies, because slices have been loaded."""
        self._steps.discard_snapshots()
        self.buffers.discard()
