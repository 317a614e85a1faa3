"""One sync step on a server: what the trainers have sent of it, and how far it has come.  Pure state, no waiting.

::

    COLLECTING --all have committed--> MERGING --> MERGED --coefficient known, or none needed--> APPLYING --> APPLIED

The two "-ING" in the middle mean that one thread works on the tensors, outside the job's lock, and the others wait.

A trainer that leaves while others collect is no longer waited for; its gradient of an earlier step is never used again.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from pserver.entry import Entry, update_all
from pserver.errors import FingerprintMismatch
from pserver.merge import mean, squared_norm
from transpiler.plan import Number

Rows = Mapping[int, Mapping[str, Number]]


class Phase(enum.Enum):
    """How far a round has come."""

    COLLECTING = enum.auto()
    MERGING = enum.auto()
    MERGED = enum.auto()  # merged gradients stand ready; where norms clip, the trainers are told their squares
    APPLYING = enum.auto()
    APPLIED = enum.auto()


@dataclass(slots=True)
class Contribution:
    """One trainer's committed step.  ``gradients`` are flat tensors by slice name; a slice without gradient is not among them."""

    gradients: Mapping[str, torch.Tensor]
    rows: Rows
    overflow: bool


@dataclass(slots=True)
class Round:
    """The step that the trainers of a sync job are taking together."""

    phase: Phase = Phase.COLLECTING
    contributions: dict[int, Contribution] = field(default_factory=dict)  # by trainer
    merged: dict[str, torch.Tensor] = field(default_factory=dict)  # by slice
    norms: dict[str, float] = field(default_factory=dict)  # by parameter: sum of squares over the slices held here

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
            FingerprintMismatch: its hyper-parameters differ from those of a trainer that committed before.
        """
        for other, earlier in self.contributions.items():
            check_rows(trainer, contribution.rows, other, earlier.rows)
        self.contributions[trainer] = contribution

    def merge(self, entries: Mapping[str, Entry]) -> None:
        """Merges the gradients slice by slice.  See [Note: merge order] in merge.py."""
        if self.overflow:
            return
        in_order = [self.contributions[trainer] for trainer in sorted(self.contributions)]
        for name, entry in entries.items():
            gradients = [step.gradients[name] for step in in_order if name in step.gradients]
            if not gradients:
                continue
            self.merged[name] = mean(gradients, self.committed)
            if entry.scaled is not None:
                self.norms[entry.parameter] = self.norms.get(entry.parameter, 0.0) + squared_norm(self.merged[name])

    def apply(self, entries: Mapping[str, Entry], scale: Mapping[str, float]) -> None:
        """Runs the optimize block of every slice that has a gradient."""
        rows = self.contributions[min(self.contributions)].rows
        update_all(entries, self.merged, rows, scale)


def check_rows(trainer: int, rows: Rows, other: int, earlier: Rows) -> None:
    """Trainers of a sync step agree on every hyper-parameter, or are told which one they do not agree on."""
    for group in sorted(set(rows) | set(earlier)):
        mine, theirs = rows.get(group, {}), earlier.get(group, {})
        for key in sorted(set(mine) | set(theirs)):
            if mine.get(key) != theirs.get(key):
                raise FingerprintMismatch(
                    f"the trainers disagree on {key!r} of parameter group {group}: trainer {trainer} has {mine.get(key)}, "
                    f"trainer {other} has {theirs.get(key)}; a sync job steps every trainer's schedule alike"
                )
