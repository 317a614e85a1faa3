"""The steps of a lane whose trainers step independently: each step is an update of its own, and
waits for its record, and for its turn.

[Note: turns]  Two servers that apply the same records hold the same bits.  So the updates of a lane
begin in the order of the log, and none begins a batch before the one before it is done; a thread
that waits for an earlier update helps with it (tasks.py).  A staged step always has a thread
that waits here, so every turn is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import torch

from pserver.errors import TrainerLost
from pserver.job_log.records import ProcessStep
from pserver.lane.step import LaneUpdate, Step, StepState
from pserver.lane.tasks import Batch, UpdateBatches, UpdateTask
from pserver.lane.updates import LaneState, Take, UpdateTasks
from pserver.lane.values import AsyncSlices
from pserver.membership.decisions import process_of
from pserver.membership.members import Member
from pserver.membership.watermark import Watermark
from pserver.telemetry.trace import now


class IndependentSteps:
    """The steps of one lane, in every mode but "sync" and "diloco".  Any thread may call it; the
    caller holds the job's lock unless said otherwise.

    Args:
        state: of the lane.
        tasks: its updates that have begun.
    """

    def __init__(self, state: LaneState, tasks: UpdateTasks) -> None:
        self._state, self._tasks, self._job = state, tasks, state.job
        self._slices = AsyncSlices(
            state.updates, state.variables, state.locks, state.writing, bool(state.lane.dc_asgd)
        )
        self._staged: dict[int, Step] = {}  # by trainer
        self._decided: dict[int, Step] = {}  # by trainer: not applied
        self._turns: dict[int, Step] = {}  # decided, and not begun
        self._turn = self._begun = 0  # updates that are decided, and that have begun
        self._last = UpdateTask()
        self._nearer = state.job.waits.event()  # the slowest trainer has taken a step

    # ---- arriving ----

    def wait_for_place(self, member: Member, watermark: Watermark, again: bool) -> None:
        """Returns at once: a step waits for no other one before it is staged."""

    def stage(self, member: Member, step: Step) -> Take:
        """Stages a step, before its record can arrive.

        Returns:
            Takes it: see :data:`Take`.
        """
        step.state, step.event = StepState.STAGED, self._job.waits.event()
        self._staged[member.trainer] = step
        return partial(self._take, member, step)

    def join(self, member: Member, number: int) -> Take:
        """As :meth:`stage`, for a step that another thread has, from an earlier stream."""
        return partial(self._wait_until_applied, member, number)

    def decide(
        self, names: Iterable[ProcessStep], time: float, record: int, leads: bool
    ) -> dict[int, Step]:
        """Takes the record of these steps.

        Args:
            leads: nothing here: the thread of each step takes it.

        Returns:
            The steps, by trainer.
        """
        found = {}
        for name in names:
            step = self._staged.pop(name.process.trainer)
            step.state, step.time, step.record = StepState.DECIDED, time, record
            step.turn = self._turn
            self._turns[self._turn] = step
            self._turn += 1
            self._decided[name.process.trainer] = found[name.process.trainer] = step
        self._tell_next()
        return found

    def drop(self, member: Member) -> bool:
        """Drops the staged step of a lost trainer.

        Returns:
            Whether it had staged one.
        """
        step = self._staged.get(member.trainer)
        if step is None or step.process != process_of(member):
            return False
        del self._staged[member.trainer]
        step.state = StepState.DROPPED
        return True

    @property
    def undecided(self) -> Mapping[int, Step]:
        """By trainer, the step that has no record."""
        return self._staged

    @property
    def arrived(self) -> int:
        """The number of steps that have arrived and whose update has not begun."""
        return len(self._staged) + len(self._turns)

    @property
    def unapplied(self) -> Mapping[int, Step]:
        """By trainer, the step that has its record and is not applied."""
        return self._decided

    def has_applied(self, record: int) -> bool:
        """Whether each step is applied whose record stands before this one."""
        return all(each.record > record for each in self._decided.values())

    # ---- applying ----

    def answered(self, member: Member, number: int) -> UpdateTask:
        """The answer to a step that comes again, and has been applied."""
        return UpdateTask()

    def takes_at_once(self, step: Step) -> bool:
        """Whether a step is taken under the job's lock: no values are copied for it, so no other
        turn waits for it.
        """
        reads = step.buffers or step.row_gradients or self._slices.compensates
        return not reads and self._state.recording.recorder is None

    def _take(self, member: Member, step: Step) -> UpdateTask:
        """Applies a step as an update of its own, when its turn comes.  The caller may do without
        the job's lock.
        """
        began = now()
        with self._job.lock:
            self._wait_for_turn(member, step)
        # not under the lock, and no other step's turn
        update = self._job.or_fail(lambda: self._prepare(step))
        with self._job.lock:
            # under the lock: workers take updates in their order
            self._last = task = self._tasks.begin(
                update,
                partial(self.update, update),
                lambda: self._applied(member, step, began),
                step.assigned,
                self._last,
            )
            self._begin()
            return task

    def _prepare(self, step: Step) -> LaneUpdate:
        name = ProcessStep(step.process, step.number)
        update = LaneUpdate(
            self._state.index, step.record, step.time, (name,), {step.process.trainer: step}
        )
        if not step.skipped:
            step.before = self._slices.last_read(step.trainer, step.gradients)
            for table, gradient in step.row_gradients.items():
                before = self._state.tables[table].read_before(gradient, step.trainer)
                if before is not None:
                    step.rows_before[table] = before
        return self._state.prepare(update)

    def update(self, update: LaneUpdate, batch: Batch) -> None:
        """Applies a step to these slices and tables.  Not under the lock."""
        state, step = self._state, update.own
        others = update.buffers.keys() | state.tables.keys()
        self._slices.update([name for name in batch if name not in others], step)
        for name in batch:
            if name in update.buffers:
                state.buffers.assign(name, update.buffers[name])
            elif (rows := step.row_gradients.pop(name, None)) is not None and not step.skipped:
                before = step.rows_before.pop(name, None)
                table = state.tables[name]
                table.update(rows, step.hparams, {}, update.time, before, step.process)

    def _applied(self, member: Member, step: Step, began: float) -> None:
        """Ends a step, which has been applied."""
        watermark = member.watermark(self._state.index)
        if watermark.version:
            self._state.measured.stale(self._state.version - watermark.version)
        self._state.measured.pushed(refused=step.skipped)
        self._state.ended(step.record, not step.skipped, began)
        watermark.apply(1, step.overflow, bool(step.refused), step.nonfinite, step.outliers)
        watermark.version, step.state = self._state.version, StepState.APPLIED
        del self._decided[member.trainer]
        assert step.event is not None, "it was staged"
        step.event.notify()
        if self._nearer.standing and self.slowest() >= step.number:
            self._nearer.notify()
        self._state.leases.decided(member.trainer, member.incarnation, step.leases)

    def replay(self, update: LaneUpdate, batches: UpdateBatches) -> bool:
        """Applies a step of a recorded log in this thread.

        Returns:
            Whether it counts: False where it was skipped.

        Raises:
            PServerError: it does not fit what the server holds.
        """
        for batch in batches.with_held(update.own.assigned):
            self.update(update, batch)
        return not update.own.skipped

    # ---- turns ----

    def _begin(self) -> None:
        """Notes that the update whose turn it is has begun."""
        del self._turns[self._begun]
        self._begun += 1
        self._tell_next()

    def _tell_next(self) -> None:
        if (following := self._turns.get(self._begun)) is not None and following.event is not None:
            following.event.notify()

    def _wait_for_turn(self, member: Member, step: Step) -> None:
        """Waits until a step has its record, and the lane's earlier updates have begun."""

        def check() -> None:
            # one that has its record is applied, whatever happens to its trainer
            if step.state is StepState.DROPPED:
                raise TrainerLost(member.fenced)
            self._job.check_running()

        assert step.event is not None, "it was staged"
        self._job.waits.wait(step.event, lambda: step.turn == self._begun, check=check)

    def _wait_until_applied(self, member: Member, number: int) -> UpdateTask:
        """Waits for a step that runs in another thread."""
        watermark = member.watermark(self._state.index)

        def check() -> None:
            if member.fenced:
                raise TrainerLost(member.fenced)
            self._job.check_running()

        with self._job.lock:
            step = self._staged.get(member.trainer) or self._decided.get(member.trainer)
            event = None if step is None else step.event
            self._job.waits.wait(
                event or self._job.changed, lambda: watermark.applied >= number, check=check
            )
        return UpdateTask()

    # ---- the slowest trainer ----

    def slowest(self) -> int:
        """The least applied step among the trainers that bound the others; one that has not joined
        yet has taken none.
        """
        members, index = self._state.members, self._state.index
        return min((members.step(trainer, index) for trainer in self._bounding()), default=2**63)

    def _bounding(self) -> set[int]:
        """The trainers that no other may be too far ahead of: those that have not left; also one
        that is admitted, and has not arrived yet; and one that is lost, until its last step is
        applied, where that is decided: it counts.
        """
        members = self._state.members
        return {*members.awaited(self._state.index), *members.arriving, *self._decided}

    def wait_for_slowest(self, member: Member, number: int) -> None:
        """Waits, where staleness is bounded, until no trainer is further behind; a long wait is
        logged with the awaited trainers.

        Raises:
            PServerError: what ended the job meanwhile.
        """
        staleness = self._state.lane.staleness
        if staleness is None:
            return
        least, members, index = number - staleness, self._state.members, self._state.index

        def missing() -> list[int]:
            return sorted(t for t in self._bounding() if members.step(t, index) < least)

        self._state.wait_for_trainers(
            member, number, lambda: self.slowest() >= least, missing, self._nearer
        )

    # ---- reading ----

    def read(self, member: Member, name: str, in_place: bool = False) -> torch.Tensor:
        """A copy of a slice between two updates; the memory itself for a reader that notices when
        it changes (``in_place``).
        """
        return self._slices.read(member.trainer, name, in_place)

    def discard_snapshots(self) -> None:
        """Drops all copies, because slices have been loaded."""
        self._slices.discard_snapshots()
