"""The rounds of a sync lane: the trainers' steps that are one update.  Pure state, no waiting.

[Note: whose buffers]  A training forward changes buffers by itself, on each trainer by what it has
seen.  The lane's ``buffers`` says whether all trainers have one of two values, or each its own:

::

    trainer0    trainer 0's travel with its steps; where it was preempted, those of the
                least trainer that is left
    mean        the mean over trainers, of floating-point buffers; others are trainer 0's
    own         nothing travels

A step of the first lane of gradients (of the first lane, where there are none) brings what has
changed; the answer brings to the other trainers every buffer that a step has ever changed.  The
mean is over a sync step's trainers; where steps come one by one, and in the k-step modes, it is
over the last value that each trainer has sent.  Running statistics are no gradients: a step that is
skipped, because of an overflow or a NaN, brings its buffers all the same, as a skipped step of one
process keeps them.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pserver.dense.update import SliceUpdate, mean, squared_norm, update_all
from pserver.errors import CorruptFrame, FingerprintMismatch, Refused
from pserver.finite import NonFiniteStep
from pserver.job_log.records import ProcessStep
from pserver.lane.step import Gathered, Hparams, Step, StepState
from pserver.lane.tasks import UpdateTask
from pserver.table.gradient import RowGradient, total_of
from pserver.transport.arrays import Assignment, OutlierPush, checksum

if TYPE_CHECKING:
    from pserver.lane.tables import LockedTable


# ---- shared buffers ----
#
# The buffers of a model that trainers share: batch norm's running statistics.


class SharedBuffers:
    """Assigns synced buffers in one lane's steps, and knows which of them answers bring.  Any
    thread may call it.  See [Note: whose buffers].

    Args:
        whose: the lane's ``buffers``.
        of_step: a mean is over the trainers of the step alone.
        variables: the memory of the slices that servers hold and never update, by name.
        locks: one for each of them.
        first: gives the trainer whose buffers count: see [Note: whose buffers].
    """

    def __init__(
        self,
        whose: str,
        of_step: bool,
        variables: Mapping[str, Tensor],
        locks: Mapping[str, threading.Lock],
        first: Callable[[], int] = lambda: 0,
    ) -> None:
        self._whose, self._of_step, self._first = whose, of_step, first
        self._variables, self._locks = variables, locks
        self._lock = threading.Lock()  # guards the two below
        self._changed: dict[str, None] = {}  # slices that a step has changed, in their order
        self._last: dict[str, dict[int, Tensor]] = {}  # by slice and trainer, for a mean

    def check(self, step: int, trainer: int, buffers: Mapping[str, Tensor]) -> None:
        """Returns if a trainer's step may bring these buffers.

        Raises:
            Refused: one is updated by steps, or this trainer may not set it.
        """
        who = f"step {step} of trainer {trainer}"
        for name in buffers:
            if name not in self._variables:
                raise Refused(f"{who}: expected a buffer, got {name!r}, which steps update")
            if self._whose == "own" or (trainer != self._first() and not self._averages(name)):
                raise Refused(
                    f"{who}: expected none of the buffer {name!r}, as a_sync_configs['buffers'] is "
                    f"{self._whose!r}"
                )

    def _averages(self, name: str) -> bool:
        dtype = self._variables[name].dtype
        return self._whose == "mean" and (dtype.is_floating_point or dtype.is_complex)

    def gathered(self, sent: Mapping[str, Mapping[int, Tensor | None]]) -> Gathered:
        """The values for :meth:`assign` of a step: where a mean is over the last value that each
        trainer has sent, those of the others, too.  Called in the order of the steps, once for
        each.

        Args:
            sent: by slice, and by trainer of the step: its value; None: it has what
                the server has.
        """
        if self._of_step:
            return sent
        found: dict[str, Mapping[int, Tensor | None]] = {}
        with self._lock:
            for name, own in sent.items():
                found[name] = own
                if self._averages(name):
                    now = self._variables[name]
                    known = {t: now.clone() if each is None else each for t, each in own.items()}
                    self._last[name] = {**self._last.get(name, {}), **known}
                    found[name] = self._last[name]
        return found

    def assign(self, name: str, sent: Mapping[int, Tensor | None]) -> None:
        """Assigns a slice.

        Args:
            sent: by trainer: its value; None: it has what the server has.
        """
        with self._lock, self._locks[name]:
            self._changed[name] = None
            now = self._variables[name]
            if not self._averages(name):
                value = next(sent[trainer] for trainer in sorted(sent) if sent[trainer] is not None)
                assert value is not None, "one trainer has sent it"
                now.copy_(value)
                return
            values = [now if sent[trainer] is None else sent[trainer] for trainer in sorted(sent)]
            first, *others = (value for value in values if value is not None)
            now.copy_(mean([first.clone(), *others], len(values)))

    def answer(self, trainer: int) -> list[str]:
        """The slices that the answer to a trainer's step brings."""
        if self._whose == "trainer0" and trainer == self._first():
            return []
        with self._lock:
            return list(self._changed)

    def discard(self) -> None:
        """Forgets what trainers have sent, because values have been loaded."""
        with self._lock:
            self._last.clear()


