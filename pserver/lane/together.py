"""The steps of a lane whose trainers step together: each round of all trainers is one update.

A round is merged and applied once: one thread leads it, and moves its phase under the job's lock
(``rounds.py`` draws the phases).  After that no slice changes until every trainer has committed
again, so replies are sent straight from the slices' memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from pserver.errors import FingerprintMismatch, PServerError, TrainerLost
from pserver.job_log.records import ProcessStep
from pserver.lane.rounds import Clipping, RoundPhase, SyncRound
from pserver.lane.step import LaneUpdate, Step, StepState
from pserver.lane.tasks import Batch, UpdateBatches, UpdateTask
from pserver.lane.updates import LaneState, Take, UpdateTasks
from pserver.membership.decisions import process_of
from pserver.membership.members import Member
from pserver.membership.watermark import Watermark
from pserver.telemetry.trace import now


class AppliedRounds:
    """The applied rounds of one lane: what they leave behind, and the answer to a trainer that asks
    again.  The caller holds the job's lock.

    [Note: norms again]  Where norms clip, each trainer gets every server's part of them, and tells
    all servers the coefficient.  A server that has it from one trainer applies the round, while
    another one may have lost its connection before it heard the norms.  So the last round's are
    sent again: a coefficient of some servers' norms alone would be another one, and the rest of the
    servers might hear it first.

    Args:
        state: of the lane.
    """

    def __init__(self, state: LaneState) -> None:
        self._state = state
        self._clipped: Clipping | None = None

    def add(self, current: SyncRound) -> None:
        """Moves the watermark of every trainer in an applied round."""
        overflow, refuses = current.overflow, current.refuses()
        nonfinite, outliers = current.nonfinite, current.outliers
        for trainer, step in current.steps.items():
            member = self._state.members.by_trainer[trainer]
            refused = trainer in refuses
            self._state.measured.pushed(refused=refused or overflow)
            member.watermark(self._state.index).apply(
                current.committed, overflow, refused, nonfinite, outliers
            )
            step.state = StepState.APPLIED
            self._state.leases.decided(trainer, member.incarnation, step.leases)
        done = SyncRound(decided=current.decided)
        self._clipped = Clipping(done, current.norms, scaled=True) if current.norms else None

    def again(self, member: Member, number: int) -> UpdateTask | Clipping:
        """The answer to a repeated step, which has been applied."""
        clipped, this = self._clipped, ProcessStep(process_of(member), number)
        return clipped if clipped is not None and this in clipped.round.decided else UpdateTask()


class JointSteps:
    """The steps of one lane in the modes "sync" and "diloco".  Any thread may call it; the caller
    holds the job's lock unless said otherwise.

    Args:
        state: of the lane.
        tasks: its updates that have begun.

    Attributes:
        moved: notifies that a round's record stands, or it is merged, or updated.
        placed: notifies that another round has begun.
    """

    def __init__(self, state: LaneState, tasks: UpdateTasks) -> None:
        self._state, self._tasks, self._job = state, tasks, state.job
        self._clips = any(update.scaled is not None for update in state.updates.values())
        self._round = self._new_round()
        self._update: LaneUpdate | None = None  # of the round, where norms are measured first
        self._rounds = AppliedRounds(state)
        self.moved, self.placed = state.job.waits.event(), state.job.waits.event()

    def _new_round(self) -> SyncRound:
        return SyncRound(self._state.lane.kind.outer_optimizer, self._state.lane.averages)

    # ---- arriving ----

    def wait_for_place(self, member: Member, watermark: Watermark, again: bool) -> None:
        """Waits until a step may be staged: the step of a trainer that has just joined may arrive
        before the others' round is applied.

        Args:
            watermark: of the trainer, in this lane.
            again: it is staged already.

        Raises:
            TrainerLost: the trainer was lost, and its step has arrived after the record of that:
                nothing of it stays, so that another process may take its number.
            PServerError: what ended the job meanwhile.
        """

        def check() -> None:
            if member.fenced:
                raise TrainerLost(member.fenced)
            self._job.check_running()

        try:
            self._job.waits.wait(self.placed, lambda: again or not self._round.time, check=check)
            if member.fenced and not again:
                raise TrainerLost(member.fenced)
        except PServerError:
            watermark.taking = watermark.applied
            raise

    def stage(self, member: Member, step: Step) -> Take:
        """Adds a step to the round, before its record can arrive.

        Returns:
            Takes it: see :data:`Take`.

        Raises:
            FingerprintMismatch: trainers disagree on a hyper-parameter; the job has failed.
        """
        current = self._round
        try:
            current.add(step)
        except FingerprintMismatch as error:
            self._job.fail(error)
            raise
        # no other step waits for it from here on, and not before this one is in the round
        if step.last:
            member.leaving.add(self._state.index)
            self._job.wake_all()
        current.began = current.began or now()
        self._state.measured.arrived(member.trainer, now() - current.began)
        return partial(self._take, member, step.number, current)

    def join(self, member: Member, number: int) -> Take:
        """As :meth:`stage`, for a step that another thread has, from an earlier stream."""
        return partial(self._take, member, number, self._round)

    def decide(
        self, names: Sequence[ProcessStep], time: float, record: int, leads: bool
    ) -> dict[int, Step]:
        """Takes the record of the round: these steps are in it.

        Args:
            leads: the caller's thread brings a step of the lane, and leads the round.

        Returns:
            The steps, by trainer.
        """
        found = self._round.decide(names, time, record)
        if not leads:
            self.moved.notify(1)  # it leads
        return found

    def drop(self, member: Member) -> bool:
        """Drops the staged step of a lost trainer.

        Returns:
            Whether it had staged one.
        """
        return self._round.drop(member.trainer)

    @property
    def undecided(self) -> Mapping[int, Step]:
        """By trainer, the step that has no record."""
        return {} if self._round.time else self._round.steps

    @property
    def arrived(self) -> int:
        """The number of steps that have arrived and are not applied."""
        return len(self._round.steps)

    @property
    def unapplied(self) -> Mapping[int, Step]:
        """By trainer, the step that has its record and is not applied."""
        return self._round.steps if self._round.time else {}

    def has_applied(self, record: int) -> bool:
        """Whether nothing of an earlier record is left to be applied."""
        return not self._round.time or self._round.record > record

    # ---- applying ----

    def answered(self, member: Member, number: int) -> UpdateTask | Clipping:
        """The answer to a step that comes again, and has been applied."""
        return self._rounds.again(member, number)

    def takes_at_once(self, step: Step) -> bool:
        """See :meth:`IndependentSteps.takes_at_once`: tensors are merged without the lock."""
        return False

    def _take(self, member: Member, number: int, current: SyncRound) -> UpdateTask | Clipping:
        """Waits until a step's round has its record, and applies the round once.  Not under the
        job's lock.
        """
        with self._job.lock:
            self._wait_for_record(member, number, current)
            if member.trainer not in current.steps:
                if current.goes_on:
                    self.moved.notify(1)  # another one leads
                raise TrainerLost(member.fenced)
            self._wait_for_leader(current, lambda: current.goes_on)
            current.led = True
            clips = self._clips and bool(current.counted)
            merges = clips and current.phase is RoundPhase.COLLECTING
            current.phase = RoundPhase.MERGING if merges else current.phase
        if not clips:
            return self._apply(current, RoundPhase.COLLECTING, {})
        if merges:
            self._update = self._prepare(current)
            norms = partial(current.measure, self._state.updates, self._state.tables)
            measure = self._state.measured.traced("merge", lambda _: norms(), self._version)
            self._job.or_fail(partial(measure, ()))
            with self._job.lock:
                current.phase = RoundPhase.MERGED
                self.moved.notify()
        if current.norms:
            return Clipping(current, current.norms)
        return self._apply(current, RoundPhase.MERGED, {})

    def scale(self, clipping: Clipping, coefficients: Mapping[str, float]) -> UpdateTask:
        """Applies the merged step, once, with the clipping coefficients of the trainer that calls
        first (all trainers compute the same).  Not under the job's lock.
        """
        if clipping.scaled:
            return UpdateTask()
        return self._apply(clipping.round, RoundPhase.MERGED, coefficients)

    @property
    def _version(self) -> int:
        """The lane's, with the round."""
        return self._state.version + 1

    def _prepare(self, current: SyncRound) -> LaneUpdate:
        """The round's update, before anything of it is merged."""
        decided = current.record, current.time, current.decided
        update = LaneUpdate(self._state.index, *decided, current.steps)
        return self._job.or_fail(lambda: self._state.prepare(update))

    def _apply(
        self, current: SyncRound, ready: RoundPhase, coefficients: Mapping[str, float]
    ) -> UpdateTask:
        """Begins the update of a round that is in the phase ``ready``, unless it has begun."""
        merge = self._state.measured.traced("merge", current.merge, self._version)
        with self._job.lock:
            first = current.phase is ready
            current.phase = RoundPhase.APPLYING if first else current.phase
        if first:
            self._job.or_fail(lambda: current.agree(self._state.variables, self._state.tables))
            update = self._update or self._prepare(current)
            update.coefficients, self._update = coefficients, None

            def apply(batch: Batch) -> None:
                if ready is RoundPhase.COLLECTING:
                    merge(batch)
                self.update(current, update, batch)

            with self._job.lock:
                current.task = self._tasks.begin(
                    update,
                    apply,
                    lambda: self._applied(current),
                    (*current.assignments, *update.buffers),
                )
                if current.task.early:
                    self.moved.notify()
                return current.task
        with self._job.lock:
            self._wait_for_leader(current, lambda: current.answers)
            assert current.task is not None, "it answers"
            return current.task

    def update(self, current: SyncRound, update: LaneUpdate, batch: Batch) -> None:
        """Applies a round, whose gradients are merged, to these slices and tables.  Not under the
        lock.
        """
        state = self._state
        with state.writing(batch):
            for name in current.assignments.keys() & batch:
                with state.locks[name]:
                    current.assignments[name].write(state.variables[name])
            for name in update.buffers.keys() & batch:
                state.buffers.assign(name, update.buffers[name])
            current.apply(batch, state.updates, update.coefficients)
        current.apply_rows(batch, state.tables, update.coefficients)

    def _applied(self, current: SyncRound) -> None:
        """Ends the round: moves the watermark of every trainer in it and begins the next one."""
        current.phase = RoundPhase.APPLIED
        self._state.ended(current.record, bool(current.counted), current.began)
        self._rounds.add(current)
        self._round = self._new_round()
        self.moved.notify()
        self.placed.notify()

    def replay(self, update: LaneUpdate, batches: UpdateBatches) -> bool:
        """Applies the steps of a round of a recorded log in this thread.

        Returns:
            Whether they count: False where they were skipped.

        Raises:
            PServerError: they do not fit what the server holds.
        """
        current = self._new_round()
        current.steps = dict(update.steps)
        current.decide(update.decided, update.time, update.record)
        current.agree(self._state.variables, self._state.tables)
        counts = bool(current.counted)
        for batch in batches.with_held((*current.assignments, *update.buffers)):
            current.merge(batch)
            self.update(current, update, batch)
        return counts

    # ---- waiting ----

    def wait_for_slowest(self, member: Member, number: int) -> None:
        """Returns at once: no trainer is ahead."""

    def _wait_for_record(self, member: Member, number: int, current: SyncRound) -> None:
        """Waits until a round's record stands, or the trainer is lost; a long wait is logged with
        the awaited trainers.
        """

        def missing() -> list[int]:
            needed = self._state.members.awaited_together(self._state.index)
            return [trainer for trainer in needed if trainer not in current.steps]

        self._state.wait_for_trainers(
            member, number, lambda: bool(current.time or member.fenced), missing, self.moved
        )

    def wait_until_applied(
        self, member: Member, number: int, deadline: float, check: Callable[[], None]
    ) -> bool:
        """Waits until a trainer's step, which may not have arrived yet, is applied; whether it is.

        Args:
            deadline: the longest, by :func:`time.monotonic`.
            check: raises what ends the wait.
        """
        watermark = member.watermark(self._state.index)
        return self._job.waits.wait(
            self.placed, lambda: watermark.applied >= number, deadline=deadline, check=check
        )

    def _wait_for_leader(self, current: SyncRound, done: Callable[[], bool]) -> None:
        """Waits for the thread that leads a round.

        Raises:
            PServerError: what ended the job before the round's update began.
        """

        def check() -> None:
            if current.task is None:  # otherwise it ends, or has failed
                self._job.check_running()

        self._job.waits.wait(self.moved, done, check=check)

    # ---- reading ----

    def read(self, member: Member, name: str, in_place: bool = False) -> torch.Tensor:
        """A slice between two updates: the memory itself."""
        return self._state.updates[name].value

    def discard_snapshots(self) -> None:
        """There are none."""
