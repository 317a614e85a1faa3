"""The steps of one lane of a running job: slices updated together (sync, diloco) or as each
trainer's step arrives (the others).

[Note: who updates]  A sync step is merged and applied once: the first thread that finds the round
ready moves its phase under the job's lock (``sync_round.py`` draws the phases).  After that nothing
changes a slice until every trainer has committed again, so replies are sent straight from the
table's memory.  In async mode each slice has a lock that an update holds, so that updates of a
slice never race, and readers get a copy (``snapshot.py``).

[Note: answers begin early]  Nothing is applied before a step is complete: what a lost trainer had
sent leaves no trace.  But once it is complete nothing can stop its update, so a slice may leave as
soon as it has its new value.  With several threads workers update large steps, and those that
answer trainers send what is updated.  With one thread, and for small steps, the thread that found
the step complete updates all of it before anything is sent: to take turns was measured to cost more
than it saved.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from pserver.dense.slice_update import SliceUpdate, batches
from pserver.errors import FingerprintMismatch, JobFailed, Refused
from pserver.job.blocking_waits import Standing, wait
from pserver.job.membership import Member, Membership, Wait
from pserver.job.quiesce import WAKE_SECONDS, Quiesce
from pserver.job.snapshot import Snapshot
from pserver.job.sync_round import Contribution, Phase, SyncRound
from pserver.job.update_task import Batch, UpdateTask
from pserver.job.workers import Workers
from transpiler.plan.plan import Lane

if TYPE_CHECKING:
    from pserver.job.locked_table import LockedTable

LARGE_BYTES = 2**20  # of a lane's slices.  See [Note: answers begin early]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a committed step came to: updates so far, trainers in this one, and whether an overflow
    skipped it.
    """

    version: int
    committed: int
    overflow: bool = False


@dataclass(frozen=True, slots=True)
class Clipping:
    """A merged step that waits for its coefficient: this server's part of the squared norms, by
    parameter name.
    """

    round: SyncRound
    norms: Mapping[str, float]


