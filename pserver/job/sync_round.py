"""One sync step on a server: what the trainers have sent of it, and how far it has come.  Pure
state, no waiting.

::

    COLLECTING --all have committed--> APPLYING --> APPLIED
           `--where norms clip--> MERGING --> MERGED --coefficient known--^

The two "-ING" in the middle mean that somebody works on the tensors, outside the job's lock.
Meanwhile the others wait, or send the slices that are updated already.

A trainer that leaves while others collect is no longer waited for; its gradient of an earlier step
is never used again.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from pserver.dense.merge import mean, squared_norm
from pserver.dense.slice_update import SliceUpdate, update_all
from pserver.errors import FingerprintMismatch
from pserver.job.update_task import UpdateTask
from pserver.table.gradient import RowGradient, total_of
from transpiler.ir.rules import Hparam

if TYPE_CHECKING:
    from pserver.job.locked_table import LockedTable

Hparams = Mapping[int, Mapping[str, Hparam]]


class Phase(enum.Enum):
    """How far a round has come."""

    COLLECTING = enum.auto()
    MERGING = enum.auto()
    MERGED = enum.auto()  # merged gradients stand ready, and the trainers are told their squares
    APPLYING = enum.auto()
    APPLIED = enum.auto()


@dataclass(slots=True)
class Contribution:
    """One trainer's committed step.

    ``gradients`` are tensors by slice name; a slice without gradient is not among them, nor one
    whose gradient has been used.
    """

    gradients: dict[str, torch.Tensor]
    rows: Hparams
    overflow: bool
    tables: dict[str, RowGradient] = field(default_factory=dict)  # likewise, by table


@dataclass(slots=True)
class SyncRound:
    """The step that the trainers of a sync job are taking together."""

    phase: Phase = Phase.COLLECTING
    contributions: dict[int, Contribution] = field(default_factory=dict)  # by trainer
    merged: dict[str, torch.Tensor] = field(default_factory=dict)  # by slice
    # by parameter or table: sum of squares over what is held here
    norms: dict[str, float] = field(default_factory=dict)
    merged_rows: dict[str, RowGradient] = field(default_factory=dict)  # by table
    progress: UpdateTask | None = None  # from APPLYING on

    @property
    def committed(self) -> int:
        """Trainers whose step this is."""
        return len(self.contributions)

    @property
    def overflow(self) -> bool:
        """Whether some trainer saw a gradient that is not finite: then nobody takes the step."""
        return any(contribution.overflow for contribution in self.contributions.values())

    def add(self, trainer: int, contribution: Contribution) -> None:
        """Takes in one trainer's step.

        Raises:
            FingerprintMismatch: its hyper-parameters differ from those of a trainer that committed
                before.
        """
        for other, earlier in self.contributions.items():
            check_hparams(trainer, contribution.rows, other, earlier.rows)
        self.contributions[trainer] = contribution

    def merge(self, names: Iterable[str]) -> None:
        """Merges the gradients of these slices.  See [Note: merge order] in merge.py."""
        in_order = [self.contributions[trainer] for trainer in sorted(self.contributions)]
        for name in names if not self.overflow else ():
            gradients = [
                gradient
                for step in in_order
                if (gradient := step.gradients.pop(name, None)) is not None
            ]
            if gradients:
                self.merged[name] = mean(gradients, self.committed)
            of_rows = [
                part for step in in_order if (part := step.tables.pop(name, None)) is not None
            ]
            if of_rows:
                self.merged_rows[name] = total_of(of_rows).mul_(1 / self.committed)

    def measure(
        self, entries: Mapping[str, SliceUpdate], tables: Mapping[str, LockedTable]
    ) -> None:
        """Merges the gradients of all slices and tables, and takes the squared norms of those that
        are clipped by theirs.
        """
        self.merge([*entries, *tables])
        for name, gradient in self.merged.items():
            if entries[name].scaled is not None:
                parameter = entries[name].parameter
                self.norms[parameter] = self.norms.get(parameter, 0.0) + squared_norm(gradient)
        for name, of_rows in self.merged_rows.items():
            if tables[name].scaled is not None:
                self.norms[name] = squared_norm(of_rows.rows)

    def apply(
        self, names: Iterable[str], entries: Mapping[str, SliceUpdate], scale: Mapping[str, float]
    ) -> None:
        """Runs the optimize blocks of those of these slices that have a merged gradient."""
        rows = self.contributions[min(self.contributions)].rows
        update_all(
            entries,
            {name: self.merged.pop(name) for name in names if name in self.merged},
            rows,
            scale,
        )

    def apply_rows(
        self, names: Iterable[str], tables: Mapping[str, LockedTable], scale: Mapping[str, float]
    ) -> None:
        """Updates those of these tables that have a merged gradient."""
        rows = self.contributions[min(self.contributions)].rows
        for name in names:
            if name in self.merged_rows:
                tables[name].update(self.merged_rows.pop(name), rows, scale)


def check_hparams(trainer: int, rows: Hparams, other: int, earlier: Hparams) -> None:
    """Trainers of a sync step agree on every hyper-parameter, or are told which one they do not
    agree on.
    """
    for group in sorted(set(rows) | set(earlier)):
        mine, theirs = rows.get(group, {}), earlier.get(group, {})
        for key in sorted(set(mine) | set(theirs)):
            if mine.get(key) != theirs.get(key):
                raise FingerprintMismatch(
                    f"the trainers disagree on {key!r} of parameter group {group}: trainer "
                    f"{trainer} has {mine.get(key)}, "
                    f"trainer {other} has {theirs.get(key)}; a sync job steps every trainer's "
                    "schedule alike"
                )