# ---- sync round ----
#
# One sync step on a server: what the trainers have sent of it, and its phase.  Pure state, no
# waiting.
#
# ::
#
#   COLLECTING --its record stands: a thread leads-----> APPLYING --> APPLIED
#        |                                                  ^
#        `--where norms clip--> MERGING --> MERGED ---------'
#                                     coefficient known
#
# One thread leads a round whose record stands: the one that has let it stand, or the first one that
# waits.  In MERGING and in APPLYING it works on the tensors, outside the job's lock.  Meanwhile the
# other threads wait, or send the slices that are updated already.
#
# The record says whose steps are in it: see [Note: the job's log] in
# pserver/job_log/coordinator.py. A trainer that leaves during COLLECTING is no longer waited for;
# its gradient of an earlier step is never used again.


class RoundPhase(enum.Enum):
    """The phase of a sync round; the comment above draws the transitions."""

    COLLECTING = enum.auto()
    MERGING = enum.auto()
    MERGED = enum.auto()  # the gradients are merged, and the trainers receive their squared norms
    APPLYING = enum.auto()
    APPLIED = enum.auto()


@dataclass(slots=True)
class SyncRound:
    """The step that all trainers of a sync job take together.

    The job's lock guards ``phase``, ``led``, ``steps`` and ``task``; in MERGING and
    APPLYING the rest belongs to the threads that merge and update.

    Attributes:
        goes_on_without: a step that is refused is left out; otherwise the round is.
        led: a thread takes it further.
        averages: merged gradients are means over trainers; otherwise sums.
        steps: by trainer.
        merged: merged gradients by slice.
        norms: by parameter or table: the sum of squares over the elements that this server holds.
        merged_rows: merged gradients by table.
        assignments: what trainers have written, by slice: all of them the same.
        task: the update, from APPLYING on.
        began: when the first step arrived, as metrics measure it.
        time: of its record, in seconds since 1970; 0.0: it has none.
        record: the record's number.
        decided: the steps' names, as the record has them.
    """

    goes_on_without: bool = False
    averages: bool = True
    phase: RoundPhase = RoundPhase.COLLECTING
    led: bool = False
    steps: dict[int, Step] = field(default_factory=dict)
    merged: dict[str, torch.Tensor] = field(default_factory=dict)
    norms: dict[str, float] = field(default_factory=dict)
    merged_rows: dict[str, RowGradient] = field(default_factory=dict)
    assignments: dict[str, Assignment] = field(default_factory=dict)
    task: UpdateTask | None = None
    began: float = 0.0
    time: float = 0.0
    record: int = 0
    decided: tuple[ProcessStep, ...] = ()

    @property
    def committed(self) -> int:
        """The number of trainers that have committed the step."""
        return len(self.steps)

    @property
    def overflow(self) -> bool:
        """Whether a trainer saw a gradient that is not finite: then no trainer takes the step."""
        return any(step.overflow for step in self.steps.values())

    @property
    def counted(self) -> list[Step]:
        """The gradients to merge, in the order of the trainers; none where the round is skipped."""
        in_order = [self.steps[trainer] for trainer in sorted(self.steps)]
        finite = [step for step in in_order if not step.refused]
        goes_on = len(finite) == len(in_order) or self.goes_on_without
        return finite if goes_on and not self.overflow else []

    @property
    def hparams(self) -> Hparams:
        """The step's hyper-parameters, on which all trainers agree."""
        return self.steps[min(self.steps)].hparams

    @property
    def goes_on(self) -> bool:
        """Whether a thread that waits in the round may continue: to lead it, or to answer."""
        match self.phase:
            case RoundPhase.COLLECTING:
                return bool(self.time) and not self.led
            case RoundPhase.MERGING:
                return False
            case RoundPhase.APPLYING:
                return bool(self.norms) or self.answers
            case _:
                return True

    @property
    def answers(self) -> bool:
        """Whether a part of its update may be done, or none ever will be."""
        task = self.task
        if task is None or self.phase is RoundPhase.APPLIED:
            return task is not None
        return task.early or task.failure is not None

    def add(self, step: Step) -> None:
        """Adds one trainer's step.

        Raises:
            FingerprintMismatch: its hyper-parameters differ from those of a trainer that committed
                before.  Not those of trainers that step by themselves: a window may end early.
        """
        trainer = step.trainer
        for other, earlier in () if self.goes_on_without else self.steps.items():
            check_hparams(trainer, step.hparams, other, earlier.hparams)
        step.state = StepState.STAGED
        self.steps[trainer] = step

    def decide(self, names: Sequence[ProcessStep], time: float, record: int) -> dict[int, Step]:
        """Takes the round's record: these steps are in it.

        Returns:
            The steps, by trainer.
        """
        trainers = [name.process.trainer for name in names]
        self.steps = {trainer: self.steps[trainer] for trainer in trainers}
        for step in self.steps.values():
            step.state, step.time, step.record = StepState.DECIDED, time, record
        self.decided, self.time, self.record = tuple(names), time, record
        return self.steps

    def drop(self, trainer: int) -> bool:
        """Drops the step of a lost trainer; what is decided stays.

        Returns:
            Whether it had a step that is not decided.
        """
        if self.time or (step := self.steps.pop(trainer, None)) is None:
            return False
        step.state = StepState.DROPPED
        return True

    def refuses(self) -> Collection[int]:
        """The trainers of whose steps nothing is applied because of values that are not finite, or
        outliers, their own or, where the round is skipped, another's.
        """
        found = [trainer for trainer, step in self.steps.items() if step.refused]
        return self.steps if found and not self.goes_on_without else found

    @property
    def nonfinite(self) -> tuple[NonFiniteStep, ...]:
        """The steps in which a value is not finite, in the order of the trainers."""
        in_order = (self.steps[trainer] for trainer in sorted(self.steps))
        return tuple(found for each in in_order for found in each.nonfinite)

    @property
    def outliers(self) -> tuple[OutlierPush, ...]:
        """The outliers of the trainers' histories, in the order of the trainers."""
        in_order = (self.steps[trainer] for trainer in sorted(self.steps))
        return tuple(found for each in in_order for found in each.outliers)

    def agree(self, variables: Mapping[str, torch.Tensor], tables: Collection[str] = ()) -> None:
        """Finds the external writes to assign before the step: the values of the lowest-ranked
        trainer that sends them, where all trainers have written the same.

        A slice whose checksum is that of the server's own values counts as not written.  Rows of
        tables are on the server already.

        Args:
            variables: the server's memory of the slices, by name.
            tables: the names of the lane's tables.

        Raises:
            FingerprintMismatch: a trainer has written another value than another one, or none.
            CorruptFrame: the values are not there, or are others than their checksum says.
        """
        # of the least trainer that sends them: those that have written have written the same
        sent = [self.steps[trainer] for trainer in sorted(self.steps)]
        first = next((each for each in sent if each.assignments), sent[0])
        self.assignments = {
            name: assignment
            for name, assignment in first.assignments.items()
            if name not in first.written
        }
        written = {name for each in self.steps.values() for name in each.written}
        for name in sorted(written.intersection(tables)):
            loaded = {t: self.steps[t].written.get(name) for t in sorted(self.steps)}
            if len(set(loaded.values())) > 1:
                raise FingerprintMismatch(_loads_differ(name, loaded))
        for name in sorted(written.difference(tables)):
            before = checksum(variables[name])
            said = {
                trainer: self.steps[trainer].written.get(name, before)
                for trainer in sorted(self.steps)
            }
            if len(set(said.values())) > 1:
                raise FingerprintMismatch(_disagreement(name, said, before))
            after = next(iter(said.values()))
            if after == before:
                continue
            if name not in first.assignments:
                raise CorruptFrame(
                    f"{name!r} was written, and its values, which trainer 0 sends, are not there"
                )
            if checksum(first.assignments[name].applied_to(variables[name])) != after:
                raise CorruptFrame(f"{name!r}: the values are others than their checksum says")
            self.assignments[name] = first.assignments[name]

    def merge(self, names: Iterable[str]) -> None:
        """Merges the gradients of these slices and tables; see [Note: merge order] in
        dense/update.py.
        """
        in_order = self.counted
        for name in names if in_order else ():
            gradients, of_rows = list[Tensor](), list[RowGradient]()
            for step in in_order:
                if name in step.gradients:
                    gradients.append(step.gradients.pop(name))
                if name in step.row_gradients:
                    of_rows.append(step.row_gradients.pop(name))
            if gradients and len(in_order) > 1:
                self.merged[name] = mean(gradients, len(in_order), self.averages)
            elif gradients:
                self.merged[name] = gradients[0]
            if of_rows:
                share = 1 / len(in_order) if self.averages else 1.0
                self.merged_rows[name] = total_of(of_rows).mul_(share)

    def measure(
        self, updates: Mapping[str, SliceUpdate], tables: Mapping[str, LockedTable]
    ) -> None:
        """Merges the gradients of all slices and tables, and computes the squared norms of those
        that are clipped by their norm.
        """
        self.merge([*updates, *tables])
        for name, gradient in self.merged.items():
            if updates[name].scaled is not None:
                parameter = updates[name].parameter
                self.norms[parameter] = self.norms.get(parameter, 0.0) + squared_norm(gradient)
        for name, of_rows in self.merged_rows.items():
            if tables[name].scaled is not None:
                self.norms[name] = squared_norm(of_rows.rows)

    def apply(
        self, names: Iterable[str], updates: Mapping[str, SliceUpdate], scale: Mapping[str, float]
    ) -> None:
        """Runs the optimize blocks of those of these slices that have a merged gradient.

        Args:
            scale: the clipping coefficients, by parameter name.
        """
        update_all(
            updates,
            {name: self.merged.pop(name) for name in names if name in self.merged},
            self.hparams,
            scale,
        )

    def apply_rows(
        self, names: Iterable[str], tables: Mapping[str, LockedTable], scale: Mapping[str, float]
    ) -> None:
        """Updates those of these tables that have a merged gradient.

        Args:
            scale: the clipping coefficients, by table name.
        """
        for name in names:
            if name in self.merged_rows:
                merged = self.merged_rows.pop(name)
                tables[name].update(merged, self.hparams, scale, now=self.time)


