"""The steps of one lane of a running job: slices updated together (sync, diloco) or as each trainer's step arrives (the others).

[Note: who updates]  A sync step is merged and applied by one thread: the first that finds the round ready moves its phase
under the job's lock and works on the tensors outside it, while the others wait on the condition (``round.py`` draws the
phases).  After that nothing changes a slice until every trainer has committed again, so replies are sent straight from the
table's memory.  In async mode each slice has a lock: an update, or the copy that a reader takes, holds it, so that updates of a
slice never race and nobody reads half of one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from pserver.entry import Entry
from pserver.errors import FingerprintMismatch, JobFailed, Refused
from pserver.gate import Gate
from pserver.members import Member, Members, Wait
from pserver.round import Contribution, Phase, Round
from pserver.waits import Standing, wait
from transpiler.plan import Lane


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a committed step came to: updates so far, trainers in this one, and whether an overflow skipped it."""

    version: int
    committed: int
    overflow: bool = False


@dataclass(frozen=True, slots=True)
class Clipping:
    """A merged step that waits for its coefficient: this server's part of the squared norms, by parameter name."""

    round: Round
    norms: Mapping[str, float]


class Steps:
    """See the module's docstring.

    Args:
        index, lane: which lane of the plan.
        entries: its slices, by name.
        locks: one for each slice of the server; see [Note: who updates].
        gate: that every step passes.

    Attributes:
        version: updates applied so far, counted in steps.
    """

    def __init__(
        self,
        index: int,
        lane: Lane,
        entries: Mapping[str, Entry],
        locks: Mapping[str, threading.Lock],
        members: Members,
        job: Standing,
        gate: Gate,
    ) -> None:
        self.index = index
        self.lane = lane
        self.entries = entries
        self.version = 0
        self._locks = locks
        self._members = members
        self._job = job
        self._gate = gate
        self._round = Round()
        self._handed: dict[tuple[int, str], torch.Tensor] = {}  # (trainer, slice) -> as last handed out; for compensation

    def commit(self, member: Member, step: int, contribution: Contribution) -> Outcome | Clipping:
        """Takes a trainer's step, and in sync mode waits for the others'.  A step is applied once, however often it comes.

        Returns:
            What it came to; or, where norms clip on servers, what :meth:`scale` is to be called with.

        Raises:
            Refused: a step out of order.
            FingerprintMismatch: sync trainers disagree on a hyper-parameter.
            PServerError: the job failed meanwhile.
        """
        mark = member.mark(self.index)
        with self._job.changed:
            self._job.check_standing()
            if step <= mark.applied:
                return self._answer(member, step)
            if step != mark.applied + 1:
                raise Refused(f"trainer {member.trainer}: expected step {mark.applied + 1}, got step {step}")
            missing = {entry.group for entry in self.entries.values()} - set(contribution.rows)
            if missing:
                raise Refused(f"step {step} of trainer {member.trainer} has no hyper-parameters for group {min(missing)}")
            again, mark.taking = mark.taking == step, step
            current = self._round
            if self.lane.rounds and not again:
                self._add(current, member, contribution)
            if not self.lane.rounds and again:
                self._wait(member, step, lambda: mark.applied >= step)
                return self._answer(member, step)
        return self._together(member, step, current) if self.lane.rounds else self._alone(member, step, contribution)

    def _answer(self, member: Member, step: int) -> Outcome:
        """What a step came to that has been applied; where staleness is bounded, when the slowest trainer is near enough."""
        mark = member.mark(self.index)
        if self.lane.staleness is not None:
            bound = step - self.lane.staleness
            self._wait(member, step, lambda: self._slowest() >= bound)
        return Outcome(self.version, mark.committed, mark.overflow)

    def _alone(self, member: Member, step: int, contribution: Contribution) -> Outcome:
        """The step runs its blocks as it arrives."""
        with self._gate.passing():
            self._work(lambda: self._update(member, contribution))
            with self._job.changed:
                self.version += 0 if contribution.overflow else 1
                member.mark(self.index).apply(1, contribution.overflow)
        with self._job.changed:
            return self._answer(member, step)

    def _update(self, member: Member, contribution: Contribution) -> None:
        if contribution.overflow:
            return
        for name, gradient in contribution.gradients.items():
            entry = self.entries[name]
            with self._locks[name]:
                entry.update(gradient, contribution.rows[entry.group], before=self._handed.get((member.trainer, name)))

    def _slowest(self) -> int:
        """The least step among the trainers that have not left; one that has not joined yet has taken none."""
        steps = [self._members.step(trainer, self.index) for trainer in self._members.awaited()]
        return min(steps, default=2**63)

    def _together(self, member: Member, step: int, current: Round) -> Outcome | Clipping:
        """Everybody's step is one step, and ``current`` has this trainer's."""
        with self._job.changed:
            self._wait(member, step, lambda: current.phase is not Phase.COLLECTING or self._complete(current), current)
            merging = current.phase is Phase.COLLECTING
            current.phase = Phase.MERGING if merging else current.phase
        if merging:
            self._work(lambda: current.merge(self.entries))
            with self._job.changed:
                current.phase = Phase.MERGED
                self._job.changed.notify_all()
        with self._job.changed:
            self._wait(member, step, lambda: current.phase is not Phase.MERGING, current)
        if current.norms:
            return Clipping(current, current.norms)
        return self.scale(member, step, current, {})

    def _add(self, current: Round, member: Member, contribution: Contribution) -> None:
        try:
            current.add(member.trainer, contribution)
        except FingerprintMismatch as error:
            self._job.fail(error)
            raise

    def _complete(self, current: Round) -> bool:
        return all(trainer in current.contributions for trainer in self._members.awaited())

    def scale(self, member: Member, step: int, current: Round, coefficients: Mapping[str, float]) -> Outcome:
        """Applies the merged step, once, with the clipping coefficients of whoever comes first (all compute the same)."""
        with self._job.changed:
            self._job.check_standing()
            applying = current.phase is Phase.MERGED
            current.phase = Phase.APPLYING if applying else current.phase
        if applying:
            with self._gate.passing():
                self._work(lambda: current.apply(self.entries, coefficients))
                self._applied(current)
        with self._job.changed:
            self._wait(member, step, lambda: current.phase is Phase.APPLIED, current)
            return self._answer(member, step)

    def _applied(self, current: Round) -> None:
        """The round is over: everybody's mark moves, and the next one begins."""
        with self._job.changed:
            current.phase = Phase.APPLIED
            self.version += 0 if current.overflow else 1
            for trainer in current.contributions:
                self._members.by_trainer[trainer].mark(self.index).apply(current.committed, current.overflow)
            self._round = Round()
            self._job.changed.notify_all()

    def _work(self, work: Callable[[], None]) -> None:
        """Works on the tensors; if that fails, the job has failed: nobody knows what they hold."""
        try:
            work()
        except Exception as error:
            self._job.fail(JobFailed(f"the server could not update: {type(error).__name__}: {error}"))
            raise

    def hand_out(self, member: Member, name: str) -> torch.Tensor:
        """A slice of this lane as nobody is updating it: the memory itself where steps are taken together, otherwise a copy."""
        if self.lane.rounds:
            return self.entries[name].value
        with self._locks[name]:
            copy = self.entries[name].value.clone()
        if self.lane.dc_asgd:
            self._handed[member.trainer, name] = copy
        return copy

    def _wait(self, member: Member, step: int, done: Callable[[], bool], current: Round | None = None) -> None:
        """Waits under the job's lock until ``done``; says for whom when that takes long."""

        def missing() -> list[int]:
            awaited = self._members.awaited()
            if current is not None:
                return [trainer for trainer in awaited if trainer not in current.contributions]
            return [trainer for trainer in awaited if self._members.step(trainer, self.index) < step]

        wait(self._job, self._members, Wait(member, f"lane {self.index}", f"step {step}", done), missing)