class LaneExecutor:
    """See the module's docstring.

    Args:
        index, lane: which lane of the plan.
        entries: its slices, by name.
        locks: one for each slice of the server; see [Note: who updates].
        gate: that every step passes.
        workers: who update large steps.
        tables: of the lane, by name.

    Attributes:
        version: updates applied so far, counted in steps.
    """

    def __init__(
        self,
        index: int,
        lane: Lane,
        entries: Mapping[str, SliceUpdate],
        locks: Mapping[str, threading.Lock],
        members: Membership,
        job: Standing,
        gate: Quiesce,
        workers: Workers,
        tables: Mapping[str, LockedTable],
    ) -> None:
        self.index = index
        self.lane = lane
        self.entries = entries
        self.tables = tables
        self.version = 0
        self._locks = locks
        self._members = members
        self._job = job
        self._gate = gate
        self._workers = workers
        self._batches = (
            batches(entries) if lane.kind.waits_for_all else [(name,) for name in entries]
        )
        self._batches += [(name,) for name in tables]
        self._sizes = [self._size(batch) for batch in self._batches]
        self._measures = any(entry.scaled is not None for entry in entries.values())
        self._round = SyncRound()
        self._snapshots = {name: Snapshot(entry.value) for name, entry in entries.items()}
        # (trainer, slice) -> as last handed out; for compensation
        self._handed: dict[tuple[int, str], torch.Tensor] = {}

    def commit(
        self, member: Member, step: int, contribution: Contribution
    ) -> UpdateTask | Clipping:
        """Takes a trainer's step, and in sync mode waits for the others'.  A step is applied once,
        however often it comes.

        Returns:
            Its update, for :meth:`updated` and :meth:`outcome`; or, where norms clip, what
            :meth:`scale` is to be called with.

        Raises:
            Refused: a step out of order.
            FingerprintMismatch: sync trainers disagree on a hyper-parameter.
            PServerError: the job failed meanwhile.
        """
        mark = member.mark(self.index)
        with self._job.changed:
            self._job.check_standing()
            if step <= mark.applied:
                return UpdateTask()
            if step != mark.applied + 1:
                raise Refused(
                    f"trainer {member.trainer}: expected step {mark.applied + 1}, got step {step}"
                )
            groups = {entry.group for entry in self.entries.values()}.union(
                *(held.groups for held in self.tables.values())
            )
            missing = groups - set(contribution.rows)
            if missing:
                raise Refused(
                    f"step {step} of trainer {member.trainer} has no hyper-parameters for group "
                    f"{min(missing)}"
                )
            again, mark.taking = mark.taking == step, step
            current = self._round
            if self.lane.kind.waits_for_all and not again:
                self._add(current, member, contribution)
            if not self.lane.kind.waits_for_all and again:
                while mark.applied < step:  # for its own first coming: nobody else is waited for
                    self._job.check_standing()
                    self._job.changed.wait(WAKE_SECONDS)
                return UpdateTask()
        return (
            self._together(member, step, current)
            if self.lane.kind.waits_for_all
            else self._alone(member, contribution)
        )

    # ---- what a step came to ----

    def updated(self, member: Member, step: int, progress: UpdateTask) -> Iterator[str]:
        """The lane's slices, each as soon as it has its new value; where staleness is bounded, not
        before they may be read.

        Raises:
            PServerError: the update failed, or a wait for others.
        """
        if self.lane.staleness is not None:
            self.outcome(member, step, progress)
        for name in self.entries:
            self._await(progress, name)
            yield name

    def outcome(self, member: Member, step: int, progress: UpdateTask) -> Outcome:
        """What a step came to, when it is over; where staleness is bounded, when the slowest
        trainer is near enough.

        Raises:
            PServerError: as :meth:`updated`.
        """
        mark = member.mark(self.index)
        self._await(progress)
        with self._job.changed:
            if self.lane.staleness is not None:
                bound = step - self.lane.staleness
                self._wait(member, step, lambda: self._slowest() >= bound)
            return Outcome(self.version, mark.committed, mark.overflow)

    def _await(self, progress: UpdateTask, name: str = "") -> None:
        """Waits for the update of a slice, or of all and their marks.

        See [Note: answers begin early].
        """
        with self._job.changed:
            while not (name in progress.updated or progress.over):
                if progress.failure is not None:
                    raise progress.failure
                self._job.changed.wait(WAKE_SECONDS)

    # ---- the update ----

    def _begun(self, update: Callable[[Batch], None], applied: Callable[[], None]) -> UpdateTask:
        """What updates every slice, batch by batch, and then moves marks, behind the gate."""
        passing = self._gate.passing()
        passing.__enter__()

        def end(failure: BaseException | None) -> None:
            if failure is None:
                applied()
            passing.__exit__(None, None, None)

        return UpdateTask(
            self._job.changed,
            self._batches or [()],
            lambda batch: self._work(lambda: update(batch)),
            end,
        )

    def _run(self, progress: UpdateTask) -> UpdateTask:
        """Lets an update run: in the workers, or here.  See [Note: answers begin early]."""
        if self._workers.threads > 1 and sum(self._sizes) >= LARGE_BYTES:
            self._workers.start(partial(_advance, progress), self._sizes)
        else:
            _advance(progress, 1)
        return progress

    def _alone(self, member: Member, contribution: Contribution) -> UpdateTask:
        """The step runs its blocks as it arrives."""

        def update(batch: Batch) -> None:
            for name in batch if not contribution.overflow else ():
                if name in self.tables:
                    if (of_rows := contribution.tables.pop(name, None)) is not None:
                        self.tables[name].update(of_rows, contribution.rows, {})
                    continue
                gradient, entry = contribution.gradients.pop(name, None), self.entries[name]
                if gradient is not None:
                    with self._locks[name], self._snapshots[name].updating():
                        entry.update(
                            gradient,
                            contribution.rows[entry.group],
                            before=self._handed.get((member.trainer, name)),
                        )

        def applied() -> None:
            self.version += 0 if contribution.overflow else 1
            member.mark(self.index).apply(1, contribution.overflow)

        return self._run(self._begun(update, applied))

    def _size(self, batch: Batch) -> int:
        """Bytes of its slices; how many rows of a table a step touches nobody knows before."""
        return sum(self.entries[name].value.nbytes for name in batch if name in self.entries)

    def _slowest(self) -> int:
        """The least step among the trainers that have not left; one that has not joined yet has
        taken none.
        """
        steps = [self._members.step(trainer, self.index) for trainer in self._members.awaited()]
        return min(steps, default=2**63)

    def _together(self, member: Member, step: int, current: SyncRound) -> UpdateTask | Clipping:
        """Everybody's step is one step, and ``current`` has this trainer's."""
        with self._job.changed:
            self._wait(
                member,
                step,
                lambda: current.phase is not Phase.COLLECTING or self._complete(current),
                current,
            )
            measured = self._measures and not current.overflow
            merging = measured and current.phase is Phase.COLLECTING
            current.phase = Phase.MERGING if merging else current.phase
        if not measured:
            return self._apply(current, Phase.COLLECTING, {})
        if merging:
            self._work(lambda: current.measure(self.entries, self.tables))
            with self._job.changed:
                current.phase = Phase.MERGED
                self._job.changed.notify_all()
        with self._job.changed:
            self._wait(member, step, lambda: current.phase is not Phase.MERGING, current)
        return (
            Clipping(current, current.norms)
            if current.norms
            else self._apply(current, Phase.MERGED, {})
        )

    def _add(self, current: SyncRound, member: Member, contribution: Contribution) -> None:
        try:
            current.add(member.trainer, contribution)
        except FingerprintMismatch as error:
            self._job.fail(error)
            raise

    def _complete(self, current: SyncRound) -> bool:
        return all(trainer in current.contributions for trainer in self._members.awaited())

    def scale(self, current: SyncRound, coefficients: Mapping[str, float]) -> UpdateTask:
        """Applies the merged step, once, with the clipping coefficients of whoever comes first (all
        compute the same).

        Returns:
            Its update, for :meth:`updated` and :meth:`outcome`.

        Raises:
            PServerError: the job failed meanwhile.
        """
        with self._job.changed:
            self._job.check_standing()
        return self._apply(current, Phase.MERGED, coefficients)

    def _apply(
        self, current: SyncRound, ready: Phase, coefficients: Mapping[str, float]
    ) -> UpdateTask:
        """Begins the update of a round, unless it has begun."""

        def update(batch: Batch) -> None:
            if ready is Phase.COLLECTING:
                current.merge(batch)
            current.apply(batch, self.entries, coefficients)
            current.apply_rows(batch, self.tables, coefficients)

        with self._job.changed:
            first = current.phase is ready
            current.phase = Phase.APPLYING if first else current.phase
        if first:
            progress = self._begun(update, lambda: self._applied(current))
            with self._job.changed:
                current.progress = progress
                self._job.changed.notify_all()
            return self._run(progress)
        with self._job.changed:
            while current.progress is None:
                self._job.check_standing()
                self._job.changed.wait(WAKE_SECONDS)
            return current.progress

    def _applied(self, current: SyncRound) -> None:
        """The round is over: everybody's mark moves, and the next one begins.

        Under the job's lock.
        """
        current.phase = Phase.APPLIED
        self.version += 0 if current.overflow else 1
        for trainer in current.contributions:
            self._members.by_trainer[trainer].mark(self.index).apply(
                current.committed, current.overflow
            )
        self._round = SyncRound()

    def _work(self, work: Callable[[], None]) -> None:
        """Works on the tensors; if that fails, the job has failed: nobody knows what they hold."""
        try:
            work()
        except Exception as error:
            self._job.fail(
                JobFailed(f"the server could not update: {type(error).__name__}: {error}")
            )
            raise

    def hand_out(self, member: Member, name: str) -> torch.Tensor:
        """A slice of this lane as nobody is updating it: the memory itself where steps are taken
        together, otherwise a copy.
        """
        if self.lane.kind.waits_for_all:
            return self.entries[name].value
        copy = self._snapshots[name].read()
        if self.lane.dc_asgd:
            self._handed[member.trainer, name] = copy
        return copy

    def forget(self) -> None:
        """Slices have been loaded."""
        for snapshot in self._snapshots.values():
            snapshot.forget()

    def _wait(
        self, member: Member, step: int, done: Callable[[], bool], current: SyncRound | None = None
    ) -> None:
        """Waits under the job's lock until ``done``; says for whom when that takes long."""

        def missing() -> list[int]:
            awaited = self._members.awaited()
            if current is not None:
                return [trainer for trainer in awaited if trainer not in current.contributions]
            return [
                trainer for trainer in awaited if self._members.step(trainer, self.index) < step
            ]

        wait(
            self._job,
            self._members,
            Wait(member, f"lane {self.index}", f"step {step}", done),
            missing,
        )


def _advance(progress: UpdateTask, most: int) -> None:
    while progress.advance(most):
        pass
