"""One trainer's step on one server, from its COMMIT until it is applied; and the update of a lane
that a record decides.  Pure state, no waiting.

[Note: a step]  It arrives whole.  From there::

    ARRIVED --checked and judged--> STAGED --its record--> DECIDED --its update--> APPLIED
       |                               |
       |                               `--its trainer is lost--> DROPPED
       |--it is wrong, or the job is to stop--> refused by an error, and nothing of it stays
       `--it has come before--> nothing of it is taken: it is answered when the first one is APPLIED

A step whose gradients do not count (an overflow, a value that is not finite, an outlier) goes the
same way, as its buffers and its samples do: see :attr:`Step.skipped`.  Whether a step is an update
of its own, or a part of a round of all trainers, is the lane's policy: ``independent.py`` and
``together.py``.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pserver.finite import NonFiniteStep
from pserver.job_log.records import Process, ProcessStep
from pserver.lane.recorder import PendingEntry
from pserver.leases.table import EpochRange
from pserver.membership.waits import WaitEvent
from pserver.table.gradient import RowGradient, RowsBefore
from pserver.transport.arrays import Assignment, OutlierPush, PushNorm
from transpiler.ir.rules import Hparam

Hparams = Mapping[int, Mapping[str, Hparam]]  # by parameter group, by name
# by slice and trainer: its value; None: what the server has
Gathered = Mapping[str, Mapping[int, Tensor | None]]


class StepState(enum.Enum):
    """The state of a step; [Note: a step] draws the transitions."""

    ARRIVED = enum.auto()
    STAGED = enum.auto()
    DECIDED = enum.auto()
    APPLIED = enum.auto()
    DROPPED = enum.auto()


@dataclass(slots=True, eq=False)
class Step:
    """One trainer's step.

    Attributes:
        process: of the trainer.
        number: in the lane, from 1.
        gradients: by slice name, each of its slice's shape and dtype; a slice without a gradient is
            missing, and so is one whose gradient has been used.
        hparams: the hyper-parameters of every parameter group at this step.
        overflow: the trainer saw a gradient that is not finite.
        row_gradients: by table name; a table that the step does not touch is missing.
        assignments: its script's external writes, by slice name.
        written: the checksums of these, by slice name, where all trainers must have written the
            same; and of rows that it has loaded, by table name.
        nonfinite: the step itself, where values are not finite.
        norms: how large its parts are, by variable, where the lane looks at that.
        outliers: those of them that are far beyond their history.
        refused: why nothing of it is applied: "nonfinite", for values that are not finite, or
            "outlier"; "": it is.
        buffers: of the model, which its forward has changed, by slice name.
        last: the trainer leaves after it.
        leases: the positions of epochs that it has consumed.
        before: slices as the trainer has read them, where delays are compensated.
        rows_before: the same of the rows of its gradients, by table.
        steps: of the trainer's script that it brings.
        state: see :class:`StepState`.
        record: the number of the record that decides it; 0: none does.
        time: of that record, in seconds since 1970.
        turn: its place among the lane's updates, where it is one; -1: it has none.
        event: notifies of its turn, and of its end.
    """

    process: Process
    number: int
    gradients: dict[str, torch.Tensor]
    hparams: Hparams
    overflow: bool = False
    row_gradients: dict[str, RowGradient] = field(default_factory=dict)
    assignments: dict[str, Assignment] = field(default_factory=dict)
    written: Mapping[str, int] = field(default_factory=dict)
    nonfinite: tuple[NonFiniteStep, ...] = ()
    norms: Mapping[str, PushNorm] = field(default_factory=dict)
    outliers: tuple[OutlierPush, ...] = ()
    refused: str = ""
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    last: bool = False
    leases: tuple[EpochRange, ...] = ()
    before: Mapping[str, torch.Tensor] = field(default_factory=dict)
    rows_before: dict[str, RowsBefore] = field(default_factory=dict)
    steps: int = 1
    state: StepState = StepState.ARRIVED
    record: int = 0
    time: float = 0.0
    turn: int = -1
    event: WaitEvent | None = None

    @property
    def trainer(self) -> int:
        """The trainer's number."""
        return self.process.trainer

    @property
    def assigned(self) -> list[str]:
        """The slices that it assigns."""
        return [*self.assignments, *self.buffers]

    @property
    def rows(self) -> int:
        """The number of rows of tables for which it has a gradient that was not used yet."""
        return sum([each.ids.shape[0] for each in self.row_gradients.values()])

    @property
    def skipped(self) -> bool:
        """Whether its gradients do not count."""
        return self.overflow or bool(self.refused)


@dataclass(slots=True)
class LaneUpdate:
    """One update of one lane: the steps that a record decides, with all that the update reads.

    Attributes:
        lane: its index in the plan.
        record: the number of the record.
        time: of the record, in seconds since 1970.
        decided: the steps' names, as the record has them, in the order of the trainers.
        steps: by trainer.
        buffers: of the model, which the steps bring.
        coefficients: where norms clip.
        entry: what is recorded of it; None: nothing is.
    """

    lane: int
    record: int
    time: float
    decided: tuple[ProcessStep, ...]
    steps: Mapping[int, Step]
    buffers: Gathered = field(default_factory=dict)
    coefficients: Mapping[str, float] = field(default_factory=dict)
    entry: PendingEntry | None = None

    @property
    def own(self) -> Step:
        """The only step, where each is an update of its own."""
        (step,) = self.steps.values()
        return step