def _disagreement(name: str, said: Mapping[int, int], before: int) -> str:
    """The disagreement of trainers about a slice's external writes, in words."""
    groups: dict[int, list[int]] = {}
    for trainer, checksum_ in said.items():
        groups.setdefault(checksum_, []).append(trainer)
    parts = [
        f"trainer {', '.join(map(str, trainers))} "
        + ("did not write" if found == before else f"wrote values with the checksum {found:016x}")
        for found, trainers in groups.items()
    ]
    return (
        f"the trainers disagree on what they wrote into {name!r}: {'; '.join(parts)}; in a sync "
        "job every trainer writes the same into its parameters, in the same step"
    )


def _loads_differ(name: str, loaded: Mapping[int, int | None]) -> str:
    """The disagreement of trainers about a table's loaded rows, in words."""
    groups: dict[int | None, list[int]] = {}
    for trainer, checksum_ in loaded.items():
        groups.setdefault(checksum_, []).append(trainer)
    parts = [
        f"trainer {', '.join(map(str, trainers))} "
        + ("did not load" if found is None else f"loaded rows with the checksum {found:016x}")
        for found, trainers in groups.items()
    ]
    return (
        f"the trainers disagree on the rows that they loaded into table {name!r}: "
        f"{'; '.join(parts)}; in a sync job every trainer calls load_state_dict with the same "
        "rows, before the same step"
    )


def check_hparams(trainer: int, hparams: Hparams, other: int, earlier: Hparams) -> None:
    """Returns if two trainers of a sync step agree on every hyper-parameter.

    Raises:
        FingerprintMismatch: they do not; the message names the first group and key that differ.
    """
    for group in sorted(set(hparams) | set(earlier)):
        mine, theirs = hparams.get(group, {}), earlier.get(group, {})
        for key in sorted(set(mine) | set(theirs)):
            if mine.get(key) != theirs.get(key):
                raise FingerprintMismatch(
                    f"the trainers disagree on {key!r} of parameter group {group}: trainer "
                    f"{trainer} has {mine.get(key)}, trainer {other} has {theirs.get(key)}; a sync "
                    "job steps every trainer's schedule alike"
                )


@dataclass(frozen=True, slots=True)
class Clipping:
    """A merged step that waits for its clipping coefficients.

    Attributes:
        round: the step.
        norms: this server's part of the squared norms, by parameter name.
        scaled: it has been applied already; a trainer whose answer was lost still needs the norms
            for the other servers.
    """

    round: SyncRound
    norms: Mapping[str, float]
    scaled: bool = False
