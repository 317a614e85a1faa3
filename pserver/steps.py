"""The steps of a running job: one table, updated together (sync) or as each trainer's step arrives (async).

[Note: who updates]  A sync step is merged and applied by one thread: the first that finds the round ready moves its phase
under the job's lock and works on the tensors outside it, while the others wait on the condition (``round.py`` draws the
phases).  After that nothing changes a slice until every trainer has committed again, so replies are sent straight from the
table's memory.  In async mode each slice has a lock: an update, or the copy that a reader takes, holds it, so that updates of a
slice never race and nobody reads half of one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from pserver.dense import DenseTable
from pserver.errors import FingerprintMismatch, JobFailed, PServerError, Refused
from pserver.members import Member, Members
from pserver.round import Contribution, Phase, Round
from transpiler.plan import Plan

PATIENCE_SECONDS = 3.0  # a wait that lasts longer says for whom, once

log = logging.getLogger(__name__)


class Standing(Protocol):
    """What the steps need of their job: its lock, and whether it still stands.  See [Note: the job's lock] in job.py."""

    changed: threading.Condition

    def check_standing(self) -> None:
        """Raises what ended the job, if something did."""

    def fail(self, error: PServerError) -> None:
        """Ends the job for everybody."""


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

    Attributes:
        version: updates applied so far, counted in steps.
    """

    def __init__(self, plan: Plan, table: DenseTable, members: Members, job: Standing) -> None:
        self.plan = plan
        self.table = table
        self.version = 0
        self._members = members
        self._job = job
        self._round = Round()
        self._locks = {name: threading.Lock() for name in table.values}  # async mode; see [Note: who updates]
        self._barriers: dict[str, set[int]] = {}

    def commit(self, member: Member, step: int, contribution: Contribution) -> Outcome | Clipping:
        """Takes a trainer's step, and in sync mode waits for the others'.  A step is applied once, however often it comes.

        Returns:
            What it came to; or, where norms clip on servers, what :meth:`scale` is to be called with.

        Raises:
            Refused: a step out of order.
            FingerprintMismatch: sync trainers disagree on a hyper-parameter.
            PServerError: the job failed meanwhile.
        """
        with self._job.changed:
            self._job.check_standing()
            if step <= member.step:
                return Outcome(self.version, 0)
            if step != member.step + 1:
                raise Refused(f"trainer {member.trainer}: expected step {member.step + 1}, got step {step}")
        missing = {entry.group for entry in self.table.entries.values()} - set(contribution.rows)
        if missing:
            raise Refused(f"step {step} of trainer {member.trainer} has no hyper-parameters for group {min(missing)}")
        return (self._alone if self.plan.mode == "async" else self._together)(member, step, contribution)

    def _alone(self, member: Member, step: int, contribution: Contribution) -> Outcome:
        """Async: the step runs its blocks as it arrives."""
        if not contribution.overflow:
            for name, gradient in contribution.gradients.items():
                with self._locks[name]:
                    self.table.update(name, gradient, contribution.rows[self.table.entries[name].group])
        with self._job.changed:
            self.version += 0 if contribution.overflow else 1
            member.step = step
            return Outcome(self.version, 1, contribution.overflow)

    def _together(self, member: Member, step: int, contribution: Contribution) -> Outcome | Clipping:
        """Sync: everybody's step is one step."""
        with self._job.changed:
            current = self._round
            try:
                current.add(member.trainer, contribution)
            except FingerprintMismatch as error:
                self._job.fail(error)
                raise
            self._wait(member, f"step {step}", lambda: current.phase is not Phase.COLLECTING or self._complete(current), current)
            merging = current.phase is Phase.COLLECTING
            current.phase = Phase.MERGING if merging else current.phase
        if merging:
            self._work(lambda: current.merge(self.table), current, Phase.MERGED)
        with self._job.changed:
            self._wait(member, f"step {step}", lambda: current.phase is not Phase.MERGING, current)
        if current.norms:
            return Clipping(current, current.norms)
        return self.scale(member, step, current, {})

    def _complete(self, current: Round) -> bool:
        return all(trainer in current.contributions for trainer in self._members.awaited())

    def scale(self, member: Member, step: int, current: Round, coefficients: Mapping[str, float]) -> Outcome:
        """Applies the merged step, once, with the clipping coefficients of whoever comes first (all compute the same)."""
        with self._job.changed:
            self._job.check_standing()
            applying = current.phase is Phase.MERGED
            current.phase = Phase.APPLYING if applying else current.phase
        if applying:
            self._work(lambda: current.apply(self.table, coefficients), current, Phase.APPLIED)
        with self._job.changed:
            self._wait(member, f"step {step}", lambda: current.phase is Phase.APPLIED, current)
            member.step = step
            return Outcome(self.version, current.committed, current.overflow)

    def _work(self, work: Callable[[], None], current: Round, then: Phase) -> None:
        """Works on the tensors for everybody; if that fails, the job has failed, and nobody waits for it."""
        try:
            work()
        except Exception as error:
            self._job.fail(JobFailed(f"the server could not update: {type(error).__name__}: {error}"))
            raise
        with self._job.changed:
            current.phase = then
            if then is Phase.APPLIED:
                self.version += 0 if current.overflow else 1
                self._round = Round()
            self._job.changed.notify_all()

    def snapshot(self, name: str) -> torch.Tensor | None:
        """A slice or a state as nobody is updating it: the memory itself in sync mode, a copy in async mode."""
        if self.plan.mode == "sync":
            return self.table.read(name)
        owner = name if name in self._locks else self.table.slice_of(name)
        with self._locks[owner]:
            tensor = self.table.read(name)
            return None if tensor is None else tensor.clone()

    def barrier(self, member: Member, name: str, patience: float) -> bool:
        """Waits until every trainer that has not left has come to the barrier of this name, or patience (seconds) ends."""
        with self._job.changed:
            arrived = self._barriers.setdefault(name, set())
            arrived.add(member.trainer)
            self._job.changed.notify_all()
            deadline = time.monotonic() + patience

            def passed() -> bool:
                return arrived.issuperset(self._members.awaited())

            self._wait(member, f"barrier {name!r}", lambda: passed() or time.monotonic() >= deadline)
            return passed()

    def _wait(self, member: Member, what: str, done: Callable[[], bool], current: Round | None = None) -> None:
        """Waits under the lock until ``done``; ends with the job's failure; says for whom it waits when that takes long."""
        began, said = time.monotonic(), False
        member.waiting, member.done = what, done
        try:
            while not done():
                self._job.check_standing()
                self._check_deadlock()
                self._job.changed.wait(0.2)
                if current is not None and not said and time.monotonic() - began > PATIENCE_SECONDS:
                    said = True
                    missing = [str(t) for t in self._members.awaited() if t not in current.contributions]
                    log.warning("trainer %d has waited long at %s for trainer %s", member.trainer, what, ", ".join(missing))
        finally:
            member.waiting, member.done = "", None

    def _check_deadlock(self) -> None:
        """Some trainers at a barrier and all others in a step: nobody would ever move again."""
        joined = {member.trainer: member for member in self._members.joined()}
        awaited = self._members.awaited()
        blocked = [joined[trainer] for trainer in awaited if trainer in joined]
        kinds = {member.waiting.split()[0] for member in blocked if member.waiting}  # "step", "barrier"
        if len(blocked) < len(awaited) or len(kinds) < 2:
            return
        if all(member.done is not None and not member.done() for member in blocked):
            facts = ", ".join(f"trainer {member.trainer} waits at {member.waiting}" for member in blocked)
            self._job.fail(JobFailed(f"the trainers wait for one another ({facts}): they have taken different numbers of steps"))
            self._job.check_standing()
